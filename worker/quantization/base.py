"""The face of a weight format: every tensor an expert or a linear layer has, and the block the kernel reads.

A format that forgets a tensor gives fluent wrong text, so it must declare all of them: a checkpoint tensor under an
expert that its format does not declare stops the start by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one routed expert: ``hidden_size`` H in and out, ``intermediate_size`` I between."""

    hidden_size: int
    intermediate_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an expert in the checkpoint: its name below the expert, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One part of an expert's block, at a byte offset that is a multiple of 128."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The contiguous block of one expert as the kernel reads it; ``num_bytes`` is a multiple of 128.

    ``group`` inputs share a scale in gate and up, ``down_group`` in down, where there are groups; ``zero_offset`` is
    added to stored zero points.
    """

    parts: tuple[BlockPart, ...]
    num_bytes: int
    kernel: str
    group: int = 1
    down_group: int = 1
    zero_offset: int = 0


class Format(Protocol):
    """One weight format."""

    name: str

    def matches(self, quantization_config: Mapping[str, object] | None) -> bool:
        """Whether this format reads a checkpoint with that ``quantization_config`` (None: unquantised)."""
        ...

    def reading(self, quantization_config: Mapping[str, object] | None) -> Format:
        """This format as a checkpoint with such a configuration has it; ModelLoadError for what cannot be read."""
        ...

    def expert_tensors(self, shape: ExpertShape) -> tuple[TensorSpec, ...]:
        """Every tensor that one expert has in a checkpoint of this format."""
        ...

    def block_layout(self, shape: ExpertShape) -> BlockLayout:
        """Layout of one expert's block."""
        ...

    def pack(self, tensors: Mapping[str, torch.Tensor], shape: ExpertShape, block: torch.Tensor) -> None:
        """Fills ``block`` ([num_bytes] uint8) from the checkpoint's tensors of one expert."""
        ...

    def quantize(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors for float matrices by linear name (gate_proj, up_proj, down_proj), without
        biases."""
        ...

    def dequantize(self, block: torch.Tensor, shape: ExpertShape) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights of a block: gate above up [2I, H], and down [H, I]. Biases are parts of their own."""
        ...
