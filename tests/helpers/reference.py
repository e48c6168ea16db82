"""Stock transformers as the numerical reference of generated sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

from worker.api import TokenLogprobs
from worker.models.transformers_window import apply_attention_windows

TIE_MARGIN = 1e-4
"""Where the reference's two best log-probabilities lie closer, either is right."""
LOGPROB_TOLERANCE = 1e-4


@cache
def reference_model(folder: Path) -> transformers.PreTrainedModel:
    """The folder's model in float32, windows applied."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    apply_attention_windows(model)
    return model


@dataclass(frozen=True)
class Agreement:
    """``mismatches``: positions whose token is not the reference's although its margin is clear."""

    positions: int
    mismatches: int
    near_ties: int
    max_logprob_diff: float


def compare(
    folder: Path, prompt: Sequence[int], generated: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Agreement:
    """Scores greedily generated tokens in one reference pass over prompt and output, so that every position is judged
    on its own prefix; all reported log-probabilities are compared, top ones too."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([[*prompt, *generated]]), use_cache=False).logits[0]
    scores = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    best = scores.topk(2, -1)
    mismatches = near_ties = 0
    worst = 0.0
    for i, (token, said) in enumerate(zip(generated, logprobs, strict=True)):
        assert said.token_id == token
        clear = bool(best.values[i, 0] - best.values[i, 1] >= TIE_MARGIN)
        near_ties += not clear
        mismatches += clear and token != int(best.indices[i, 0])
        pairs = [(token, said.logprob), *said.top]
        worst = max(worst, *(abs(scores[i, t].item() - value) for t, value in pairs))
    return Agreement(len(generated), mismatches, near_ties, worst)
