"""Imposes experts on the decode rows of an engine: drawn uniformly, or by the generator fitted to a published curve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.routing_traces import RoutingModel
from worker.execution.weights import WeightSource
from worker.layers.mlp import RoutedExperts
from worker.models.base import ExpertFactory, ExpertLayer

TRACE_STEPS = 192
LATELY = 64
"""Tokens whose experts a stream may draw again."""
CANDIDATES = 24
"""Drawn for a token at once; its experts are the first distinct ones."""
RANDOM, CALIBRATED, DOMAINS = "random", "calibrated", "domains"
ROUTINGS = (RANDOM, CALIBRATED, DOMAINS)
Trace = npt.NDArray[np.int64]


def make_trace(
    routing: str,
    model: RoutingModel,
    streams: int,
    num_steps: int = TRACE_STEPS,
    seed: int = 0,
) -> Trace:
    """[steps, layers, streams, experts_per_token], distinct within a token. ``calibrated``: all streams of one domain;
    ``domains``: each stream of its own."""
    if routing == RANDOM:
        shape = (num_steps, model.num_layers, streams, model.num_experts)
        scores = np.random.default_rng(seed).random(shape, dtype=np.float32)
        return np.argpartition(scores, model.per_token, axis=-1)[..., : model.per_token].astype(np.int64)
    domains = [0] * streams if routing == CALIBRATED else list(range(streams))
    return calibrated_trace(model, domains, num_steps, seed)


def calibrated_trace(model: RoutingModel, domains: Sequence[int], num_steps: int, seed: int) -> Trace:
    """What :class:`benchmarks.routing_traces.Stream` draws, by the same law, for all streams and layers at once."""
    rng = np.random.default_rng([seed, 3])
    ranks = np.arange(model.num_experts) + model.offset
    popularity = np.cumsum(ranks**-model.skew / (ranks**-model.skew).sum())
    orders = [
        [chance.permutation(model.num_experts) for _ in range(model.num_layers)]
        for chance in (np.random.default_rng([domain, 2]) for domain in domains)
    ]
    by_rank = np.array(orders).swapaxes(0, 1).reshape(-1, model.num_experts)  # [layers * streams, experts]
    rows = np.arange(len(by_rank))[:, None]
    lately = np.zeros((len(by_rank), num_steps, model.per_token), dtype=np.int64)
    for step in range(num_steps):
        chosen = np.full((len(by_rank), model.per_token), -1, dtype=np.int64)
        count = np.zeros(len(by_rank), dtype=np.int64)
        while (count < model.per_token).any():
            drawn = by_rank[rows, _ranks(rng, popularity, len(by_rank), model.num_experts)]
            if step:
                known = min(step, LATELY)
                age = np.minimum(rng.geometric(1.0 / model.mean_age, drawn.shape), known)
                again = lately[rows, step - age, rng.integers(model.per_token, size=drawn.shape)]
                drawn = np.where(rng.random(drawn.shape) < model.reuse, again, drawn)
            _take_distinct(chosen, count, drawn)
        lately[:, step] = chosen
    shape = (model.num_layers, len(domains), num_steps, model.per_token)
    return lately.reshape(shape).transpose(2, 0, 1, 3)


def _ranks(rng: np.random.Generator, popularity: npt.NDArray[np.float64], rows: int, most: int) -> Trace:
    found = np.searchsorted(popularity, rng.random((rows, CANDIDATES)))
    return np.minimum(found, most - 1)


def _take_distinct(chosen: Trace, count: npt.NDArray[np.int64], drawn: Trace) -> None:
    """Adds each row's candidates in their order while they are new to it and it is not full."""
    for column in drawn.T:
        fresh = (count < chosen.shape[1]) & (chosen != column[:, None]).all(1)
        at = np.flatnonzero(fresh)
        chosen[at, count[at]] = column[at]
        count[at] += 1


class Routing:
    """The experts that decode rows take, by step; a step's counter lies on the device, so that graphs may replay it."""

    def __init__(self, num_layers: int, most_rows: int, per_token: int, device: torch.device) -> None:
        some = torch.arange(per_token, device=device)
        self._trace = some.repeat(TRACE_STEPS, num_layers, most_rows, 1)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._now = self._trace[0]
        self.most_rows = most_rows

    def impose(self, trace: Trace) -> None:
        """Takes a trace of at most ``most_rows`` streams; nothing may be running."""
        repeats = -(-TRACE_STEPS // len(trace))
        whole = np.concatenate([trace] * repeats)[:TRACE_STEPS]
        self._trace[:, :, : trace.shape[2]] = torch.from_numpy(whole).to(self._trace.device)
        self._at.zero_()

    def choose(self, row: int, experts: torch.Tensor) -> torch.Tensor:
        """The trace's experts for the rows of a decode step of layer ``row``. All layers' are taken with the first
        one's, in three launches a step; rows that are padding there stay without."""
        if row == 0:
            self._at.add_(1).remainder_(TRACE_STEPS)
            now = self._trace.index_select(0, self._at)[0, :, : len(experts)]
            self._now = torch.where(experts >= 0, now, -1)
        return self._now[row]


class ImposedExperts:
    """A layer's experts under imposed routing; prompts keep their own."""

    def __init__(self, experts: RoutedExperts, routing: Routing, row: int) -> None:
        self._experts, self._routing, self._row = experts, routing, row

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As the experts that it wraps."""
        if len(x) <= self._routing.most_rows:
            experts = self._routing.choose(self._row, experts)
        return self._experts(x, weights, experts)


class ImposedFactory:
    """Another factory's experts under imposed routing.

    Attributes:
        rows: the row of each model layer with experts, known behind the rehearsal.
    """

    def __init__(self, factory: ExpertFactory, most_rows: int) -> None:
        self._factory = factory
        self._most_rows = most_rows
        self.rows: dict[int, int] = {}
        self._routing: Routing | None = None

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """See :class:`worker.models.base.ExpertFactory`."""
        layer = self._factory(experts, source)
        if source.rehearsing:
            self.rows[experts.layer] = len(self.rows)
            return layer
        if self._routing is None:
            per_token = experts.experts_per_token
            self._routing = Routing(len(self.rows), self._most_rows, per_token, source.device)
        return ImposedExperts(layer, self._routing, self.rows[experts.layer])

    @property
    def routing(self) -> Routing:
        """RuntimeError before the model is built."""
        if self._routing is None:
            raise RuntimeError("the model has no experts, or is not built yet")
        return self._routing
