"""Draws a token from logits with the rules of :class:`SamplingParams`, one request at a time, in plain torch.

Written to be read and to check faster samplers against, not to be fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from worker.api import SamplingParams, TokenLogprobs
from worker.execution.sampler import LEAST_TEMPERATURE


def choose_token(
    logits: Tensor,
    sampling: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    ends: frozenset[int],
    seed: int,
) -> int:
    """The next token id.

    Args:
        logits: [vocab] raw logits of the position.
        sampling: the request's rules.
        prompt, generated: the request's tokens so far.
        ends: tokens that end this request's output; impossible before ``min_tokens``.
        seed: of the noise, which is a hash of (seed, position).
    """
    adjusted = adjusted_logits(logits, sampling, prompt, generated)
    if len(generated) < sampling.min_tokens and ends:
        adjusted[sorted(ends)] = -torch.inf
    if sampling.temperature < LEAST_TEMPERATURE:
        return int(adjusted.argmax())  # the first of equal ones, as documented
    probabilities = kept_probabilities(adjusted / sampling.temperature, sampling)
    noise = position_generator(seed, len(prompt) + len(generated))
    return int(torch.multinomial(probabilities.cpu(), 1, generator=noise))


def adjusted_logits(
    logits: Tensor, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """[vocab] float32 logits after penalties and ``logit_bias``.

    The repetition penalty looks at prompt and output and divides positive, multiplies negative logits (CTRL, Keskar
    et al. 2019, as in Hugging Face). Presence and frequency penalties look at the output alone and are subtracted
    (OpenAI API reference).
    """
    logits = logits.float().clone()
    seen = sorted({*prompt, *generated})
    if sampling.repetition_penalty != 1.0:
        picked = logits[seen]
        logits[seen] = torch.where(
            picked > 0, picked / sampling.repetition_penalty, picked * sampling.repetition_penalty
        )
    for token, count in Counter(generated).items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    return logits


def kept_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[vocab] probabilities after top-k, top-p and min-p, each on what the one before left; they sum to 1.

    top-p keeps the likeliest tokens up to and including the one that reaches the sum ``top_p``; min-p keeps tokens
    of at least ``min_p`` times the likeliest one's probability. Of equal tokens the lowest id goes first.
    """
    ordered, order = torch.sort(logits, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        kept[sampling.top_k :] = False
    probabilities = _renormalised(ordered, kept)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        kept &= before < sampling.top_p
        kept[0] = True  # against a rounded-off sum: the likeliest token always stays
        probabilities = _renormalised(ordered, kept)
    if sampling.min_p > 0.0:
        kept &= probabilities >= sampling.min_p * probabilities[0]
        probabilities = _renormalised(ordered, kept)
    return torch.zeros_like(logits).scatter(0, order, probabilities)


def _renormalised(ordered: Tensor, kept: Tensor) -> Tensor:
    return torch.softmax(ordered.masked_fill(~kept, -torch.inf), dim=0)


def position_generator(seed: int, position: int) -> torch.Generator:
    """A CPU generator whose draws depend on (seed, position) alone."""
    digest = blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def token_logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """The log-probability (natural, of the raw [vocab] logits) of ``token`` and of the ``num_top`` likeliest."""
    logprobs = torch.log_softmax(logits.float(), dim=0)
    ordered, order = torch.sort(logprobs, descending=True, stable=True)
    top = zip(order[:num_top].tolist(), ordered[:num_top].tolist(), strict=True)
    return TokenLogprobs(token, float(logprobs[token]), tuple(top))
