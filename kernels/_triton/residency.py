"""Decides in one launch which of a layer's missing experts take a place, and enters the owners of the layer before.

The same rules as the tensor operations in ``memory.device.residency``, which are the truth in tests: a graph of a step
would else hold some fifty launches a layer. One program does it all: a layer has a few hundred experts, a step's queue
of victims at most a thousand places. Where every expert is resident it ends behind two reads.

The kernel behind may begin once what lies ahead is complete, not only when this decision is: it reads the layer's
inputs and addresses, which the decision leaves alone, and waits before it asks where blocks are to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

COMPARED_PAIRS = 64
"""Up to so many pairs are compared with every expert at once; more leave marks in a table."""
MARKING_PAIRS = 1024
RANKED_AT_ONCE = 32
"""Experts that every missing one is compared with at once."""
LINE_SHIFT: tl.constexpr = tl.constexpr(7)
"""Places are whole lines of 128 bytes: in lines their numbers come from a 32-bit division."""
NUM_LANES: tl.constexpr = tl.constexpr(6)
FREE: tl.constexpr = tl.constexpr(-1)
BANNED: tl.constexpr = tl.constexpr(-2)


@dataclass(frozen=True, slots=True)
class ResidencyTables:
    """Device tables, int64 unless said; see :class:`memory.device.residency.Residency`.

    Attributes:
        address, host: [rows * experts + 1]; seen: the same; uses: the same, float32.
        owner, stamp, generation: [places + 1].
        queue: [n] places; ready: [n + 1] scratch.
        step, stamping, demand: []; frozen: [] bool.
        taken: [experts], the place each expert of the last decided layer took, ``num_places`` where none.
        marks: [2, experts] int32 scratch, zero between decisions.
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
    stamping: torch.Tensor
    demand: torch.Tensor
    frozen: torch.Tensor
    taken: torch.Tensor
    marks: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _worth(uses, seen, step, recency, IS_LRU: tl.constexpr):
    if IS_LRU:
        return seen.to(tl.float32) + 1.0
    else:
        age = tl.maximum(step - seen, 0).to(tl.float32) + 1.0
        return uses + recency / age


@triton.jit
def _place_of(address, base, place_bytes):
    """The place at an address; anything for an address in host memory."""
    return ((address - base) >> LINE_SHIFT).to(tl.int32) // (place_bytes >> LINE_SHIFT).to(tl.int32)


@triton.jit
def _rank(key, marks, expert, real, num_experts, EXPERTS: tl.constexpr, SEEN: tl.constexpr):
    """The position of each expert by falling ``key`` (int32), ties by number; ``marks`` is scratch, and is left so."""
    tl.debug_barrier()
    tl.store(marks + expert, key, mask=real)
    tl.debug_barrier()
    rank = tl.zeros([EXPERTS], tl.int32)
    for start in tl.static_range(0, EXPERTS, SEEN):
        other = start + tl.arange(0, SEEN)
        theirs = tl.load(marks + other, mask=other < num_experts, other=-1)
        ahead = (theirs[None, :] > key[:, None]) | (
            (theirs[None, :] == key[:, None]) & (other[None, :] < expert[:, None])
        )
        rank += tl.sum(ahead.to(tl.int32), 1)
    return rank


@triton.jit
def _enter(place, address, owner, expert, row, num_experts, num_places, base, place_bytes):
    """Owners and addresses of the experts of ``row`` that took a ``place``."""
    take = place < num_places
    flat = (row * num_experts + expert).to(tl.int64)
    tl.store(owner + place, flat, mask=take)
    tl.store(address + flat, base + place * place_bytes, mask=take)


