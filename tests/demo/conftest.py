"""The shipped checkpoint, loaded once for all tests of this folder that need it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo.reference import load_reference

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return MODEL


@pytest.fixture(scope="session")
def demo_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(MODEL))


@pytest.fixture(scope="session")
def demo_model() -> PreTrainedModel:
    return load_reference(MODEL, torch.float32)
