"""Reads and writes the three layouts in which checkpoints keep four-bit integers: GPTQ, AWQ, compressed-tensors.

GPTQ: ``qweight`` int32 [I/8, O], eight inputs to a word, lowest bits first; ``qzeros`` int32 [G, O/8]; ``scales``
[G, O]; ``g_idx`` int32 [I], the group of each input. Version 1 keeps zero - 1.
AWQ (GEMM): ``qweight`` int32 [I, O/8] with the
outputs of a word in the order 0 2 4 6 1 3 5 7; ``qzeros`` [G, O/8] in the same order; ``scales`` [G, O].
compressed-tensors (pack-quantized): ``weight_packed`` int32 [O, I/8], lowest bits first, values and zero points shifted
by 8; ``weight_scale`` [O, G]; ``weight_zero_point`` int32 [O/8, G]; ``weight_g_idx``; ``weight_shape``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from worker.errors import ModelLoadError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A [rows, columns] matrix: ``values`` uint8 0..15, ``scales`` [rows, groups], ``zeros`` uint8 [rows, groups] as
    stored (the layout's ``zero_offset`` is still to be added), ``groups_of`` [columns], the group of each column."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups_of: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """How a checkpoint stores its matrices.

    Attributes:
        style: ``gptq``, ``awq`` or ``compressed-tensors``.
        group: inputs per scale; 0: one scale per output.
        symmetric: every zero point is 8, and blocks carry none.
        act_order: inputs may belong to any group.
        zero_offset: what is to be added to a stored zero point.
    """

    style: str
    group: int
    symmetric: bool
    act_order: bool = False
    zero_offset: int = 0

    def group_of(self, columns: int) -> int:
        """Inputs per scale in a row of ``columns``."""
        return self.group or columns

    def specs(self, rows: int, columns: int, group: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Every tensor of a [rows, columns] matrix by suffix: shape and dtype."""
        groups = -(-columns // group)
        if self.style == "compressed-tensors":
            found: dict[str, tuple[tuple[int, ...], str]] = {
                "weight_packed": ((rows, -(-columns // 8)), "int32"),
                "weight_scale": ((rows, groups), "float16"),
                "weight_shape": ((2,), "int64"),
            }
            if not self.symmetric:
                found["weight_zero_point"] = ((-(-rows // 8), groups), "int32")
            if self.act_order:
                found["weight_g_idx"] = ((columns,), "int32")
            return found
        packed = (columns, rows // 8) if self.style == "awq" else (columns // 8, rows)
        found = {
            "qweight": (packed, "int32"),
            "qzeros": ((groups, rows // 8), "int32"),
            "scales": ((groups, rows), "float16"),
        }
        if self.style == "gptq":
            found["g_idx"] = ((columns,), "int32")
        return found

    def scale_suffix(self) -> str:
        """The tensor whose shape says how many groups there are."""
        return "weight_scale" if self.style == "compressed-tensors" else "scales"

    def suffixes(self) -> tuple[str, ...]:
        """Every tensor that a matrix may be made of; the first is there in every one."""
        if self.style == "compressed-tensors":
            return "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"
        return "qweight", "qzeros", "scales", "g_idx"

    def matrix_shape(self, packed_shape: tuple[int, ...]) -> tuple[int, int]:
        """[rows, columns] by the shape of the packed values (columns filled up to whole words)."""
        if self.style == "compressed-tensors":
            return packed_shape[0], 8 * packed_shape[1]
        if self.style == "awq":
            return 8 * packed_shape[1], packed_shape[0]
        return packed_shape[1], 8 * packed_shape[0]

    def num_groups(self, scales_shape: tuple[int, ...]) -> int:
        """Groups per row by the shape of the scales."""
        return scales_shape[-1] if self.style == "compressed-tensors" else scales_shape[0]

    def read(self, tensors: Mapping[str, torch.Tensor], rows: int, columns: int) -> Int4Matrix:
        """The matrix out of its tensors by suffix."""
        if self.style == "compressed-tensors":
            zeros = None
            if not self.symmetric:
                zeros = unpack_words(tensors["weight_zero_point"].t(), PLAIN_ORDER).t()[:rows]
            values = unpack_words(tensors["weight_packed"], PLAIN_ORDER)[:, :columns]
            groups_of = tensors["weight_g_idx"] if self.act_order else None
            return Int4Matrix(values, tensors["weight_scale"], zeros, groups_of)
        order = AWQ_ORDER if self.style == "awq" else PLAIN_ORDER
        if self.style == "awq":
            values = unpack_words(tensors["qweight"], order).t()
        else:
            values = unpack_words(tensors["qweight"].t(), order)
        zeros = unpack_words(tensors["qzeros"], order).t()
        if self.symmetric:
            if bool((zeros + self.zero_offset != SYMMETRIC_ZERO).any()):
                raise ModelLoadError("a symmetric int4 checkpoint holds a zero point other than 8")
            zeros = None
        return Int4Matrix(values, tensors["scales"].t(), zeros, tensors.get("g_idx"))

    def write(self, matrix: Int4Matrix) -> dict[str, torch.Tensor]:
        """The inverse of :meth:`read`."""
        rows, columns = matrix.values.shape
        zeros = matrix.zeros
        if self.style == "compressed-tensors":
            found = {
                "weight_packed": pack_words(matrix.values, PLAIN_ORDER),
                "weight_scale": matrix.scales.contiguous(),
                "weight_shape": torch.tensor([rows, columns]),
            }
            if zeros is not None:
                found["weight_zero_point"] = pack_words(zeros.t(), PLAIN_ORDER).t().contiguous()
            if self.act_order and matrix.groups_of is not None:
                found["weight_g_idx"] = matrix.groups_of.int()
            return found
        if zeros is None:
            zeros = torch.full(matrix.scales.shape, SYMMETRIC_ZERO - self.zero_offset, dtype=torch.uint8)
        order = AWQ_ORDER if self.style == "awq" else PLAIN_ORDER
        if self.style == "awq":
            packed = pack_words(matrix.values.t(), order)
        else:
            packed = pack_words(matrix.values, order).t().contiguous()
        found = {
            "qweight": packed,
            "qzeros": pack_words(zeros.t(), order),
            "scales": matrix.scales.t().contiguous(),
        }
        if self.style == "gptq":
            plain = torch.arange(columns) // self.group_of(columns)
            found["g_idx"] = (plain if matrix.groups_of is None else matrix.groups_of).int()
        return found


def unpack_words(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[n, m] int32 to [n, 8 m] uint8 nibbles: nibble k of a word is element ``order[k]`` of its eight."""
    shifts = torch.tensor([4 * order.index(element) for element in range(8)], device=words.device)
    nibbles = (words.long().unsqueeze(-1) >> shifts) & 0x0F
    return nibbles.flatten(-2).to(torch.uint8)


def pack_words(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The inverse of :func:`unpack_words`; columns are filled up with zeros to whole words."""
    rows, columns = values.shape
    padded = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.int64, device=values.device)
    padded[:, :columns] = values
    shifts = torch.tensor([4 * order.index(element) for element in range(8)], device=values.device)
    words = (padded.view(rows, -1, 8) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize_int4(weight: torch.Tensor, group: int, symmetric: bool) -> Int4Matrix:
    """[rows, columns] floats rounded to nearest, group by group along the row: symmetric around 8, or with the zero
    point that lets 0..15 span the group's range (widened to hold 0)."""
    rows, columns = weight.shape
    groups = -(-columns // group)
    padded = torch.zeros(rows, groups * group, device=weight.device)
    padded[:, :columns] = weight.float()
    cells = padded.view(rows, groups, group)
    if symmetric:
        scales = (cells.abs().amax(-1) / 7.0).clamp_min(1e-7)
        zeros = torch.full_like(scales, float(SYMMETRIC_ZERO))
    else:
        low, high = cells.amin(-1).clamp_max(0.0), cells.amax(-1).clamp_min(0.0)
        scales = ((high - low) / 15.0).clamp_min(1e-7)
        zeros = (-low / scales).round().clamp(0, 15)
    # Rounded with the scale as it will be stored.
    scales = scales.half()
    values = (cells / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    kept = values.clamp(0, 15).view(rows, -1)[:, :columns].to(torch.uint8)
    return Int4Matrix(kept, scales, None if symmetric else zeros.to(torch.uint8), None)
