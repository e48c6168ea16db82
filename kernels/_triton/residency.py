"""Decides in one launch which of a layer's missing experts take a place, and enters new owners in another.

The same rules as the tensor operations in ``memory.device.residency``, which are the truth in tests: a graph of a step
would else hold some fifty launches a layer. One program does it all: a layer has a few hundred experts, a step's queue
of victims at most a thousand places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SEEN_PAIRS = 64
FREE: tl.constexpr = tl.constexpr(-1)
BANNED: tl.constexpr = tl.constexpr(-2)


@dataclass(frozen=True, slots=True)
class ResidencyTables:
    """Device tables, int64 unless said; see :class:`memory.device.residency.Residency`.

    Attributes:
        address, host: [rows * experts + 1]; seen: the same; uses: the same, float32.
        owner, stamp, generation: [places + 1].
        queue: [n] places; ready: [n + 1] scratch.
        step, demand: []; frozen: [] bool.
        taken: [experts], the place each expert of the last decided layer took, ``num_places`` where none.
        counts: [lanes, rows].
    """

    address: torch.Tensor
    host: torch.Tensor
    seen: torch.Tensor
    uses: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    generation: torch.Tensor
    queue: torch.Tensor
    ready: torch.Tensor
    step: torch.Tensor
    demand: torch.Tensor
    frozen: torch.Tensor
    taken: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _worth(uses, seen, step, recency, IS_LRU: tl.constexpr):
    if IS_LRU:
        return seen.to(tl.float32) + 1.0
    else:
        age = tl.maximum(step - seen, 0).to(tl.float32) + 1.0
        return uses + recency / age


@triton.jit(do_not_specialize=["row", "pairs"])
def _decide(
    chosen, stamping, tee, address, host, seen, uses, owner, stamp, generation, queue, ready, step_at, demand, frozen,
    taken, counts, row, pairs, per_token, num_experts, num_places, num_rows, queue_len, base, place_bytes,
    recency, frozen_margin,
    IS_LRU: tl.constexpr, EXPERTS: tl.constexpr, QUEUE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    wanted = tl.zeros([EXPERTS], tl.int32)
    others = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        choice = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        stamps = tl.load(stamping + pair // per_token, mask=pair < pairs, other=0).to(tl.int32)
        same = (choice[:, None] == expert[None, :]).to(tl.int32)
        wanted = tl.maximum(wanted, tl.max(same * stamps[:, None], 0))
        others = tl.maximum(others, tl.max(same * (1 - stamps)[:, None], 0))
    step = tl.load(step_at)
    flat = (row * num_experts + expert).to(tl.int64)
    here = tl.load(address + flat, mask=real, other=0)
    on_host = here == tl.load(host + flat, mask=real, other=0)
    want = (wanted > 0) & real
    hit = want & (on_host == 0)
    miss = want & on_host
    place = (here - base) // place_bytes
    tl.store(stamp + place, step, mask=hit)
    own_uses = tl.load(uses + flat, mask=real, other=0.0) + want.to(tl.float32)
    tl.store(uses + flat, own_uses, mask=want)
    own_seen = tl.where(want, step, tl.load(seen + flat, mask=real, other=-1))
    tl.store(seen + flat, own_seen, mask=want)
    tl.store(demand, tl.load(demand) + tl.sum(want.to(tl.int64), 0))

    # The n-th miss meets the n-th of the queue that may be a victim now. What this layer has just stamped is its own.
    slot = tl.arange(0, QUEUE)
    candidate = tl.load(queue + slot, mask=slot < queue_len, other=num_places)
    there = candidate < num_places
    holder = tl.load(owner + candidate, mask=there, other=BANNED)
    last = tl.load(stamp + candidate, mask=there, other=step)
    ours = (holder >= 0) & (holder // num_experts == row)
    fit = there & (last < step) & (ours == 0) & (holder != BANNED)
    number = tl.cumsum(fit.to(tl.int32), 0) - 1
    tl.store(ready + number, candidate, mask=fit)
    num_fit = tl.sum(fit.to(tl.int32), 0)
    tl.debug_barrier()
    rank = tl.cumsum(miss.to(tl.int32), 0) - 1
    may = miss & (rank < num_fit)
    victim = tl.load(ready + rank, mask=may, other=num_places)
    old = tl.load(owner + victim, mask=may, other=FREE)
    held = may & (old >= 0)
    is_frozen = tl.load(frozen).to(tl.int32)
    if IS_LRU:
        better = tl.where(is_frozen > 0, 0, 1) + tl.zeros([EXPERTS], tl.int32) > 0
    else:
        margin = tl.where(is_frozen > 0, frozen_margin, 1.0)
        worth = _worth(own_uses, own_seen, step, recency, IS_LRU)
        old_uses = tl.load(uses + old, mask=held, other=0.0)
        old_seen = tl.load(seen + old, mask=held, other=0)
        better = worth > margin * _worth(old_uses, old_seen, step, recency, IS_LRU)
    take = may & ((old == FREE) | better)
    evicted = take & held
    tl.store(address + old, tl.load(host + old, mask=evicted, other=0), mask=evicted)
    tl.store(owner + victim, tl.full([EXPERTS], -1, tl.int64), mask=take)
    tl.store(generation + victim, tl.load(generation + victim, mask=take, other=0) + 1, mask=take)
    tl.store(stamp + victim, tl.zeros([EXPERTS], tl.int64) + step, mask=take)
    tl.store(taken + expert, tl.where(take, victim, num_places), mask=real)
    tl.store(tee + expert, tl.where(take, base + victim * place_bytes, 0), mask=real)

    alone = (others > 0) & (wanted == 0) & real
    lane = counts + row
    tl.store(lane, tl.load(lane) + tl.sum(hit.to(tl.int64), 0))
    lane += num_rows
    tl.store(lane, tl.load(lane) + tl.sum(take.to(tl.int64), 0))
    lane += num_rows
    tl.store(lane, tl.load(lane) + tl.sum((miss & (take == 0)).to(tl.int64), 0))
    lane += num_rows
    tl.store(lane, tl.load(lane) + tl.sum((alone & (on_host == 0)).to(tl.int64), 0))
    lane += num_rows
    tl.store(lane, tl.load(lane) + tl.sum((alone & on_host).to(tl.int64), 0))
    lane += num_rows
    tl.store(lane, tl.load(lane) + tl.sum(evicted.to(tl.int64), 0))


@triton.jit(do_not_specialize=["row"])
def _publish(taken, address, owner, row, num_experts, num_places, base, place_bytes, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)
    place = tl.load(taken + expert, mask=expert < num_experts, other=num_places)
    take = place < num_places
    flat = (row * num_experts + expert).to(tl.int64)
    tl.store(owner + place, flat, mask=take)
    tl.store(address + flat, base + place * place_bytes, mask=take)


def decide(
    tables: ResidencyTables, row: int, experts: torch.Tensor, stamping: torch.Tensor, base: int, place_bytes: int,
    recency: float, frozen_margin: float, *, is_lru: bool,
) -> torch.Tensor:  # fmt: skip
    """See :meth:`memory.device.residency.Residency.decide`; answers [experts] int64."""
    num_rows = tables.counts.shape[1]
    num_experts = (len(tables.address) - 1) // num_rows
    tee = torch.empty(num_experts, dtype=torch.int64, device=experts.device)
    _decide[(1,)](
        experts.contiguous(), stamping, tee, tables.address, tables.host, tables.seen, tables.uses, tables.owner,
        tables.stamp, tables.generation, tables.queue, tables.ready, tables.step, tables.demand, tables.frozen,
        tables.taken, tables.counts, row, experts.numel(), experts.shape[1], num_experts, len(tables.owner) - 1,
        num_rows, len(tables.queue), base, place_bytes, recency, frozen_margin, IS_LRU=is_lru,
        EXPERTS=triton.next_power_of_2(num_experts), QUEUE=triton.next_power_of_2(max(len(tables.queue), 2)),
        PAIRS=SEEN_PAIRS, num_warps=8,
    )  # fmt: skip
    return tee


def publish(tables: ResidencyTables, row: int, base: int, place_bytes: int) -> None:
    """See :meth:`memory.device.residency.Residency.publish`."""
    num_experts = len(tables.taken)
    _publish[(1,)](
        tables.taken, tables.address, tables.owner, row, num_experts, len(tables.owner) - 1, base, place_bytes,
        EXPERTS=triton.next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip
