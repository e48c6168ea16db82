"""The simulated experts: which ones a domain's tokens use, and an expert cache that pages them.

Sets of experts are whole numbers with one bit per (layer, expert), layer-major, so that a step costs a few operations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """The routed experts and how domains use them: per layer a domain has ``hot_experts`` that get ``hot_share`` of
    its tokens' choices; the rest goes to all the others evenly."""

    num_layers: int = 48
    num_experts: int = 128
    experts_per_token: int = 8
    hot_experts: int = 32
    hot_share: float = 0.9
    tokens_per_pool: int = 64

    @property
    def num_cells(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts


class Domain:
    """One kind of traffic: its hot experts, and a pool of drawn tokens to take decode steps from."""

    def __init__(self, model: ExpertModel, rng: Random) -> None:
        self._model = model
        self.hot = 0
        hot_of: list[list[int]] = []
        for layer in range(model.num_layers):
            chosen = rng.sample(range(model.num_experts), model.hot_experts)
            hot_of.append(chosen)
            for expert in chosen:
                self.hot |= 1 << (layer * model.num_experts + expert)
        self._tokens = [self._draw_token(hot_of, rng) for _ in range(model.tokens_per_pool)]

    def _draw_token(self, hot_of: list[list[int]], rng: Random) -> int:
        model, token = self._model, 0
        for layer, hot in enumerate(hot_of):
            cold = [expert for expert in range(model.num_experts) if expert not in hot]
            num_hot = sum(rng.random() < model.hot_share for _ in range(model.experts_per_token))
            chosen = rng.sample(hot, num_hot) + rng.sample(cold, model.experts_per_token - num_hot)
            for expert in chosen:
                token |= 1 << (layer * model.num_experts + expert)
        return token

    def decode_step(self, num_tokens: int, rng: Random) -> int:
        """The distinct experts that ``num_tokens`` decode rows of one step use."""
        touched = 0
        for token in rng.choices(self._tokens, k=num_tokens):
            touched |= token
        return touched

    def chunk_share(self, num_tokens: int) -> tuple[float, float]:
        """Shares of the hot and of the other experts that a prefill chunk of ``num_tokens`` touches."""
        model = self._model
        choices = num_tokens * model.experts_per_token
        cold_experts = model.num_experts - model.hot_experts
        hot = 1.0 - (1.0 - model.hot_share / model.hot_experts) ** choices
        cold = 1.0 - (1.0 - (1.0 - model.hot_share) / cold_experts) ** choices
        return hot, cold


class ExpertCache:
    """Resident experts of one worker, least recently used out first (in epochs of about a quarter of the cache).

    A step that needs more than there are places changes nothing: it reads in place, as a frozen set does.
    """

    def __init__(self, rng: Random, num_cells: int) -> None:
        self.resident = 0
        self.num_places = num_cells
        self._rng = rng
        self._epochs: deque[int] = deque([0])
        self._masks = [rng.getrandbits(num_cells) for _ in range(12)]

    def touch(self, used: int) -> int:
        """One decode step uses these experts; answers how many missed."""
        missing = (used & ~self.resident).bit_count()
        if used.bit_count() > self.num_places:
            return missing
        self.resident |= used
        self._epochs[-1] |= used
        if self.resident.bit_count() > self.num_places:
            self._evict()
        if self._epochs[-1].bit_count() > self.num_places // 4:
            self._epochs.append(0)
        return missing

    def resize(self, num_places: int) -> None:
        """The memory that is left for experts changed."""
        self.num_places = num_places
        if self.resident.bit_count() > num_places:
            self._evict()

    def _evict(self) -> None:
        """Keeps the newest epochs whole, and of the first that does not fit a random part."""
        kept = 0
        for age, epoch in enumerate(reversed(self._epochs)):
            with_epoch = kept | (epoch & self.resident)
            if with_epoch.bit_count() > self.num_places:
                kept = self._random_part(kept, with_epoch & ~kept)
                for _ in range(len(self._epochs) - age - 1):
                    self._epochs.popleft()
                break
            kept = with_epoch
        self.resident = kept

    def _random_part(self, kept: int, candidates: int) -> int:
        for mask in self._rng.sample(self._masks, len(self._masks)):
            part = candidates & mask
            if (kept | part).bit_count() <= self.num_places:
                kept |= part
                candidates &= ~part
            else:
                candidates = part
        return kept
