"""Opens a step of paged experts in two launches: ages use counts, brings ghosts up to date, ranks the next victims.

The same rules as the tensor operations of ``memory.device.residency`` and ``memory.device.ghosts``, which are the truth
in tests, and would be some eighty launches a step. The first launch surveys, a program per layer and share of the
places; the second ranks every resident expert by counting those that are worth less: no sort, nothing but comparisons
that all multiprocessors share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels._triton.residency import BANNED, FREE, ResidencyTables, _place_of, _worth

NEVER: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""The key of an expert that has no place: behind all others."""
RANKED, SEEN, PLACES = 16, 1024, 1024


@dataclass(frozen=True, slots=True)
class GhostTables:
    """Those of :class:`memory.device.ghosts.Ghosts`: resident, ghost [rows, experts] bool; lost the same int64; losses
    [] int64; hits [rows] int64."""

    resident: torch.Tensor
    ghost: torch.Tensor
    lost: torch.Tensor
    losses: torch.Tensor
    hits: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepScratch:
    """What the first launch tells the second. keys: [rows * experts] int64, worth above place number; free, usable,
    gone: [rows] int32, of a share of the places, and of a row's experts; losses: [] int64, before this step."""

    keys: torch.Tensor
    free: torch.Tensor
    usable: torch.Tensor
    gone: torch.Tensor
    losses: torch.Tensor

    @staticmethod
    def make(rows: int, experts: int, device: torch.device) -> StepScratch:
        """Takes the memory, once."""
        counts = torch.zeros(3, rows, dtype=torch.int32, device=device)
        keys = torch.zeros(rows * experts, dtype=torch.int64, device=device)
        return StepScratch(keys, counts[0], counts[1], counts[2], torch.zeros_like(keys[0]))


