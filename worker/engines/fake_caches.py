"""The fake engine's simulated caches: which prompt prefixes and which experts a worker would hold by now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from memory.api import CHECKPOINT_TOKENS
from worker.api import ExpertResidency, ModelInfo
from worker.engines.fake_script import FakeScript


class FakePrefixes:
    """Blocks of :data:`CHECKPOINT_TOKENS` prompt tokens, each known by itself and all before it, the least recently
    used given up first."""

    def __init__(self, script: FakeScript) -> None:
        self._capacity = script.prefix_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, tokens: Sequence[int], salt: str) -> int:
        """How many leading tokens are cached; never all, since one must be computed."""
        cached = 0
        for key in _block_keys(tokens[:-1], salt) if self._capacity else ():
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            cached += CHECKPOINT_TOKENS
        return cached

    def insert(self, tokens: Sequence[int], salt: str) -> None:
        """Keeps the whole blocks of ``tokens``."""
        for key in _block_keys(tokens, salt) if self._capacity else ():
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def _block_keys(tokens: Sequence[int], salt: str) -> list[int]:
    keys, key = [], hash(salt)
    for end in range(CHECKPOINT_TOKENS, len(tokens) + 1, CHECKPOINT_TOKENS):
        key = hash((key, tuple(tokens[end - CHECKPOINT_TOKENS : end])))
        keys.append(key)
    return keys


class FakeExperts:
    """A least-recently-used cache of experts per layer. Which experts a token uses depends on the token alone, so
    that like texts use like experts."""

    def __init__(self, script: FakeScript, model: ModelInfo) -> None:
        self._num_experts = model.num_experts
        self._per_token = model.experts_per_token
        self._capacity = min(script.resident_experts, model.num_experts)
        num_layers = model.num_layers if self._capacity else 0
        self._layers: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in range(num_layers))
        self._generation = 0
        self.hits = 0
        self.misses = 0

    def _chosen(self, token: int, layer: int) -> list[int]:
        first = (token * 7919 + layer * 104_729) % self._num_experts
        return [(first + step) % self._num_experts for step in range(self._per_token)]

    def cells(self, token: int) -> int:
        """The experts that ``token`` uses, as bits of a residency map; 0 where nothing is simulated."""
        cells = 0
        for layer in range(len(self._layers)):
            for expert in self._chosen(token, layer):
                cells |= 1 << (layer * self._num_experts + expert)
        return cells

    def as_bytes(self, cells: int) -> bytes | None:
        """Such bits as snapshots and events have them, None where nothing is simulated."""
        num_bits = len(self._layers) * self._num_experts
        return cells.to_bytes(-(-num_bits // 8), "little") if num_bits else None

    def use(self, token: int) -> int:
        """Counts the experts that ``token`` uses in every layer, takes the missing ones in, answers the misses."""
        missed = 0
        for layer, resident in enumerate(self._layers):
            for expert in self._chosen(token, layer):
                missed += expert not in resident
                resident[expert] = None
                resident.move_to_end(expert)
            while len(resident) > self._capacity:
                resident.popitem(last=False)
        self.hits += len(self._layers) * self._per_token - missed
        self.misses += missed
        self._generation += missed > 0
        return missed

    def residency(self) -> ExpertResidency | None:
        """The resident experts as bits, None where nothing is simulated."""
        cells = 0
        for layer, resident in enumerate(self._layers):
            for expert in resident:
                cells |= 1 << (layer * self._num_experts + expert)
        bits = self.as_bytes(cells)
        return (
            None
            if bits is None
            else ExpertResidency(len(self._layers), self._num_experts, self._generation, bits)
        )
