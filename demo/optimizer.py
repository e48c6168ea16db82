"""Trains leaf tensors: orthogonalised momentum for matrices, Adam for everything else, fp32 masters of bf16 weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from demo.architecture import LINEAR, Leaf, Shape, leaves


@dataclass(frozen=True)
class Rates:
    """Hyperparameters at the peak of the schedule."""

    matrix: float = 4e-3
    other: float = 3e-3
    decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.97)


def initial(shape: Shape, seed: int, device: str) -> dict[str, Tensor]:
    """Fresh fp32 leaf tensors. Decay rates of the linear layers spread from about 2 to 500 tokens."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for leaf in leaves(shape):
        value = torch.randn(leaf.full_dims, generator=generator) * leaf.std
        if leaf.name == "linear_attn.norm.weight":
            value = torch.ones(leaf.full_dims)
        elif leaf.name == "linear_attn.A_log":
            value = torch.linspace(0, math.log(8), shape.linear_v_heads).expand(leaf.full_dims).clone()
        elif leaf.name == "linear_attn.dt_bias":
            steps = torch.logspace(math.log10(0.002), math.log10(0.06), shape.linear_v_heads)
            value = torch.log(torch.expm1(steps)).expand(leaf.full_dims).clone()
        out[leaf.name] = value.to(device)
    assert LINEAR in shape.kinds
    return out


def orthogonalise(update: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of the last two axes by the quintic Newton-Schulz iteration (Jordan, 2024)."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        poly = -4.7750 * square + 2.0315 * (square @ square)
        x = 3.4445 * x + poly @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Holds fp32 masters and moments, and the bf16 (or fp32) working copies whose ``.grad`` it reads."""

    def __init__(
        self,
        shape: Shape,
        masters: dict[str, Tensor],
        rates: Rates,
        dtype: torch.dtype,
        wrap: Callable[[Callable[..., object]], Callable[..., object]] | None = None,
    ) -> None:
        self._leaves, self._rates, self.steps = leaves(shape), rates, 0
        self._orthogonalise = (wrap or (lambda f: f))(orthogonalise)
        self.masters = masters
        self.params = {n: m.to(dtype).clone().requires_grad_(True) for n, m in masters.items()}
        self.first = {n: torch.zeros_like(m) for n, m in masters.items()}
        self.second = {
            leaf.name: torch.zeros_like(masters[leaf.name]) for leaf in self._leaves if not leaf.matrix
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Applies the gradients at ``scale`` times the peak rates and clears them."""
        self.steps += 1
        for leaf in self._leaves:
            param, master = self.params[leaf.name], self.masters[leaf.name]
            assert param.grad is not None, leaf.name
            if leaf.matrix:
                self._step_matrix(leaf, master, param.grad.float(), scale * self._rates.matrix)
            else:
                self._step_other(leaf, master, param.grad.float(), scale * self._rates.other)
            param.grad = None
        torch._foreach_copy_(list(self.params.values()), list(self.masters.values()))

    def _step_matrix(self, leaf: Leaf, master: Tensor, grad: Tensor, rate: float) -> None:
        momentum = self._rates.momentum
        first = self.first[leaf.name]
        first.mul_(momentum).add_(grad, alpha=1 - momentum)
        direction = self._orthogonalise(grad * (1 - momentum) + first * momentum)
        # Keeps the update's root mean square at 0.2 whatever the shape, as Adam's is (Liu et al., 2025).
        size = 0.2 * math.sqrt(max(leaf.dims[-2:]))
        master.mul_(1 - rate * self._rates.decay).add_(direction, alpha=-rate * size)

    def _step_other(self, leaf: Leaf, master: Tensor, grad: Tensor, rate: float) -> None:
        low, high = self._rates.betas
        first, second = self.first[leaf.name], self.second[leaf.name]
        first.lerp_(grad, 1 - low)
        second.mul_(high).addcmul_(grad, grad, value=1 - high)
        root = (second / (1 - high**self.steps)).sqrt_().add_(1e-12)
        master.addcdiv_(first, root, value=-rate / (1 - low**self.steps))

    def state(self) -> dict[str, object]:
        """Everything needed to go on after a break."""
        return {"masters": self.masters, "first": self.first, "second": self.second, "steps": self.steps}

    @torch.no_grad()
    def restore(self, state: dict[str, object]) -> None:
        """Takes over what ``state`` returned."""
        for kind in ("masters", "first", "second"):
            saved = state[kind]
            assert isinstance(saved, dict)
            for name, tensor in getattr(self, kind).items():
                tensor.copy_(saved[name])
        assert isinstance(state["steps"], int)
        self.steps = state["steps"]
        torch._foreach_copy_(list(self.params.values()), list(self.masters.values()))
