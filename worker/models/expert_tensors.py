"""Finds one expert's gate, up and down in the layouts that Qwen checkpoints use: stacked, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from worker.execution.weights import WeightSource
from worker.quantization.base import ExpertShape


def unquantized_experts(
    source: WeightSource, prefix: str, num_experts: int, shape: ExpertShape
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """A reader of the experts under ``prefix``: ``gate_up_proj`` [E, 2I, H] (gate above up) and ``down_proj``
    [E, H, I] where the checkpoint stacks them, else ``E.{gate,up,down}_proj.weight``."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if source.has(f"{prefix}.gate_up_proj"):
        gate_up = source.take(f"{prefix}.gate_up_proj", (num_experts, 2 * inner, hidden))
        down = source.take(f"{prefix}.down_proj", (num_experts, hidden, inner))
        return lambda expert: {
            "gate_proj.weight": gate_up[expert, :inner],
            "up_proj.weight": gate_up[expert, inner:],
            "down_proj.weight": down[expert],
        }
    return lambda expert: {
        "gate_proj.weight": source.take(f"{prefix}.{expert}.gate_proj.weight", (inner, hidden)),
        "up_proj.weight": source.take(f"{prefix}.{expert}.up_proj.weight", (inner, hidden)),
        "down_proj.weight": source.take(f"{prefix}.{expert}.down_proj.weight", (hidden, inner)),
    }
