"""Loads a checkpoint with stock transformers as the numerical reference, windows past their size included."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo.packing import restore
from worker.models.transformers_window import apply_attention_windows


def load_reference(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in ``path``, in evaluation mode on the CPU, with ``attention_window_sizes`` applied when present."""
    model = AutoModelForCausalLM.from_pretrained(str(restore(path)), dtype=dtype)
    apply_attention_windows(model)
    return model.eval()
