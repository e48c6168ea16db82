"""Brings a layer's missing experts into their places in one launch of few programs, whatever their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels._triton.overlap import overlaps

PROGRAMS_PER_PROCESSOR, WORDS = 3, 2048
"""So many programs have a whole expert of several megabytes under way at once; where nothing is missing they end."""
LINE_BYTES: tl.constexpr = tl.constexpr(128)


@triton.jit
def _gather(
    table, targets, num_experts, num_words, EXPERTS: tl.constexpr, WORDS: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.arange(0, EXPERTS)
    wanted = tl.load(targets + expert, mask=expert < num_experts, other=0) != 0
    count = tl.sum(wanted.to(tl.int32), 0)
    rank = tl.cumsum(wanted.to(tl.int32), 0) - 1
    pieces = tl.cdiv(num_words, WORDS)
    for piece in range(tl.program_id(0), count * pieces, tl.num_programs(0)):
        which = tl.sum(tl.where(wanted & (rank == piece // pieces), expert, 0), 0)
        source = tl.multiple_of(tl.load(table + which).to(tl.pointer_type(tl.int64)), LINE_BYTES)
        target = tl.multiple_of(tl.load(targets + which).to(tl.pointer_type(tl.int64)), LINE_BYTES)
        at = piece % pieces * WORDS + tl.arange(0, WORDS)
        tl.store(target + at, tl.load(source + at, mask=at < num_words), mask=at < num_words)


def gather(table: torch.Tensor, targets: torch.Tensor, num_bytes: int, programs: int = 0) -> None:
    """See :func:`kernels.residency.gather`."""
    device = targets.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if targets.is_cuda else 4
    # A launch beside the steps has no kernel ahead of it whose end it could hide.
    overlap = overlaps(targets) and not programs
    _gather[(programs or PROGRAMS_PER_PROCESSOR * processors,)](
        table, targets, len(targets), num_bytes // 8, EXPERTS=triton.next_power_of_2(len(targets)), WORDS=WORDS,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
