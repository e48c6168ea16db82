"""Drawing tokens in Triton: filters by value and the Gumbel maximum in one launch, without a look at the host.

Filters are thresholds on an order-preserving integer of each logit, found among the best few or by bisection over the
row: no sort of all, and equal logits stay or go together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BEST = 512
"""Logits of a row that are put in order."""
_BLOCK = 8192
_PIECE = 4096
"""Tokens of one program of the pass that adds noise."""


@triton.jit
def _mix(x):
    """A bijection of uint32; see ``kernels._reference.sampling._mix``."""
    x ^= x >> 16
    x *= tl.full([], 0x21F0AAAD, tl.uint32)
    x ^= x >> 15
    x *= tl.full([], 0x735A2D97, tl.uint32)
    x ^= x >> 15
    return x


@triton.jit
def _noise_keys(seeds, positions, keys, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    seed = tl.load(seeds + row, mask=real, other=0)
    position = tl.load(positions + row, mask=real, other=0)
    golden = tl.full([], 0x1E3779B1, tl.uint32)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    first = _mix(_mix(low + tl.full([], 1, tl.uint32)) ^ high)
    first = _mix(first ^ position.to(tl.uint32))
    second = _mix((first + golden) ^ _mix(low ^ golden))
    tl.store(keys + row * 2, first.to(tl.int64), mask=real)
    tl.store(keys + row * 2 + 1, second.to(tl.int64), mask=real)


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See :func:`kernels.sampling.noise_keys`."""
    rows = seeds.shape[0]
    keys = torch.empty(rows, 2, dtype=torch.int64, device=seeds.device)
    if rows:
        _noise_keys[(triton.cdiv(rows, 128),)](seeds, positions, keys, rows, BLOCK=128, num_warps=1)
    return keys


@triton.jit
def _gumbel(token, first, second):
    """float32 Gumbel noise of uint32 token ids under a row's two keys."""
    bits = _mix(_mix((token * tl.full([], 0x1E3779B1, tl.uint32)) ^ first) ^ second)
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # log(1 - u) without losing the small u: the rounding of 1 - u is divided out again.
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * uniform / tl.where(lost == 0.0, 1.0, lost))
    return -tl.log(exponential)


