"""Four-bit integers in groups along the row, with and without zero points, in the order of the inputs or sorted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.dequantize import dequantize_int4
from worker.errors import ModelLoadError
from worker.quantization.base import BlockLayout, ExpertShape, TensorSpec
from worker.quantization.blocks import block_part, layout_parts
from worker.quantization.int4_tensors import SYMMETRIC_ZERO, Int4Layout, Int4Matrix, quantize_int4

_LINEARS = ("gate_proj", "up_proj", "down_proj")


class Int4:
    """Blocks of packed rows, gate above up [2I, H/2] and down [H, I/2], the low nibble the even input; one float16
    scale per group; zero points as nibbles. Where the checkpoint has act-order, the inputs of every row are sorted by
    group: H's order rides in the block for gate and for up, I's order is taken by the rows of gate and up."""

    name = "int4"

    def __init__(
        self,
        layout: Int4Layout | None = None,
        gate_up_group: int = 0,
        down_group: int = 0,
    ) -> None:
        """``layout`` of the checkpoint (None: GPTQ, symmetric, groups of 128). ``gate_up_group``, ``down_group``:
        inputs per scale as the tensors have them; 0: as the layout says."""
        self.layout = layout or Int4Layout("gptq", 128, symmetric=True, zero_offset=1)
        self._groups = (gate_up_group, down_group)

    def matches(self, quantization_config: Mapping[str, object] | None) -> bool:
        """GPTQ, AWQ and pack-quantized compressed-tensors with four bits."""
        return quantization_config is not None and _style(quantization_config) != ""

    def reading(self, quantization_config: Mapping[str, object] | None) -> Int4:
        """The format of such a checkpoint; ModelLoadError for a variant that cannot be read."""
        return Int4(_layout(quantization_config or {}))

    def fitted(self, shape: ExpertShape, gate_scales: tuple[int, ...], down_scales: tuple[int, ...]) -> Int4:
        """The same with the group sizes that the scales' shapes [O, G] or [G, O] show, gate's and down's: group size
        is a property of the tensor. ModelLoadError for a size that is none of 32, 64, 128 and the whole row."""
        found = []
        for columns, sizes in ((shape.hidden_size, gate_scales), (shape.intermediate_size, down_scales)):
            groups = self.layout.num_groups(sizes)
            fitting = [
                g for g in (self.layout.group_of(columns), 32, 64, 128, columns) if -(-columns // g) == groups
            ]
            if not fitting:
                raise ModelLoadError(
                    f"int4 experts: {groups} scales for {columns} inputs are groups of no known size"
                )
            found.append(fitting[0])
        return Int4(self.layout, *found)

    def groups(self, shape: ExpertShape) -> tuple[int, int]:
        """Inputs per scale in gate and up, and in down."""
        return (
            self._groups[0] or self.layout.group_of(shape.hidden_size),
            self._groups[1] or self.layout.group_of(shape.intermediate_size),
        )

    def expert_tensors(self, shape: ExpertShape) -> tuple[TensorSpec, ...]:
        """Packed values, scales, zero points and orders of gate_proj, up_proj and down_proj, and their biases."""
        found = []
        for name, (rows, columns, group) in self._sizes(shape).items():
            for suffix, (sizes, dtype) in self.layout.specs(rows, columns, group).items():
                found.append(TensorSpec(f"{name}.{suffix}", sizes, dtype))
            if shape.has_bias:
                found.append(TensorSpec(f"{name}.bias", (rows,), "bfloat16"))
        return tuple(found)

    def _sizes(self, shape: ExpertShape) -> dict[str, tuple[int, int, int]]:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        if hidden % 2 or inner % 2:
            raise ModelLoadError(f"int4 experts of odd sizes {hidden} x {inner} cannot be packed")
        wide, narrow = self.groups(shape)
        return {
            "gate_proj": (inner, hidden, wide),
            "up_proj": (inner, hidden, wide),
            "down_proj": (hidden, inner, narrow),
        }

    def block_layout(self, shape: ExpertShape) -> BlockLayout:
        """Values, scales and zero points of gate_up, then of down; orders; biases."""
        parts: list[tuple[str, tuple[int, ...], str]] = []
        sizes = self._sizes(shape)
        for name, rows, (_, columns, group) in (
            ("gate_up", 2 * shape.intermediate_size, sizes["gate_proj"]),
            ("down", shape.hidden_size, sizes["down_proj"]),
        ):
            groups = -(-columns // group)
            parts.append((name, (rows, columns // 2), "uint8"))
            parts.append((f"{name}_scales", (rows, groups), "float16"))
            if not self.layout.symmetric:
                parts.append((f"{name}_zeros", (-(-rows * groups // 2),), "uint8"))
            if shape.has_bias:
                parts.append((f"{name}_bias", (rows,), "bfloat16"))
        if self.layout.act_order:
            parts += [(name, (shape.hidden_size,), "int32") for name in ("gate_order", "up_order")]
        wide, narrow = self.groups(shape)
        return layout_parts(
            parts, kernel="int4", group=wide, down_group=narrow, zero_offset=self._zero_offset
        )

    @property
    def _zero_offset(self) -> int:
        return 0 if self.layout.symmetric else self.layout.zero_offset

    def pack(self, tensors: Mapping[str, torch.Tensor], shape: ExpertShape, block: torch.Tensor) -> None:
        """Lays the checkpoint's tensors into the block."""
        found = {}
        for name, (rows, columns, _) in self._sizes(shape).items():
            own = {key.partition(".")[2]: t for key, t in tensors.items() if key.startswith(f"{name}.")}
            found[name] = self.layout.read(own, rows, columns)
        self._pack(found, tensors, shape, block)

    def _pack(
        self,
        matrices: Mapping[str, Int4Matrix],
        tensors: Mapping[str, torch.Tensor],
        shape: ExpertShape,
        block: torch.Tensor,
    ) -> None:
        layout = self.block_layout(shape)
        sizes = self._sizes(shape)
        orders = {name: _order(m, sizes[name][2]) for name, m in matrices.items()}
        rows_of = orders["down_proj"]  # the rows of gate and up are the inputs of down
        for part, names in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            values, scales, zeros, biases = [], [], [], []
            for name in names:
                matrix, order = matrices[name], orders[name]
                sorted_values = matrix.values if order is None else matrix.values[:, order]
                rows = rows_of if rows_of is not None and name != "down_proj" else slice(None)
                values.append(sorted_values[rows])
                scales.append(matrix.scales[rows])
                if matrix.zeros is not None:
                    zeros.append(matrix.zeros[rows])
                if shape.has_bias:
                    biases.append(tensors[f"{name}.bias"][rows])
            block_part(block, layout, part).copy_(_nibbles(torch.cat(values)))
            block_part(block, layout, f"{part}_scales").copy_(torch.cat(scales))
            if zeros:
                packed = _nibbles(torch.cat(zeros).reshape(1, -1))
                block_part(block, layout, f"{part}_zeros").copy_(packed.flatten())
            if biases:
                block_part(block, layout, f"{part}_bias").copy_(torch.cat(biases))
        if self.layout.act_order:
            for name in ("gate", "up"):
                own = orders[f"{name}_proj"]
                order = torch.arange(shape.hidden_size) if own is None else own
                block_part(block, layout, f"{name}_order").copy_(order)
        elif any(order is not None for order in orders.values()):
            raise ModelLoadError(
                "an int4 expert has inputs out of the order of their groups, but its configuration says desc_act=false"
            )

    def quantize(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A checkpoint's tensors for float matrices by linear name (gate_proj, up_proj, down_proj)."""
        found: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            group = self._groups[name == "down_proj"] or self.layout.group_of(weight.shape[1])
            matrix = quantize_int4(weight, group, self.layout.symmetric)
            if matrix.zeros is not None and self.layout.zero_offset:
                # Version 1 of GPTQ keeps zero - 1, so that a zero point of 0 has no code: 1 is the lowest.
                raised = matrix.zeros.clamp_min(1)
                shifted = (
                    matrix.values + (raised - matrix.zeros).repeat_interleave(group, 1)[:, : weight.shape[1]]
                )
                matrix = Int4Matrix(shifted.clamp_max(15), matrix.scales, raised - 1, None)
            found |= {f"{name}.{suffix}": tensor for suffix, tensor in self.layout.write(matrix).items()}
        return found

    def linear_suffixes(self) -> tuple[str, ...]:
        """What a dense linear is made of."""
        return self.layout.suffixes()

    def linear_shape(self, suffix: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """By the shape of the packed values."""
        return self.layout.matrix_shape(shape)

    def dequantize_linear(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A dense linear's float32 weight, inputs in the model's order."""
        rows, columns = self.layout.matrix_shape(tuple(tensors[self.layout.suffixes()[0]].shape))
        matrix = self.layout.read(tensors, rows, columns)
        groups = matrix.scales.shape[1]
        groups_of = torch.arange(columns, device=matrix.values.device) // self.layout.group_of(columns)
        if matrix.groups_of is not None:
            groups_of = matrix.groups_of.long()
        elif int(groups_of[-1]) + 1 != groups:
            raise ModelLoadError(
                f"an int4 weight [{rows}, {columns}] has {groups} groups, not one per {self.layout.group}"
            )
        zeros: torch.Tensor | int = SYMMETRIC_ZERO
        if matrix.zeros is not None:
            zeros = matrix.zeros.int()[:, groups_of] + self.layout.zero_offset
        return (matrix.values.int() - zeros).float() * matrix.scales.float()[:, groups_of]

    def dequantize(self, block: torch.Tensor, shape: ExpertShape) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 rows, inputs of gate and up in the model's order (those of down in that of gate's rows)."""
        layout, groups = self.block_layout(shape), self.groups(shape)
        found = []
        for part, group in zip(("gate_up", "down"), groups, strict=True):
            zeros = None if self.layout.symmetric else block_part(block, layout, f"{part}_zeros")
            packed, scales = block_part(block, layout, part), block_part(block, layout, f"{part}_scales")
            found.append(dequantize_int4(packed, scales, zeros, self._zero_offset, group))
        gate_up, down = found
        if self.layout.act_order:
            halves = []
            for half, name in zip(gate_up.chunk(2), ("gate_order", "up_order"), strict=True):
                halves.append(half[:, block_part(block, layout, name).long().argsort()])
            gate_up = torch.cat(halves)
        return gate_up, down


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    """[rows, n] uint8 below 16 to [rows, ceil(n / 2)], the low nibble first."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values[:, 0::2] | (values[:, 1::2] << 4)


def _order(matrix: Int4Matrix, group: int) -> torch.Tensor | None:
    """The columns sorted by group, None where they are; ModelLoadError where a group is not ``group`` columns (the
    last one may be shorter)."""
    if matrix.groups_of is None:
        return None
    groups_of = matrix.groups_of.long()
    plain = torch.arange(len(groups_of), device=groups_of.device) // group
    if torch.equal(groups_of, plain):
        return None
    order = groups_of.argsort(stable=True)
    if not torch.equal(groups_of[order], plain):
        raise ModelLoadError(f"an int4 expert's g_idx does not split its inputs into groups of {group}")
    return order


def _style(config: Mapping[str, object]) -> str:
    method = config.get("quant_method")
    if method in ("gptq", "awq"):
        return str(method)
    return "compressed-tensors" if method == "compressed-tensors" and _weights(config) else ""


def _weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``weights`` of a compressed-tensors configuration in which all groups are pack-quantized alike."""
    if config.get("format") != "pack-quantized":
        return {}
    groups = [g.get("weights") for g in (config.get("config_groups") or {}).values()]
    return groups[0] if groups and all(g == groups[0] for g in groups) and groups[0] else {}


def _layout(config: Mapping[str, Any]) -> Int4Layout:
    style = _style(config)
    weights = _weights(config) if style == "compressed-tensors" else config
    bits = weights.get("bits", weights.get("num_bits"))
    if bits != 4 or weights.get("type", "int") != "int":
        raise ModelLoadError(
            f"quantization_config: {style} with {bits} bits, but only four-bit integers are read"
        )
    group = int(weights.get("group_size") or 0)
    group = 0 if group < 0 else group
    if style == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelLoadError(f"quantization_config: AWQ version={version!r}, but only 'gemm' is read")
        return Int4Layout("awq", group, symmetric=not config.get("zero_point", True))
    if style == "gptq":
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        return Int4Layout("gptq", group, bool(config.get("sym", True)), bool(config.get("desc_act")), offset)
    act_order = weights.get("actorder") in ("group", "dynamic", True)
    return Int4Layout("compressed-tensors", group, bool(weights.get("symmetric", True)), act_order)
