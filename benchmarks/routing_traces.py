"""Routing to replay: what a model was recorded to choose, and a generator calibrated to a published curve.

The curve: per-layer LRU hits of one stream at K = 8, 24, 49, 81 of 128 experts, 8 per token: 37, 74, 89, 96 %. The
generator draws each of a token's experts either again from what the stream used lately (age in tokens geometric) or
from its domain's popularity (a power law over the layer's experts in an order of the domain's own).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PUBLISHED = {8: 0.37, 24: 0.74, 49: 0.89, 81: 0.96}
Steps = list[list[npt.NDArray[np.int64]]]


@dataclass(frozen=True, slots=True)
class RoutingModel:
    """The generator's settings; the defaults were fitted to the published curve by random search.

    Attributes:
        reuse: chance that an expert is drawn from what the stream used lately.
        mean_age: mean age, in tokens, of what is drawn again.
        skew: exponent of the domain's popularity, 1 / (rank + offset) ** skew.
        offset: flattens the head of the popularity.
    """

    num_layers: int = 6
    num_experts: int = 128
    per_token: int = 8
    reuse: float = 0.42
    mean_age: float = 9.0
    skew: float = 1.75
    offset: float = 4.0


class Stream:
    """One sequence of tokens; in each layer it draws from its domain."""

    def __init__(self, model: RoutingModel, domain: int, seed: int) -> None:
        self._model = model
        self._rng = np.random.default_rng([seed, 1])
        order = np.random.default_rng([domain, 2])
        ranks = np.arange(model.num_experts) + model.offset
        weights = ranks**-model.skew
        self._popularity = []
        for _ in range(model.num_layers):
            shuffled = np.empty(model.num_experts)
            shuffled[order.permutation(model.num_experts)] = weights / weights.sum()
            self._popularity.append(shuffled.cumsum())
        self._lately: list[deque[list[int]]] = [deque(maxlen=64) for _ in range(model.num_layers)]

    def token(self) -> list[list[int]]:
        """The next token's experts by layer, distinct."""
        return [self._draw(layer) for layer in range(self._model.num_layers)]

    def _draw(self, layer: int) -> list[int]:
        model, lately, rng = self._model, self._lately[layer], self._rng
        chosen: list[int] = []
        while len(chosen) < model.per_token:
            if lately and rng.random() < model.reuse:
                age = min(int(rng.geometric(1.0 / model.mean_age)), len(lately))
                expert = lately[-age][int(rng.integers(model.per_token))]
            else:
                expert = int(np.searchsorted(self._popularity[layer], rng.random()))
                expert = min(expert, model.num_experts - 1)
            if expert not in chosen:
                chosen.append(expert)
        lately.append(chosen)
        return chosen


def generate(model: RoutingModel, domains: Sequence[int], num_steps: int, seed: int) -> Steps:
    """Decode steps of one stream per entry of ``domains``: by layer the distinct keys of all streams' tokens."""
    streams = [Stream(model, domain, seed * 1000 + n) for n, domain in enumerate(domains)]
    return [_keys([stream.token() for stream in streams], model.num_experts) for _ in range(num_steps)]


def recorded(
    chosen: npt.NDArray[np.uint8], texts: Sequence[slice], num_experts: int, num_streams: int
) -> Steps:
    """Decode steps over recorded texts, ``num_streams`` at a time: a stream that ends takes up the next text.

    ``chosen``: [layers, tokens, experts_per_token].
    """
    queue = deque(texts)
    running: list[deque[int]] = []
    steps: Steps = []
    while queue or any(running):
        running = [stream for stream in running if stream]
        while len(running) < num_streams and queue:
            text = queue.popleft()
            running.append(deque(range(text.start, text.stop)))
        if len(running) < num_streams and steps:
            break  # the tail with fewer streams would be another experiment
        tokens = [stream.popleft() for stream in running]
        steps.append(_keys([chosen[:, token].tolist() for token in tokens], num_experts))
    return steps


def _keys(tokens: Sequence[Sequence[Sequence[int]]], num_experts: int) -> list[npt.NDArray[np.int64]]:
    """Tokens' experts by layer to distinct keys by layer."""
    layers = range(len(tokens[0]))
    return [
        np.unique([layer * num_experts + e for token in tokens for e in token[layer]]).astype(np.int64)
        for layer in layers
    ]


def layer_lru_hits(steps: Steps, capacity: int) -> float:
    """Share of hits where each layer keeps its ``capacity`` latest experts: how the curve was published."""
    hits = uses = 0
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in steps[0]]
    for layers in steps:
        for held, keys in zip(kept, layers, strict=True):
            uses += len(keys)
            hits += sum(key in held for key in keys.tolist())
            for key in keys.tolist():
                held[key] = None
                held.move_to_end(key)
            while len(held) > capacity:
                held.popitem(last=False)
    return hits / uses