@triton.jit
def _noise(keys, out, num_tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(keys + row * 2).to(tl.uint32)
    second = tl.load(keys + row * 2 + 1).to(tl.uint32)
    tl.store(
        out + row * num_tokens + token, _gumbel(token.to(tl.uint32), first, second), mask=token < num_tokens
    )


def gumbel_noise(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """See :func:`kernels.sampling.gumbel_noise`."""
    rows = keys.shape[0]
    out = torch.empty(rows, num_tokens, dtype=torch.float32, device=keys.device)
    if rows:
        _noise[(rows, triton.cdiv(num_tokens, 1024))](keys, out, num_tokens, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _key(value):
    """int64 in [0, 2^32) that orders as the floats do."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def _sum_from(logits, vocabulary, least, floor, most, warmth, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Over a row's tokens with key >= ``least`` and >= ``floor``: how many, or the sum of exp((x - most) * warmth)."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < vocabulary, other=-float("inf"))
        kept = (_key(value) >= least) & (_key(value) >= floor) & (token < vocabulary)
        if WEIGHED:
            total += tl.where(kept, tl.exp((value - most) * warmth), 0.0)
        else:
            total += tl.where(kept, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _kth_key(logits, vocabulary, k, BLOCK: tl.constexpr):
    """The largest key that at least k of a row's tokens reach."""
    low = tl.zeros([], tl.int64)
    high = tl.full([], 4294967296, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        enough = _sum_from(logits, vocabulary, middle, low, 0.0, 0.0, False, BLOCK) >= k.to(tl.float32)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _reaching_key(logits, vocabulary, floor, most, warmth, wanted, BLOCK: tl.constexpr):
    """The least key K >= floor such that the tokens above K weigh less than ``wanted``: K's value reaches it."""
    low = floor - 1
    high = _key(most)
    while high - low > 1:
        middle = (low + high) // 2
        small = _sum_from(logits, vocabulary, middle + 1, floor, most, warmth, True, BLOCK) < wanted
        high = tl.where(small, middle, high)
        low = tl.where(small, low, middle)
    return high


@triton.jit
def _thresholds(
    logits, best, temperature, top_k, top_p, min_p, least_keys, vocabulary, row_stride,
    COUNT: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row the least key that the filters leave. Nearly always the row's COUNT ``best`` logits, in order, settle it;
    where they do not, bisection over all of the row does."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    place = tl.arange(0, PAD)
    value = tl.load(best + row * COUNT + place, mask=place < COUNT, other=-float("inf"))
    keys = tl.where(place < COUNT, _key(value), -1)
    most = tl.max(value, 0)
    lowest = tl.sum(tl.where(place == COUNT - 1, keys, 0), 0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row).to(tl.float32)
    share = tl.load(min_p + row).to(tl.float32)
    warmth = 1.0 / tl.load(temperature + row).to(tl.float32)
    floor = tl.zeros([], tl.int64)
    if (k > 0) & (k < vocabulary):
        if k <= COUNT:
            floor = tl.sum(tl.where(place == k - 1, keys, 0), 0)
        else:
            floor = _kth_key(base, vocabulary, k, BLOCK)
    least = floor
    if p < 1.0:
        weight = tl.where(keys >= floor, tl.exp((value - most) * warmth), 0.0)
        held = tl.sum(weight, 0)
        whole = held
        if (vocabulary > COUNT) & (lowest >= floor):  # more than the best may be left
            whole = _sum_from(base, vocabulary, floor, floor, most, warmth, True, BLOCK)
        if held >= p * whole:
            before = tl.cumsum(weight, 0) - weight
            kept = (keys >= floor) & ((before < p * whole) | (place == 0))
            least = tl.min(tl.where(kept, keys, 4294967296), 0)
        else:
            least = _reaching_key(base, vocabulary, floor, most, warmth, p * whole, BLOCK)
    if share > 0.0:
        # exp((x - most) / t) >= share, solved for x once per row.
        least = tl.maximum(least, _key(most + tl.log(tl.minimum(share, 1.0)) / warmth))
    tl.store(least_keys + row, tl.minimum(tl.maximum(floor, least), _key(most)))


@triton.jit
def _best_of_piece(
    logits, temperature, keys, least_keys, values, tokens, vocabulary, row_stride, pieces, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(keys + row * 2).to(tl.uint32)
    second = tl.load(keys + row * 2 + 1).to(tl.uint32)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=-float("inf"))
    kept = (_key(value) >= tl.load(least_keys + row)) & (token < vocabulary)
    noisy = value / tl.load(temperature + row).to(tl.float32) + _gumbel(token.to(tl.uint32), first, second)
    noisy = tl.where(kept, noisy, -float("inf"))
    high = tl.max(noisy, 0)
    tl.store(values + row * pieces + piece, high)
    tl.store(tokens + row * pieces + piece, tl.min(tl.where(noisy == high, token, vocabulary), 0))


@triton.jit
def _best_of_pieces(values, tokens, out, vocabulary, pieces, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PAD)
    real = piece < pieces
    value = tl.load(values + row * pieces + piece, mask=real, other=-float("inf"))
    token = tl.load(tokens + row * pieces + piece, mask=real, other=vocabulary)
    found = tl.min(tl.where(value == tl.max(value, 0), token, vocabulary), 0)
    # Logits that are all NaN match nothing: answer a token all the same, the host finds NaN in the logprobs.
    tl.store(out + row, tl.where(found >= vocabulary, 0, found).to(tl.int64))


def least_keys(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[rows] int64: the key of the least logit that each row's filters leave. Keys order as the floats do: their bits
    plus 2^31, or for negative ones -1 less their bits."""
    rows, vocabulary = logits.shape
    least = torch.empty(rows, dtype=torch.int64, device=logits.device)
    count = min(_BEST, vocabulary)
    best = torch.topk(logits, count, dim=-1).values
    _thresholds[(rows,)](
        logits, best, temperature, top_k, top_p, min_p, least, vocabulary, logits.stride(0),
        COUNT=count, PAD=triton.next_power_of_2(count), BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return least


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """See :func:`kernels.sampling.draw`; logits' rows may lie apart."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    if logits.stride(1) != 1 or logits.dtype is not torch.float32:
        raise ValueError("logits must be float32 and contiguous in the vocabulary")
    least = least_keys(logits, temperature, top_k, top_p, min_p)
    pieces = triton.cdiv(vocabulary, _PIECE)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, pieces, dtype=torch.int32, device=device)
    _best_of_piece[(rows, pieces)](
        logits,
        temperature,
        keys,
        least,
        values,
        tokens,
        vocabulary,
        logits.stride(0),
        pieces,
        BLOCK=_PIECE,
        num_warps=8,
    )
    _best_of_pieces[(rows,)](
        values, tokens, out, vocabulary, pieces, PAD=triton.next_power_of_2(pieces), num_warps=1
    )
    return out
