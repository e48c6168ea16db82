"""Feed-forward sublayers: one gated MLP, or routed experts with or without a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.linear import Linear
from kernels.moe import route
from kernels.pointwise import silu_and_mul
from kernels.sublayers import moe_step
from worker.execution.context import ForwardContext
from worker.layers.experts import ResidentExperts


class RoutedExperts(Protocol):
    """One layer's routed experts, wherever their weights are."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weighted sum over [tokens, k] chosen experts (see :func:`kernels.moe.route`), [tokens, H]."""
        ...


class GatedMlp:
    """``down(silu(gate x) * (up x))``."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, deterministic: bool = False) -> None:
        """``gate_up`` [2 * I, H], gate above up; ``down`` [H, I]."""
        self._gate_up = Linear(gate_up, deterministic=deterministic)
        self._down = Linear(down, deterministic=deterministic)

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens, H] to [tokens, H]."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(silu_and_mul(gate, up))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token takes, weighed by ``sigmoid(gate x)``: its rows ride in the router's product.

    ``intermediate_size`` I; ``down`` [H, I].
    """

    intermediate_size: int
    down: torch.Tensor


class MoeMlp:
    """Router, routed experts and, where the model has one, the shared expert."""

    def __init__(
        self,
        router: torch.Tensor,
        router_bias: torch.Tensor | None,
        experts: RoutedExperts,
        num_experts: int,
        experts_per_token: int,
        renormalise: bool,
        shared: SharedExpert | None = None,
        deterministic: bool = False,
    ) -> None:
        """``router``: [experts, H] rows; with a shared expert followed by its gate [1, H], its gate_proj [I, H] and
        its up_proj [I, H]."""
        self._router = Linear(router, router_bias, deterministic)
        self._experts = experts
        self._num_experts = num_experts
        self._experts_per_token = experts_per_token
        self._renormalise = renormalise
        self._shared_size = shared.intermediate_size if shared is not None else 0
        self._shared_down = Linear(shared.down, deterministic=deterministic) if shared is not None else None
        self._step = None
        if isinstance(experts, ResidentExperts):
            self._step = moe_step(
                self._router,
                experts.bank,
                experts_per_token,
                renormalise,
                self._shared_size,
                self._shared_down,
            )

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[tokens, H] to [tokens, H]; padding takes no experts."""
        if self._step is not None and self._step.takes(x):
            return self._step(x)
        inner = self._router(x)
        logits = inner[:, : self._num_experts]
        weights, experts = route(logits, self._experts_per_token, self._renormalise, context.live)
        out = self._experts(x, weights, experts)
        if self._shared_down is None:
            return out
        size, first = self._shared_size, self._num_experts + 1
        gate, up = inner[:, first : first + size], inner[:, first + size :]
        hidden = silu_and_mul(gate, up, share=inner[:, self._num_experts : first])
        return out.add_(self._shared_down(hidden))
