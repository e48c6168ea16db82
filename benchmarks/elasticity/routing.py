"""Imposes routing on a model with random weights: each row of a decode step is a stream that draws its experts from the
generator whose LRU hits follow a published curve.

Random routers on random hidden states agree far more than trained ones do. What a token takes depends on its layer, its
row and the number of the decode step, all counted on the device, so that graphs may replay it and a replay of recorded
steps meets the same routing. Tokens of prompts take what the streams took at any step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.routing_traces import RoutingModel, Stream
from worker.config import WorkerConfig
from worker.execution.weights import WeightSource
from worker.experts.pager import ExpertPager
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertLayer
from worker.models.paged import PagedFactory, paged_factory, table_experts

TRACE_STEPS = 64
DRAWN_LAYERS = 4
"""Layers beyond these take the draws of one of them with its experts in another order."""


@dataclass(frozen=True, slots=True)
class ImposedRouting:
    """``rows`` streams of one domain at most run at once."""

    rows: int
    seed: int = 0


def draw_trace(num_layers: int, num_experts: int, per_token: int, routing: ImposedRouting) -> np.ndarray:
    """[layers, steps, rows, experts_per_token] int64, distinct within a token."""
    drawn = min(num_layers, DRAWN_LAYERS)
    model = RoutingModel(num_layers=drawn, num_experts=num_experts, per_token=per_token)
    streams = [Stream(model, 0, routing.seed * 1000 + number) for number in range(routing.rows)]
    steps = [[stream.token() for stream in streams] for _ in range(TRACE_STEPS)]
    base = np.array(steps, dtype=np.int64).transpose(2, 0, 1, 3)
    orders = np.random.default_rng(routing.seed)
    layers = [base[layer % drawn] for layer in range(num_layers)]
    return np.stack(
        [found if n < drawn else orders.permutation(num_experts)[found] for n, found in enumerate(layers)]
    )


class Routing:
    """The trace on a device.

    Attributes:
        passing: whether what is computed now belongs to a prefill pass.
    """

    def __init__(
        self, num_layers: int, num_experts: int, per_token: int, routing: ImposedRouting, device: torch.device
    ) -> None:
        self._trace = torch.from_numpy(draw_trace(num_layers, num_experts, per_token, routing)).to(device)
        self._rows = routing.rows
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self.passing = False

    def rewind(self) -> None:
        """The next decode step is the first."""
        self._at.zero_()

    def choose(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """[tokens, experts_per_token] what the tokens of a step or pass take in place of ``experts``, -1 in padding."""
        trace, tokens = self._trace[layer], len(experts)
        if self.passing or tokens > self._rows:
            flat = trace.flatten(0, 1)
            chosen = flat.repeat(-(-tokens // len(flat)), 1)[:tokens]
        else:
            if layer == 0:
                self._at.add_(1).remainder_(TRACE_STEPS)
            chosen = trace.index_select(0, self._at)[0, :tokens]
        return torch.where(experts >= 0, chosen, -1)


class ImposedLayer:
    """A layer's experts under imposed routing."""

    def __init__(self, experts: RoutedExperts, routing: Routing, layer: int) -> None:
        self._experts, self._routing, self._layer = experts, routing, layer

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As the experts that it wraps, with other choices."""
        return self._experts(x, weights, self._routing.choose(self._layer, experts))


class ImposedFactory:
    """Makes layers under imposed routing, paged or all resident, as ``config.experts`` says."""

    def __init__(self, config: WorkerConfig, imposed: ImposedRouting, routing: Routing | None = None) -> None:
        """``routing``: one that was drawn already."""
        self._config = config
        self._imposed = imposed
        self._paged: PagedFactory | None = paged_factory(config) if config.experts == "paged" else None
        self._layers: dict[int, int] = {}
        self.routing = routing

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """See :class:`worker.models.base.ExpertFactory`."""
        if self._paged is None:
            layer = table_experts(experts, source, self._config.deterministic)
        else:
            layer = self._paged(experts, source)
        if source.rehearsing:
            self._layers[experts.layer] = len(self._layers)
            return layer
        if self.routing is None:
            self.routing = Routing(
                len(self._layers),
                experts.num_experts,
                experts.experts_per_token,
                self._imposed,
                source.device,
            )
        return ImposedLayer(layer, self.routing, self._layers[experts.layer])


class ImposedPagedFactory(ImposedFactory):
    """Asked for the pager when the model is built."""

    def finish(self, device: torch.device) -> ExpertPager:
        """See :class:`worker.models.paged.PagingFactory`."""
        assert self._paged is not None
        return self._paged.finish(device)


def impose(config: WorkerConfig, imposed: ImposedRouting, routing: Routing | None = None) -> ImposedFactory:
    """The factory for a runner under ``config``; ``routing``: one that was drawn already."""
    return (ImposedPagedFactory if config.experts == "paged" else ImposedFactory)(config, imposed, routing)