@triton.jit(do_not_specialize=["step"])
def _survey(
    address, host, seen, uses, owner, step_at, resident, ghost, losses, hits, keys, free, usable, gone, losses_before,
    step, num_experts, num_places, share, base, place_bytes, decay, recency,
    IS_LRU: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    flat = (row * num_experts + expert).to(tl.int64)
    before = tl.load(step_at)
    here = tl.load(address + flat, mask=real, other=0)
    is_here = real & (here != tl.load(host + flat, mask=real, other=0))
    last = tl.load(seen + flat, mask=real, other=-1)
    count = tl.load(uses + flat, mask=real, other=0.0) * decay
    tl.store(uses + flat, count, mask=real)
    # Worth is never negative, so its bits are in its order.
    bits = _worth(count, last, step, recency, IS_LRU).to(tl.int32, bitcast=True).to(tl.int64)
    place = _place_of(here, base, place_bytes).to(tl.int64)
    tl.store(keys + flat, tl.where(is_here, (bits << 32) | place, NEVER), mask=real)

    was_ghost = tl.load(ghost + flat, mask=real, other=0) != 0
    wanted_again = real & (last == before) & was_ghost
    tl.store(hits + row, tl.load(hits + row) + tl.sum(wanted_again.to(tl.int64), 0))
    lost = real & (tl.load(resident + flat, mask=real, other=0) != 0) & (is_here == 0)
    tl.store(gone + row, tl.sum(lost.to(tl.int32), 0))
    if row == 0:
        tl.store(losses_before, tl.load(losses))

    num_free = tl.zeros([PLACES], tl.int32)
    num_usable = tl.zeros([PLACES], tl.int32)
    last_place = tl.minimum((row + 1) * share, num_places)
    for start in range(row * share, last_place, PLACES):
        number = start + tl.arange(0, PLACES)
        holder = tl.load(owner + number, mask=number < last_place, other=BANNED)
        num_free += (holder == FREE).to(tl.int32)
        num_usable += (holder != BANNED).to(tl.int32)
    tl.store(free + row, tl.sum(num_free, 0))
    tl.store(usable + row, tl.sum(num_usable, 0))


@triton.jit
def _queue_free(
    row, free_before, owner, queue, num_places, share, queue_len,
    PLACES: tl.constexpr,
):  # fmt: skip
    """A share's free places, in their order, ahead of all that have an owner."""
    last_place = tl.minimum((row + 1) * share, num_places)
    found = free_before
    for start in range(row * share, last_place, PLACES):
        number = start + tl.arange(0, PLACES)
        is_free = tl.load(owner + number, mask=number < last_place, other=BANNED) == FREE
        rank = found + tl.cumsum(is_free.to(tl.int32), 0) - 1
        tl.store(queue + rank, number.to(tl.int64), mask=is_free & (rank < queue_len))
        found += tl.sum(is_free.to(tl.int32), 0)


@triton.jit(do_not_specialize=["step", "num_stamping"])
def _open(
    address, host, owner, queue, step_at, stamping_at, demand, frozen, resident, ghost, lost, losses,
    keys, free, usable, gone, losses_before,
    step, num_stamping, num_rows, num_experts, num_places, share, queue_len, thaw_share, ghost_shift,
    FREEZES: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, QUEUE: tl.constexpr, PLACES: tl.constexpr,
    RANKED: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    frees = tl.load(free + rows, mask=rows < num_rows, other=0)
    if program >= num_rows:
        mine = (program - num_rows) * RANKED + tl.arange(0, RANKED)
        total = num_rows * num_experts
        key = tl.load(keys + mine, mask=mine < total, other=NEVER)
        rank = tl.zeros([RANKED], tl.int32)
        for start in range(0, total, SEEN):
            other = start + tl.arange(0, SEEN)
            theirs = tl.load(keys + other, mask=other < total, other=NEVER)
            rank += tl.sum((theirs[None, :] < key[:, None]).to(tl.int32), 1)
        rank += tl.sum(frees, 0)
        tl.store(queue + rank, key & 0xFFFFFFFF, mask=(key != NEVER) & (rank < queue_len))
        return
    row = program
    num_usable = tl.sum(tl.load(usable + rows, mask=rows < num_rows, other=0), 0)
    _queue_free(
        row, tl.sum(tl.where(rows < row, frees, 0), 0), owner, queue, num_places, share, queue_len, PLACES
    )
    gones = tl.load(gone + rows, mask=rows < num_rows, other=0).to(tl.int64)
    known = tl.load(losses_before)
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    flat = (row * num_experts + expert).to(tl.int64)
    is_here = tl.load(address + flat, mask=real, other=0) != tl.load(host + flat, mask=real, other=0)
    is_gone = real & (tl.load(resident + flat, mask=real, other=0) != 0) & (is_here == 0)
    number = known + tl.sum(tl.where(rows < row, gones, 0), 0) + tl.cumsum(is_gone.to(tl.int64), 0)
    when = tl.where(is_gone, number, tl.load(lost + flat, mask=real, other=0))
    tl.store(lost + flat, when, mask=real)
    tl.store(resident + flat, is_here, mask=real)
    now = known + tl.sum(gones, 0)
    tl.store(ghost + flat, (when >= now - (num_usable >> ghost_shift)) & (is_here == 0), mask=real)
    if row == 0:
        tl.store(losses, now)
        asked = tl.load(demand)
        if FREEZES:
            thaws = asked.to(tl.float32) < thaw_share * num_usable.to(tl.float32)
            stays = (tl.load(frozen) != 0) & (thaws == 0)
            tl.store(frozen, (asked > num_usable) | stays)
        tl.store(demand, asked * 0)
        tl.store(step_at, step.to(tl.int64))
        tl.store(stamping_at, num_stamping.to(tl.int64))
        slot = tl.arange(0, QUEUE)
        nobody = tl.zeros([QUEUE], tl.int64) + num_places
        tl.store(queue + slot, nobody, mask=(slot >= num_usable) & (slot < queue_len))


def begin_step(
    tables: ResidencyTables, ghosts: GhostTables, scratch: StepScratch, step: int, num_stamping: int,
    base: int, place_bytes: int, decay: float, recency: float, thaw_share: float, ghost_shift: int,
    *, freezes: bool, is_lru: bool,
) -> None:  # fmt: skip
    """See :meth:`memory.device.residency.Residency.begin_step`."""
    num_rows, num_places, queue_len = tables.counts.shape[1], len(tables.owner) - 1, len(tables.queue)
    num_experts = (len(tables.address) - 1) // num_rows
    share = triton.cdiv(num_places, num_rows)
    pad = triton.next_power_of_2(num_experts)
    _survey[(num_rows,)](
        tables.address, tables.host, tables.seen, tables.uses, tables.owner, tables.step, ghosts.resident,
        ghosts.ghost, ghosts.losses, ghosts.hits, scratch.keys, scratch.free, scratch.usable, scratch.gone,
        scratch.losses, step, num_experts, num_places, share, base, place_bytes, decay, recency, IS_LRU=is_lru,
        EXPERTS=pad, PLACES=PLACES,
    )  # fmt: skip
    _open[(num_rows + triton.cdiv(num_rows * num_experts, RANKED),)](
        tables.address, tables.host, tables.owner, tables.queue, tables.step, tables.stamping, tables.demand,
        tables.frozen, ghosts.resident, ghosts.ghost, ghosts.lost, ghosts.losses, scratch.keys, scratch.free,
        scratch.usable, scratch.gone, scratch.losses, step, num_stamping, num_rows, num_experts, num_places, share,
        queue_len, thaw_share, ghost_shift, FREEZES=freezes, EXPERTS=pad, ROWS=triton.next_power_of_2(num_rows),
        QUEUE=triton.next_power_of_2(max(queue_len, 2)), PLACES=PLACES, RANKED=RANKED, SEEN=SEEN,
    )  # fmt: skip