@triton.jit
def _distinct(
    chosen, stamping, marks, expert, real, pairs, per_token, num_experts,
    COMPARES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Which experts the stamping rows chose, and which the others did."""
    if COMPARES:
        pair = tl.arange(0, PAIRS)
        choice = tl.load(chosen + pair, mask=pair < pairs, other=-1).to(tl.int32)
        stamps = (pair // per_token < stamping).to(tl.int32)
        same = (choice[:, None] == expert[None, :]).to(tl.int32)
        wanted = tl.max(same * stamps[:, None], 0) > 0
        others = tl.max(same * (1 - stamps)[:, None], 0) > 0
    else:
        for start in range(0, pairs, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            choice = tl.load(chosen + pair, mask=pair < pairs, other=-1)
            which = tl.where(pair // per_token < stamping, 0, num_experts)
            tl.store(marks + which + choice, tl.full([PAIRS], 1, tl.int32), mask=choice >= 0)
        tl.debug_barrier()
        wanted = tl.load(marks + expert, mask=real, other=0) > 0
        others = tl.load(marks + num_experts + expert, mask=real, other=0) > 0
        tl.debug_barrier()
        tl.store(marks + expert, expert * 0, mask=real)
        tl.store(marks + num_experts + expert, expert * 0, mask=real)
    return wanted & real, others & real


@triton.jit(do_not_specialize=["row", "pairs", "published"])
def _decide(
    chosen, tee, read, address, host, seen, uses, owner, stamp, generation, queue, ready, step_at, stamping_at, demand,
    frozen, taken, marks, counts, row, pairs, published, per_token, num_experts, num_places, num_rows, queue_len, base,
    place_bytes, recency, frozen_margin,
    IS_LRU: tl.constexpr, EXPERTS: tl.constexpr, QUEUE: tl.constexpr, COMPARES: tl.constexpr, PAIRS: tl.constexpr,
    HAS_READ: tl.constexpr, OVERLAP: tl.constexpr, RANKED: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # All reads that do not follow from others come first: one wait for memory, not six.
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    flat = (row * num_experts + expert).to(tl.int64)
    before = tl.load(taken + expert, mask=real, other=num_places)
    before = tl.where(published >= 0, before, num_places)
    here = tl.load(address + flat, mask=real, other=0)
    home = tl.load(host + flat, mask=real, other=0)
    own_uses = tl.load(uses + flat, mask=real, other=0.0)
    own_seen = tl.load(seen + flat, mask=real, other=-1)
    step = tl.load(step_at)
    asked = tl.load(demand)
    lane = tl.arange(0, 8)
    lane_at = counts + lane * num_rows + row
    counted = tl.load(lane_at, mask=lane < NUM_LANES, other=0)
    wanted, others = _distinct(
        chosen, tl.load(stamping_at), marks, expert, real, pairs, per_token, num_experts, COMPARES, PAIRS
    )
    _enter(before, address, owner, expert, published, num_experts, num_places, base, place_bytes)
    on_host = here == home
    hit = wanted & (on_host == 0)
    miss = wanted & on_host
    tl.store(stamp + _place_of(here, base, place_bytes), step, mask=hit)
    own_uses += wanted.to(tl.float32)
    tl.store(uses + flat, own_uses, mask=wanted)
    own_seen = tl.where(wanted, step, own_seen)
    tl.store(seen + flat, own_seen, mask=wanted)
    tl.store(demand, asked + tl.sum(wanted.to(tl.int64), 0))
    num_miss = tl.sum(miss.to(tl.int32), 0)
    num_taken = num_miss * 0
    num_evicted = num_miss * 0
    tl.store(taken + expert, expert.to(tl.int64) * 0 + num_places, mask=real)
    tl.store(tee + expert, expert.to(tl.int64) * 0, mask=real)
    if HAS_READ:
        tl.store(read + expert, here, mask=real)
    if num_miss > 0:
        # The n-th miss by worth meets the n-th of the queue that may be a victim now. What this layer has just stamped
        # is its own, and owners that were published above are seen.
        worth = _worth(own_uses, own_seen, step, recency, IS_LRU)
        if RANKED:  # worth is never negative, so its bits are in its order
            key = tl.where(miss, worth.to(tl.int32, bitcast=True), -1)
            rank = _rank(key, marks, expert, real, num_experts, EXPERTS, SEEN)
        else:
            rank = tl.cumsum(miss.to(tl.int32), 0) - 1
        tl.debug_barrier()
        slot = tl.arange(0, QUEUE)
        candidate = tl.load(queue + slot, mask=slot < queue_len, other=num_places)
        there = candidate < num_places
        holder = tl.load(owner + candidate, mask=there, other=BANNED).to(tl.int32)
        last = tl.load(stamp + candidate, mask=there, other=step)
        ours = (holder >= 0) & (holder // num_experts == row)
        fit = there & (last < step) & (ours == 0) & (holder != BANNED)
        number = tl.cumsum(fit.to(tl.int32), 0) - 1
        tl.store(ready + number, candidate, mask=fit)
        num_fit = tl.sum(fit.to(tl.int32), 0)
        tl.debug_barrier()
        if RANKED:
            tl.store(marks + expert, expert * 0, mask=real)
        may = miss & (rank < num_fit)
        victim = tl.load(ready + rank, mask=may, other=num_places)
        old = tl.load(owner + victim, mask=may, other=FREE)
        held = may & (old >= 0)
        is_frozen = tl.load(frozen).to(tl.int32)
        if IS_LRU:
            better = tl.where(is_frozen > 0, 0, 1) + tl.zeros([EXPERTS], tl.int32) > 0
        else:
            margin = tl.where(is_frozen > 0, frozen_margin, 1.0)
            old_uses = tl.load(uses + old, mask=held, other=0.0)
            old_seen = tl.load(seen + old, mask=held, other=0)
            better = worth > margin * _worth(old_uses, old_seen, step, recency, IS_LRU)
        take = may & ((old == FREE) | better)
        evicted = take & held
        tl.store(address + old, tl.load(host + old, mask=evicted, other=0), mask=evicted)
        tl.store(owner + victim, tl.full([EXPERTS], -1, tl.int64), mask=take)
        tl.store(generation + victim, tl.load(generation + victim, mask=take, other=0) + 1, mask=take)
        tl.store(stamp + victim, tl.zeros([EXPERTS], tl.int64) + step, mask=take)
        tl.store(taken + expert, victim, mask=take)
        tl.store(tee + expert, base + victim * place_bytes, mask=take)
        if HAS_READ:
            tl.store(read + expert, base + victim * place_bytes, mask=take)
        num_taken = tl.sum(take.to(tl.int32), 0)
        num_evicted = tl.sum(evicted.to(tl.int32), 0)

    alone = others & (wanted == 0)
    num_hit = tl.sum(hit.to(tl.int32), 0)
    there_alone = tl.sum((alone & (on_host == 0)).to(tl.int32), 0)
    away_alone = tl.sum((alone & on_host).to(tl.int32), 0)
    more = tl.where(lane == 0, num_hit, tl.where(lane == 1, num_taken, num_miss - num_taken))
    more = tl.where(
        lane == 3, there_alone, tl.where(lane == 4, away_alone, tl.where(lane == 5, num_evicted, more))
    )
    tl.store(lane_at, counted + more, mask=lane < NUM_LANES)


@triton.jit(do_not_specialize=["row"])
def _publish(taken, address, owner, row, num_experts, num_places, base, place_bytes, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)
    place = tl.load(taken + expert, mask=expert < num_experts, other=num_places)
    _enter(place, address, owner, expert, row, num_experts, num_places, base, place_bytes)


def decide(
    tables: ResidencyTables, row: int, experts: torch.Tensor, published: int, base: int, place_bytes: int,
    recency: float, frozen_margin: float, *, is_lru: bool, ranked: bool = True, with_read: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :meth:`memory.device.residency.Residency.decide`; ``published`` -1 for no row. Answers two [experts] int64:
    where blocks are to be stored, and ``with_read`` where each is to be read once they are (else the first again)."""
    num_rows = tables.counts.shape[1]
    num_experts = (len(tables.address) - 1) // num_rows
    pairs = experts.numel()
    compares = pairs <= COMPARED_PAIRS
    tee = torch.empty(num_experts, dtype=torch.int64, device=experts.device)
    read = torch.empty_like(tee) if with_read else tee
    overlap = overlaps(experts)
    _decide[(1,)](
        experts.contiguous(), tee, read, tables.address, tables.host, tables.seen, tables.uses, tables.owner,
        tables.stamp, tables.generation, tables.queue, tables.ready, tables.step, tables.stamping, tables.demand,
        tables.frozen, tables.taken, tables.marks, tables.counts, row, pairs, published, experts.shape[1], num_experts,
        len(tables.owner) - 1, num_rows, len(tables.queue), base, place_bytes, recency, frozen_margin, IS_LRU=is_lru,
        EXPERTS=triton.next_power_of_2(num_experts), QUEUE=triton.next_power_of_2(max(len(tables.queue), 2)),
        COMPARES=compares, PAIRS=max(8, triton.next_power_of_2(pairs)) if compares else MARKING_PAIRS,
        HAS_READ=with_read, OVERLAP=overlap, RANKED=ranked,
        SEEN=min(RANKED_AT_ONCE, triton.next_power_of_2(num_experts)), launch_pdl=overlap, num_warps=4,
    )  # fmt: skip
    return tee, read


def publish(tables: ResidencyTables, row: int, base: int, place_bytes: int) -> None:
    """See :meth:`memory.device.residency.Residency.publish`."""
    num_experts = len(tables.taken)
    _publish[(1,)](
        tables.taken, tables.address, tables.owner, row, num_experts, len(tables.owner) - 1, base, place_bytes,
        EXPERTS=triton.next_power_of_2(num_experts), num_warps=4,
    )  # fmt: skip
