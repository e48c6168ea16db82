"""Looks at every layer's experts while a model runs, and finds the layer and expert where two models part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.execution.weights import WeightSource
from worker.experts.pager import ExpertPager
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertFactory, ExpertLayer
from worker.models.paged import PagingFactory


@dataclass(frozen=True, slots=True)
class Seen:
    """One layer's experts in one step: input [tokens, H], weights and choices [tokens, k], output [tokens, H]."""

    layer: int
    x: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    out: torch.Tensor

    def to(self, device: torch.device) -> Seen:
        """The same on ``device``."""
        return Seen(
            self.layer,
            *(tensor.to(device) for tensor in (self.x, self.weights, self.experts, self.out)),
        )


class Singles(Protocol):
    """What can compute an expert alone."""

    def single(self, layer: int, x: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's output for one token [1, H], with weight 1."""
        ...


@dataclass(frozen=True, slots=True)
class Parting:
    """Where paged experts first gave something else: layer, token in its step, and the experts of that token that do
    (none where each alone is right)."""

    layer: int
    token: int
    experts: tuple[int, ...]
    relative_error: float


class Probe:
    """An expert factory that keeps what the experts of the last step saw; wraps another factory."""

    def __init__(self, factory: ExpertFactory) -> None:
        self._factory = factory
        self._layers: dict[int, RoutedExperts] = {}
        self.seen: list[Seen] = []

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """See :class:`worker.models.base.ExpertFactory`."""
        inner = self._factory(experts, source)
        self._layers[experts.layer] = inner
        return _Probed(self, experts.layer, inner)

    def single(self, layer: int, x: torch.Tensor, expert: int) -> torch.Tensor:
        """One expert's output for one token [1, H], with weight 1."""
        choice = torch.tensor([[expert]], device=x.device)
        return self._layers[layer](x, torch.ones(1, 1, device=x.device), choice)


class PagingProbe(Probe):
    """A probe around a paging factory."""

    def __init__(self, factory: ExpertFactory) -> None:
        super().__init__(factory)
        self._pager: ExpertPager | None = None

    def finish(self, device: torch.device) -> ExpertPager:
        """The wrapped factory's pager."""
        assert isinstance(self._factory, PagingFactory)
        self._pager = self._factory.finish(device)
        return self._pager

    def single(self, layer: int, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As above, moving nothing: the expert is read where its address points now."""
        assert self._pager is not None
        with self._pager.standing_still():
            return super().single(layer, x, expert)


class _Probed:
    def __init__(self, probe: Probe, layer: int, inner: RoutedExperts) -> None:
        self._probe, self._layer, self._inner = probe, layer, inner

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        out = self._inner(x, weights, experts)
        self._probe.seen.append(Seen(self._layer, x.clone(), weights.clone(), experts.clone(), out.clone()))
        return out


def find_parting(
    expected: Sequence[Seen], reference: Singles, paged: Probe, tolerance: float
) -> Parting | None:
    """The first layer of the last step whose experts gave, for like input and equal choices, an output that is off by
    more than ``tolerance`` of its size from what ``reference`` saw; None if all agree. A token whose choices differ is
    left out: routers may break a tie either way."""
    for right, found in zip(expected, paged.seen, strict=True):
        right = right.to(found.x.device)
        same = (right.experts == found.experts).all(1)
        alike = _relative(right.x, found.x) <= tolerance / 4
        error = torch.where(same & alike, _relative(right.out, found.out), 0.0)
        error = torch.nan_to_num(error, nan=torch.inf)
        token = int(error.argmax())
        if float(error[token]) > tolerance:
            x = right.x[token : token + 1]
            wrong = []
            for expert in right.experts[token].tolist():
                outs = [experts.single(right.layer, x, expert) for experts in (reference, paged)]
                if not float(_relative(*outs)[0]) <= tolerance:
                    wrong.append(expert)
            return Parting(right.layer, token, tuple(wrong), float(error[token]))
    return None


def _relative(right: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """[tokens] size of the difference by the size of ``right``."""
    size = right.float().norm(dim=1).clamp_min(1e-12)
    return (right.float() - found.float()).norm(dim=1) / size
