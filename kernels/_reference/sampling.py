"""Drawing tokens from logits in plain torch."""

from __future__ import annotations

import torch

_LOW_32 = 0xFFFFFFFF
_GOLDEN = 0x1E3779B1
# Multipliers below 2^31: a 32-bit value times one of them stays inside int64 on every device.
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit values (held in int64) in which every input bit moves every output bit; in place."""
    x ^= x >> 16
    x.mul_(_FIRST).bitwise_and_(_LOW_32)
    x ^= x >> 15
    x.mul_(_SECOND).bitwise_and_(_LOW_32)
    x ^= x >> 15
    return x


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows, 2] 32-bit keys of (seed, position)."""
    low, high = seeds & _LOW_32, (seeds >> 32) & _LOW_32
    first = _mix(_mix(low + 1 & _LOW_32) ^ high)
    first = _mix(first ^ (positions & _LOW_32))
    second = _mix((first + _GOLDEN & _LOW_32) ^ _mix(low ^ _GOLDEN))
    return torch.stack([first, second], 1)


def gumbel_noise(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[rows, num_tokens] float32 Gumbel noise; see the face."""
    token = torch.arange(num_tokens, device=keys.device).mul_(_GOLDEN).bitwise_and_(_LOW_32)
    bits = _mix(_mix(token.unsqueeze(0) ^ keys[:, :1]) ^ keys[:, 1:])
    # An exponential from a uniform that is finest near 0, where the winners are; never 1, whose log is infinite.
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return torch.log1p(uniform.neg_()).neg_().log_().neg_()


def penalise(
    logits: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalties on [rows, vocabulary] logits, in place; see the face."""
    produced = counts > 0
    strength = torch.where(seen | produced, repetition.unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / strength, logits * strength))
    logits.sub_(counts * frequency.unsqueeze(1))
    logits.sub_(produced * presence.unsqueeze(1))
    return logits


def allow_only(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Sets to -inf, in place, what the bit masks forbid; see the face."""
    bit = torch.arange(32, device=masks.device, dtype=torch.int32)
    allowed = (masks.unsqueeze(-1) >> bit).bitwise_and_(1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill_(~allowed, -torch.inf)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """One token per row; see the face."""
    scaled = logits / temperature.unsqueeze(1)
    vocabulary = scaled.shape[1]
    limited = ((top_k > 0) & (top_k < vocabulary)).nonzero().squeeze(1)
    if limited.numel():
        _keep_top_k(scaled, top_k, limited)
    filtered = ((top_p < 1.0) | (min_p > 0.0)).nonzero().squeeze(1)
    if filtered.numel():
        _keep_likely(scaled, top_p, min_p, filtered)
    return torch.argmax(scaled.add_(gumbel_noise(keys, vocabulary)), -1)


def _keep_top_k(scaled: torch.Tensor, top_k: torch.Tensor, rows: torch.Tensor) -> None:
    wanted = top_k.index_select(0, rows)
    part = scaled.index_select(0, rows)
    best = torch.topk(part, int(wanted.max()), dim=-1).values
    least = best.gather(1, (wanted - 1).unsqueeze(1))
    scaled.index_copy_(0, rows, part.masked_fill_(part < least, -torch.inf))


def _keep_likely(scaled: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, rows: torch.Tensor) -> None:
    part = scaled.index_select(0, rows)
    probability = torch.softmax(part, -1)
    ordered = probability.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    kept = before < top_p.index_select(0, rows).unsqueeze(1)
    kept[:, 0] = True
    least = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    least = torch.maximum(least, ordered[:, :1] * min_p.index_select(0, rows).unsqueeze(1))
    scaled.index_copy_(0, rows, part.masked_fill_(probability < least, -torch.inf))
