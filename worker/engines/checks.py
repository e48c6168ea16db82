"""Checks of a request that every engine makes before it accepts one."""

from __future__ import annotations

from worker.api import GenerateRequest
from worker.errors import InvalidRequest


def check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidRequest naming ``prompt``, ``logit_bias`` or ``stop_token_ids`` for a token id outside the
    vocabulary."""
    sampling = request.sampling
    named = {
        "prompt": request.prompt_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in named.items():
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(name, f"Token id {bad} is not in the vocabulary of {vocab_size}.")
