"""Finds one expert's tensors in the layouts that Qwen checkpoints use: stacked, one by one, or quantised one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from worker.execution.weights import WeightSource
from worker.quantization.base import ExpertShape, Format
from worker.quantization.int4 import Int4
from worker.quantization.unquantized import Unquantized

ExpertReader = Callable[[int], Mapping[str, torch.Tensor]]


def routed_experts(
    source: WeightSource, prefix: str, num_experts: int, shape: ExpertShape, format: Format, dtype: str
) -> tuple[Format, ExpertReader]:
    """The format of the experts under ``prefix`` and their reader.

    ``format`` is the checkpoint's; layers that it left alone are read as they are, in ``dtype``. Random weights are
    drawn as floats and quantised.
    """
    plain = Unquantized(dtype)
    if format.name == plain.name:
        return plain, unquantized_experts(source, prefix, num_experts, shape)
    if source.is_made_up:
        floats = unquantized_experts(source, prefix, num_experts, shape)
        return format, lambda expert: _quantized(source, format, floats(expert))
    if isinstance(format, Int4):
        suffix = format.layout.scale_suffix()
        scales = [source.shape(f"{prefix}.0.{name}.{suffix}") for name in ("gate_proj", "down_proj")]
        if scales[0] is not None and scales[1] is not None:
            format = format.fitted(shape, scales[0], scales[1])
    specs = format.expert_tensors(shape)
    if not any(source.has(f"{prefix}.0.{spec.name}") for spec in specs if not spec.name.endswith(".weight")):
        return plain, unquantized_experts(source, prefix, num_experts, shape)
    return format, lambda expert: {
        spec.name: source.take(f"{prefix}.{expert}.{spec.name}", spec.shape, raw=True) for spec in specs
    }


def _quantized(
    source: WeightSource, format: Format, floats: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    if source.rehearsing:
        return floats
    return format.quantize({name.removesuffix(".weight"): tensor for name, tensor in floats.items()})


def unquantized_experts(
    source: WeightSource, prefix: str, num_experts: int, shape: ExpertShape
) -> ExpertReader:
    """A reader of the experts under ``prefix``: ``gate_up_proj`` [E, 2I, H] (gate above up) and ``down_proj``
    [E, H, I] where the checkpoint stacks them, else ``E.{gate,up,down}_proj.weight``."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if source.has(f"{prefix}.gate_up_proj"):
        # Read when the first expert is asked for, and let go with the reader: a layer at a time is in memory.
        @cache
        def stacked() -> tuple[torch.Tensor, torch.Tensor]:
            return (
                source.take(f"{prefix}.gate_up_proj", (num_experts, 2 * inner, hidden)),
                source.take(f"{prefix}.down_proj", (num_experts, hidden, inner)),
            )

        return lambda expert: {
            "gate_proj.weight": stacked()[0][expert, :inner],
            "up_proj.weight": stacked()[0][expert, inner:],
            "down_proj.weight": stacked()[1][expert],
        }
    return lambda expert: {
        "gate_proj.weight": source.take(f"{prefix}.{expert}.gate_proj.weight", (inner, hidden)),
        "up_proj.weight": source.take(f"{prefix}.{expert}.up_proj.weight", (inner, hidden)),
        "down_proj.weight": source.take(f"{prefix}.{expert}.down_proj.weight", (hidden, inner)),
    }
