"""Drawing tokens from logits: penalties, masks, filters, and noise that is a hash of (seed, position, token)."""

from __future__ import annotations

import torch

from kernels._native import ops as native
from kernels._reference import sampling as reference


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[rows] int64 likeliest token of [rows, vocabulary] logits; ties go to the lowest id."""
    if native.serves(logits) and logits.stride(1) == 1:
        return native.greedy(logits)
    return torch.argmax(logits, -1)


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows, 2] int64 keys (32 bits each) of [rows] int64 seeds and positions, the same on every device."""
    if seeds.is_cuda:
        from kernels._triton import sampling as on_gpu

        return on_gpu.noise_keys(seeds, positions)
    return reference.noise_keys(seeds, positions)


def gumbel_noise(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[rows, num_tokens] float32 Gumbel noise: a function of a row's keys and the token id alone."""
    if keys.is_cuda:
        from kernels._triton import sampling as on_gpu

        return on_gpu.gumbel_noise(keys, num_tokens)
    return reference.gumbel_noise(keys, num_tokens)


def penalise(
    logits: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Applies penalties in place and answers ``logits``.

    Args:
        logits: [rows, vocabulary] float32.
        seen: [rows, vocabulary] bool, tokens of the prompt.
        counts: [rows, vocabulary], how often each token was generated.
        presence, frequency: [rows], subtracted once, and per occurrence, from generated tokens (OpenAI).
        repetition: [rows], divides positive and multiplies negative logits of prompt and generated tokens (CTRL).
    """
    return reference.penalise(logits, seen, counts, presence, frequency, repetition)


def allow_only(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Sets in place to -inf the tokens whose bit is clear in [rows, ceil(vocabulary / 32)] int32 masks, lowest bit
    first."""
    return reference.allow_only(logits, masks)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Draws [rows] int64 tokens by the Gumbel maximum over what the filters leave.

    Filters act on values, so equal logits stay or go together: top-k keeps all that reach the k-th largest logit,
    top-p the likeliest tokens up to the one with which their sum reaches it, min-p what has at least that share of
    the likeliest token's probability.

    Args:
        logits: [rows, vocabulary] float32, left unchanged.
        temperature: [rows] above 0; top_k: [rows] int64, 0 for all; top_p, min_p: [rows].
        keys: [rows, 2] as :func:`noise_keys` answers them.
    """
    if logits.is_cuda:
        from kernels._triton import sampling as on_gpu

        return on_gpu.draw(logits, temperature, top_k, top_p, min_p, keys)
    return reference.draw(logits, temperature, top_k, top_p, min_p, keys)
