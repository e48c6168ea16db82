"""Bytes of weight matrices in each format: values, scales and zero points, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memory.api import align_bytes
from worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one routed expert: ``hidden_size`` H in and out, ``intermediate_size`` I between, gate and up each
    [I, H], down [H, I]; biases (bf16) where ``has_bias``."""

    hidden_size: int
    intermediate_size: int
    has_bias: bool = False

    @property
    def num_params(self) -> int:
        """Weights of the three matrices, biases not counted."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def num_bias_params(self) -> int:
        """Biases of gate, up and down."""
        return 2 * self.intermediate_size + self.hidden_size if self.has_bias else 0


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix [rows, columns] is stored.

    Attributes:
        name: as on the command line.
        title: as in tables.
        value_bits: of one weight.
        tile: rows and columns that share a scale; (0, 0) for none. Partial tiles have a scale of their own.
        scale_bytes: of one scale.
        zero_bits: of one zero point per scale.
        quantizes_dense: whether such checkpoints hold attention and dense MLPs in the format too (else bf16).
    """

    name: str
    title: str
    value_bits: int
    tile: tuple[int, int] = (0, 0)
    scale_bytes: int = 0
    zero_bits: int = 0
    quantizes_dense: bool = True

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix with all that belongs to it, rounded up to whole bytes."""
        bits = Fraction(rows * columns * self.value_bits)
        if self.tile[1]:
            num_scales = -(-rows // self.tile[0]) * -(-columns // self.tile[1])
            bits += num_scales * (8 * self.scale_bytes + self.zero_bits)
        return -(-bits.numerator // (8 * bits.denominator))

    def divides(self, shape: ExpertShape) -> bool:
        """Whether whole groups fill the rows of such an expert. FP8 tiles may be cut off at the edge, groups not."""
        group = self.tile[1] if self.tile[0] == 1 else 1
        return shape.hidden_size % group == 0 and shape.intermediate_size % group == 0

    def expert_bytes(self, shape: ExpertShape) -> int:
        """Bytes of one routed expert: three matrices (gate and up with scales of their own) and its biases."""
        gate_or_up = self.matrix_bytes(shape.intermediate_size, shape.hidden_size)
        down = self.matrix_bytes(shape.hidden_size, shape.intermediate_size)
        return 2 * gate_or_up + down + 2 * shape.num_bias_params

    def place_bytes(self, shape: ExpertShape) -> int:
        """Bytes of an arena place for one expert."""
        return align_bytes(self.expert_bytes(shape))

    def dense_bytes(self, num_params: int) -> int:
        """Bytes of ``num_params`` weights of attention and dense MLPs, scales counted as for whole tiles."""
        if not self.quantizes_dense:
            return 2 * num_params
        bits = Fraction(self.value_bits)
        if self.tile[1]:
            bits += Fraction(8 * self.scale_bytes + self.zero_bits, self.tile[0] * self.tile[1])
        return round(num_params * bits / 8)


FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("bf16", "bf16", 16),
    WeightFormat("fp8", "block FP8", 8, (128, 128), 4),
    WeightFormat("int4", "int4 g128", 4, (1, 128), 2),
    WeightFormat("int4_zero", "int4 g128 with zero points", 4, (1, 128), 2, zero_bits=4),
    WeightFormat("int4_g32", "int4 g32", 4, (1, 32), 2),
    WeightFormat("mxfp4", "MXFP4", 4, (1, 32), 1, quantizes_dense=False),
    WeightFormat("nvfp4", "NVFP4", 4, (1, 16), 1),
)


def find_format(name: str) -> WeightFormat:
    """The format called ``name``; ConfigError names the known ones."""
    for entry in FORMATS:
        if entry.name == name:
            return entry
    raise ConfigError([f"format={name!r} must be one of {', '.join(entry.name for entry in FORMATS)}"])


def checkpoint_format(quantization: Mapping[str, Any] | None) -> WeightFormat:
    """The format that a configuration's ``quantization_config`` describes; bf16 without one.

    ConfigError for a method or group size that is not known.
    """
    if not quantization:
        return find_format("bf16")
    method = str(quantization.get("quant_method", ""))
    if method in ("fp8", "mxfp4"):
        return find_format(method)
    if method == "modelopt" or "nvfp4" in str(quantization.get("format", "")):
        return find_format("nvfp4")
    if "mxfp4" in str(quantization.get("format", "")):
        return find_format("mxfp4")
    weights = _group_weights(quantization) if method == "compressed-tensors" else quantization
    bits = int(weights.get("bits") or weights.get("num_bits") or 0)
    group = int(weights.get("group_size") or 0)
    if bits == 4 and group in (32, 128):
        symmetric = weights.get("sym", weights.get("symmetric", method != "awq"))
        if group == 32:
            return find_format("int4_g32")
        return find_format("int4" if symmetric else "int4_zero")
    raise ConfigError(
        [f"quantization_config: {method or 'no method'}, {bits} bits, groups of {group}: not known"]
    )


def _group_weights(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    for group in (quantization.get("config_groups") or {}).values():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            weights: Mapping[str, Any] = group["weights"]
            return weights
    return {}
