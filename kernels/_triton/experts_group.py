"""What stands around the expert products: pairs grouped by expert, outputs summed, small parts of blocks copied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._reference.experts import DENSE, FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4, BlockFormat
from kernels._triton.expert_spans import place_of
from kernels._triton.overlap import overlaps

MAX_COUNTED_PAIRS = 4096
"""Up to so many (token, choice) pairs each finds its rank by looking at all others, in one launch; beyond, a sort."""
RANKED, SEEN, SPLIT_COLUMNS, COPIED_WORDS = 32, 256, 512, 2048


@triton.jit(do_not_specialize=["pairs", "num_rank", "num_start"])
def _group(
    experts, order, starts, x, split, pairs, num_experts, num_rank, num_start, width, x_stride, split_stride,
    KIND: tl.constexpr, FACTOR: tl.constexpr, RANKED: tl.constexpr, SEEN: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    # BESIDE launches that only began when experts and x were complete, nothing has to be waited for; past the cache of
    # the multiprocessor, since what they wait for themselves was not waited for here.
    CACHE: tl.constexpr = ".cg" if BESIDE else ""
    if PDL:
        gdc_launch_dependents()
        if not BESIDE:
            gdc_wait()
    program = tl.program_id(0)
    if program < num_rank:
        pair = program * RANKED + tl.arange(0, RANKED)
        key = tl.load(experts + pair, mask=pair < pairs, other=-1, cache_modifier=CACHE)
        key = tl.where(key < 0, num_experts, key)
        rank = tl.zeros([RANKED], tl.int32)
        for start in range(0, pairs, SEEN):
            other = start + tl.arange(0, SEEN)
            seen = tl.load(experts + other, mask=other < pairs, other=0, cache_modifier=CACHE)
            seen = tl.where(seen < 0, num_experts, seen)
            before = (seen[None, :] < key[:, None]) | (
                (seen[None, :] == key[:, None]) & (other[None, :] < pair[:, None])
            )
            rank += tl.sum((before & (other < pairs)[None, :]).to(tl.int32), 1)
        tl.store(order + rank, pair.to(tl.int64), mask=pair < pairs)
    elif program < num_rank + num_start:
        expert = (program - num_rank) * RANKED + tl.arange(0, RANKED)
        count = tl.zeros([RANKED], tl.int32)
        for start in range(0, pairs, SEEN):
            other = start + tl.arange(0, SEEN)
            seen = tl.load(experts + other, mask=other < pairs, other=-1, cache_modifier=CACHE)
            count += tl.sum(((seen >= 0)[None, :] & (seen[None, :] < expert[:, None])).to(tl.int32), 1)
        tl.store(starts + expert, count.to(tl.int64), mask=expert <= num_experts)
    else:
        blocks = tl.cdiv(split_stride, COLUMNS)
        block = program - num_rank - num_start
        token = (block // blocks).to(tl.int64)
        column = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
        value = tl.load(x + token * x_stride + column, mask=column < width, other=0.0, cache_modifier=CACHE)
        if KIND < 0:
            place = (column % 2) * (width // 2) + column // 2
        else:
            place = place_of(column, KIND)
            value = (value.to(tl.float32) * FACTOR).to(split.dtype.element_ty)
        tl.store(split + token * split_stride + place, value, mask=column < split_stride)
    if PDL and BESIDE:
        gdc_wait()  # whoever waits for this launch waits for those beside it too


def launch_options(
    x: torch.Tensor, block: BlockFormat, inner: int, tee: torch.Tensor | None
) -> dict[str, int | bool]:
    """What both general products are told about a block and the inputs."""
    bits = {DENSE: x.element_size() * 8, FP8_BLOCK: 8, INT4: 4, MXFP4: 4}[block.kind]
    row_bytes = (x.shape[1] * bits // 8, inner * bits // 8)
    return {
        "KIND": block.kind,
        "SIDE": FP8_BLOCK_SIZE,
        # Rows that begin at whole lines of 16 bytes are read so.
        "ALIGN": 16 if all(n % 16 == 0 for n in row_bytes) else 1,
        "ASM": x.dtype is torch.bfloat16 and not knobs.runtime.interpret,
        "TEE": tee is not None,
    }


def padded(columns: int) -> int:
    """Columns of a row of inputs in the order of spans."""
    return -(-columns // 256) * 256


def group_pairs(
    experts: torch.Tensor,
    num_experts: int,
    x: torch.Tensor,
    *,
    split: bool,
    span_kind: int = -1,
    factor: float = 1.0,
    beside: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, choice) pairs sorted by expert, without a host sync, and the inputs as the products read them.

    Args:
        experts: [tokens, experts_per_token] int64 contiguous, -1 in padding rows.
        x: [tokens, H] contiguous rows. split: put the even columns of each row before its odd ones.
        span_kind: with ``split``, the kind of weights whose order of spans the columns take instead, times ``factor``
            and with zeros behind them up to ``padded(H)``.
        beside: the launches just ahead began when experts and x were complete, do not change them, and keep what they
            read and write for as long as the products run: the pairs need not wait for them. Whoever waits for the
            pairs waits for them too.

    Returns:
        order [pairs] int64, pair numbers by expert and then by token, padding last; starts [num_experts + 1] int64;
        x, split or as it is.
    """
    pairs, width = experts.numel(), x.shape[1]
    columns = width if span_kind < 0 else padded(width)
    inputs = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device) if split else x
    num_split = x.shape[0] * triton.cdiv(columns, SPLIT_COLUMNS) if split else 0
    num_rank, num_start = triton.cdiv(pairs, RANKED), triton.cdiv(num_experts + 1, RANKED)
    if pairs > MAX_COUNTED_PAIRS:
        flat = experts.flatten()
        ordered, order = torch.sort(torch.where(flat < 0, num_experts, flat), stable=True)
        starts = torch.searchsorted(
            ordered, torch.arange(num_experts + 1, device=x.device, dtype=ordered.dtype)
        )
        num_rank, num_start = 0, 0
    else:
        order = torch.empty(pairs, dtype=torch.int64, device=x.device)
        starts = torch.empty(num_experts + 1, dtype=torch.int64, device=x.device)
    programs = num_rank + num_start + num_split
    if programs:
        overlap = overlaps(x)
        _group[(programs,)](
            experts.contiguous(), order, starts, x, inputs, pairs, num_experts, num_rank, num_start, width, x.stride(0),
            columns, KIND=span_kind, FACTOR=factor, RANKED=RANKED, SEEN=SEEN, COLUMNS=SPLIT_COLUMNS, PDL=overlap,
            BESIDE=beside, launch_pdl=overlap,
        )  # fmt: skip
    return order, starts, inputs


