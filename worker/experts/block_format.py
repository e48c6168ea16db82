"""Tells the expert kernel where the parts of a format's block lie."""

from __future__ import annotations

from kernels.experts import DENSE, FP8_BLOCK, INT4, MXFP4, BlockFormat
from worker.quantization.base import BlockLayout
from worker.quantization.choose import part_offset

_KINDS = {"fp8_block": FP8_BLOCK, "int4": INT4, "mxfp4": MXFP4}


def block_format(layout: BlockLayout) -> BlockFormat:
    """The kernel's view of a layout; ValueError for a kernel id that none has."""
    kind = DENSE if layout.kernel.startswith("dense_") else _KINDS.get(layout.kernel)
    if kind is None:
        raise ValueError(f"no expert kernel reads blocks of kind {layout.kernel!r}")
    grouped = kind in (INT4, MXFP4)
    return BlockFormat(
        kind=kind,
        gate_up=part_offset(layout, "gate_up"),
        down=part_offset(layout, "down"),
        gate_scales=part_offset(layout, "gate_up_scales" if grouped else "gate_scales"),
        up_scales=part_offset(layout, "up_scales"),
        down_scales=part_offset(layout, "down_scales"),
        gate_up_zeros=part_offset(layout, "gate_up_zeros"),
        down_zeros=part_offset(layout, "down_zeros"),
        zero_offset=layout.zero_offset,
        gate_up_bias=part_offset(layout, "gate_up_bias"),
        down_bias=part_offset(layout, "down_bias"),
        gate_order=part_offset(layout, "gate_order"),
        up_order=part_offset(layout, "up_order"),
        group=layout.group,
        down_group=layout.down_group,
        num_bytes=layout.num_bytes,
    )