@triton.jit
def _combine(
    partial, weights, experts, out, experts_per_token, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(0, experts_per_token):
        pair = token * experts_per_token + choice
        value = tl.load(partial + pair * width + column, mask=inside, other=0.0)
        # A pair without an expert (a padding row) has no row in `partial`: what lies there may be NaN.
        total += tl.where(tl.load(experts + pair) >= 0, tl.load(weights + pair) * value, 0.0)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def combine(
    partial: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """[tokens, H] in ``like``'s dtype: each token's choices times their weights, added in their order."""
    out = torch.empty_like(like)
    tokens, width = like.shape
    _combine[(tokens, triton.cdiv(width, 512))](
        partial, weights, experts.contiguous(), out, experts.shape[1], width, BLOCK=512, PDL=overlaps(like),
        launch_pdl=overlaps(like),
    )  # fmt: skip
    return out


@triton.jit
def copy_words(
    source, target, piece, first_0, first_1, first_2, size_0, size_1, size_2, BLOCK: tl.constexpr
):  # fmt: skip
    """Piece number ``piece`` of three ranges of words of 8 bytes, to the same places behind ``target``."""
    word = piece * BLOCK + tl.arange(0, BLOCK)
    at = tl.where(
        word < size_0,
        first_0 + word,
        tl.where(word < size_0 + size_1, first_1 + word - size_0, first_2 + word - size_0 - size_1),
    )
    inside = word < size_0 + size_1 + size_2
    value = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask=inside)
    tl.store(target.to(tl.pointer_type(tl.int64)) + at, value, mask=inside)


@triton.jit
def _copy(
    table, targets, first_0, first_1, first_2, size_0, size_1, size_2, BLOCK: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    target = tl.load(targets + expert)
    if target == 0:
        return
    source = tl.load(table + expert)
    copy_words(source, target, tl.program_id(1), first_0, first_1, first_2, size_0, size_1, size_2, BLOCK)


def small_parts(
    block: BlockFormat, inner: int, width: int, element_size: int
) -> tuple[int, int, int, int, int, int]:
    """What a block holds beside its two matrices (scales, zero points, biases, orders), as three ranges of words of 8
    bytes: their beginnings and then their sizes. Outwards: a few bytes of a matrix may be in them."""
    bits = {DENSE: element_size * 8, FP8_BLOCK: 8, INT4: 4, MXFP4: 4}[block.kind]
    matrices = sorted(
        [(block.gate_up, 2 * inner * width * bits // 8), (block.down, inner * width * bits // 8)]
    )
    edges = [0]
    for first, size in matrices:
        edges += [-(-first // 8), (first + size) // 8]
    edges.append(block.num_bytes // 8)
    first, second, third = (max(0, edges[i + 1] - edges[i]) for i in (0, 2, 4))
    return edges[0], edges[2], edges[4], first, second, third


def copy_small_parts(
    table: torch.Tensor, targets: torch.Tensor, block: BlockFormat, inner: int, width: int, element_size: int
) -> None:
    """Copies them for each expert whose target is not 0; the products stored the matrices themselves."""
    ranges = small_parts(block, inner, width, element_size)
    total = sum(ranges[3:])
    if total == 0:
        return
    _copy[(table.shape[0], triton.cdiv(total, COPIED_WORDS))](table, targets, *ranges, BLOCK=COPIED_WORDS)


def copy_blocks(table: torch.Tensor, targets: torch.Tensor, num_bytes: int) -> None:
    """Copies the block at ``table[expert]`` to ``targets[expert]`` for every expert whose target is not 0.

    Args:
        table, targets: [num_experts] int64 addresses, 128-byte aligned.
        num_bytes: of a block, a multiple of 128.
    """
    grid = (table.shape[0], triton.cdiv(num_bytes, 8 * COPIED_WORDS))
    _copy[grid](table, targets, 0, 0, 0, num_bytes // 8, 0, 0, BLOCK=COPIED_WORDS)
