"""The rules of expert residency as small pure classes over one pool of places, to be scored on recorded routing.

A step is, layer by layer, the distinct experts that its decode rows chose, as keys layer * experts + expert. What the
device does (``memory.device.residency``) is what :class:`Lru` and :class:`Lfru` do here, place by place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memory.device.residency_rules import FREQUENCY_DECAY, FROZEN_MARGIN, RECENCY_WEIGHT, THAW_SHARE

FOLLOWED_WEIGHT = 3.0 / (1.0 - FREQUENCY_DECAY)
"""Of the chance to be used in the next step, beside decayed counts. This and the next were chosen on one half of the
demonstration model's recorded routing and on generated routing; what is published is the other half's."""
FOLLOWED_PRIOR = 2.0
FOLLOWED_MEMORY = 4096
"""Counts of a key are halved when it was used so often: routing drifts."""

Keys = npt.NDArray[np.int64]
Step = Sequence[Keys]


class Policy(Protocol):
    """Decides step by step what stays."""

    def step(self, layers: Step) -> int:
        """Takes one step's distinct keys by layer; answers how many were resident."""
        ...


@dataclass(frozen=True, slots=True)
class Pool:
    """``num_places`` for the experts of all layers, ``num_experts`` in each of ``num_layers``."""

    num_places: int
    num_layers: int
    num_experts: int


class _Queued(ABC):
    """One scan a step sorts the places by worth; each layer's misses take from the front what may go.

    ``ranked``: the worthiest miss meets the least worthy place; else misses come by their number.
    """

    def __init__(self, pool: Pool, freezes: bool = True, ranked: bool = True) -> None:
        self._pool = pool
        self._freezes = freezes
        self._ranked = ranked
        keys = pool.num_layers * pool.num_experts
        self._place = np.full(keys, -1, dtype=np.int64)
        self._owner = np.full(pool.num_places, -1, dtype=np.int64)
        self._stamp = np.full(pool.num_places, -1, dtype=np.int64)
        self._uses = np.zeros(keys, dtype=np.float32)
        self._seen = np.full(keys, -1, dtype=np.int64)
        self._now = 0
        self._demand = 0
        self.frozen = False
        self.evictions = 0

    def step(self, layers: Step) -> int:
        """See :class:`Policy`."""
        self._now += 1
        if self._freezes:
            thawed = self._demand < THAW_SHARE * self._pool.num_places
            self.frozen = self._demand > self._pool.num_places or (self.frozen and not thawed)
        self._demand = 0
        self._uses *= np.float32(FREQUENCY_DECAY)
        worth = np.where(self._owner < 0, -1.0, self._worth(self._owner.clip(0)))
        queue = np.argsort(worth, kind="stable")
        return sum(self._layer(keys, queue) for keys in layers if len(keys))

    def _layer(self, keys: Keys, queue: Keys) -> int:
        keys = np.sort(keys)
        place = self._place[keys]
        self._stamp[place[place >= 0]] = self._now
        self._uses[keys] += 1
        self._seen[keys] = self._now
        self._demand += len(keys)
        self._note(keys)
        ours = self._owner[queue] // self._pool.num_experts == keys[0] // self._pool.num_experts
        ready = queue[(self._stamp[queue] < self._now) & (~ours | (self._owner[queue] < 0))]
        misses = keys[place < 0]
        if self._ranked:
            misses = misses[np.argsort(-self._worth(misses), kind="stable")]
        for key, victim in zip(misses.tolist(), ready.tolist(), strict=False):
            owner = int(self._owner[victim])
            if owner >= 0 and not self._takes(key, owner):
                continue
            if owner >= 0:
                self._place[owner] = -1
                self.evictions += 1
            self._place[key], self._owner[victim], self._stamp[victim] = victim, key, self._now
        return int((place >= 0).sum())

    def _note(self, keys: Keys) -> None:  # noqa: B027 (most policies learn nothing else)
        """A layer's distinct keys of this step, before its misses take places."""

    @abstractmethod
    def _worth(self, keys: Keys) -> npt.NDArray[np.float32]:
        """How much each key's residency is worth; the least is let go first."""

    @abstractmethod
    def _takes(self, key: int, owner: int) -> bool:
        """Whether a missing key may take the place of its owner."""

    @property
    def resident(self) -> Keys:
        """The keys that have places."""
        return np.flatnonzero(self._place >= 0)


class Lru(_Queued):
    """The least recently used goes first; while frozen nothing goes."""

    def _worth(self, keys: Keys) -> npt.NDArray[np.float32]:
        return self._seen[keys].astype(np.float32) + 1

    def _takes(self, key: int, owner: int) -> bool:
        return not self.frozen


class Lfru(_Queued):
    """The least used lately goes first, recent use counts a little; a miss that is worth less is read in place."""

    def _worth(self, keys: Keys) -> npt.NDArray[np.float32]:
        age = (self._now - self._seen[keys]).clip(0).astype(np.float32) + 1
        return self._uses[keys] + np.float32(RECENCY_WEIGHT) / age

    def _takes(self, key: int, owner: int) -> bool:
        mine, theirs = self._worth(np.array([key, owner]))
        return bool(mine > (FROZEN_MARGIN if self.frozen else 1.0) * theirs)


class Successor(Lfru):
    """LFRU, and what usually follows: a key is worth more where the layer's keys of a step were, in the past, followed
    by it in the step behind.

    Per layer it counts how often each key was followed by each other one (``num_experts`` squared counters), and takes
    the mean over the keys in use, drawn towards the key's overall share while there are few counts.
    """

    def __init__(self, pool: Pool, freezes: bool = True) -> None:
        super().__init__(pool, freezes)
        keys = pool.num_layers * pool.num_experts
        self._followed = np.zeros((keys, pool.num_experts), dtype=np.float32)
        self._times = np.zeros(keys, dtype=np.float32)
        self._total = np.zeros(keys, dtype=np.float32)
        self._next = np.zeros(keys, dtype=np.float32)
        self._before: dict[int, Keys] = {}

    def _note(self, keys: Keys) -> None:
        experts = self._pool.num_experts
        layer = int(keys[0]) // experts
        block = slice(layer * experts, (layer + 1) * experts)
        before = self._before.get(layer)
        if before is not None:
            self._followed[before[:, None], keys % experts] += 1
            self._times[before] += 1
            old = before[self._times[before] >= FOLLOWED_MEMORY]
            self._followed[old] /= 2
            self._times[old] /= 2
        self._before[layer] = keys
        self._total[keys] += 1
        share = self._total[block] / np.float32(self._now)
        drawn = self._followed[keys] + np.float32(FOLLOWED_PRIOR) * share
        self._next[block] = (drawn / (self._times[keys] + np.float32(FOLLOWED_PRIOR))[:, None]).mean(0)

    def _worth(self, keys: Keys) -> npt.NDArray[np.float32]:
        worth: npt.NDArray[np.float32] = super()._worth(keys) + np.float32(FOLLOWED_WEIGHT) * self._next[keys]
        return worth

    def known_worth(self) -> npt.NDArray[np.float32]:
        """What every key is worth, behind the last step."""
        return self._worth(np.arange(len(self._total)))


class Frozen:
    """Counts for ``learning_steps`` (as LFRU), then keeps the most used for good and reads all others in place."""

    def __init__(self, pool: Pool, learning_steps: int = 200) -> None:
        self._learner = Lfru(pool)
        self._left = learning_steps
        self._counts = np.zeros(pool.num_layers * pool.num_experts, dtype=np.int64)
        self._kept = np.zeros(len(self._counts), dtype=bool)
        self._pool = pool

    def step(self, layers: Step) -> int:
        """See :class:`Policy`."""
        if self._left <= 0:
            return sum(int(self._kept[keys].sum()) for keys in layers)
        self._left -= 1
        for keys in layers:
            self._counts[keys] += 1
        if self._left == 0:
            self._kept[np.argsort(-self._counts, kind="stable")[: self._pool.num_places]] = True
        return self._learner.step(layers)


def belady_hits(steps: Sequence[Step], num_places: int) -> list[int]:
    """Hits per step of the best that could be done with the future known: what is needed latest goes, and a miss that
    is needed later than everything resident is not taken in (Belady 1966, with bypass). Later is by step, and within a
    step by layer."""
    uses: dict[int, list[int]] = {}
    turn = 0
    for layers in steps:
        for keys in layers:
            for key in keys.tolist():
                uses.setdefault(key, []).append(turn)
            turn += 1
    for times in uses.values():
        times.reverse()
    resident: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    found = []
    for layers in steps:
        hits = 0
        for keys in layers:
            # A layer's keys are used at once: those that are there may go for the sake of those that are not.
            for key in sorted(keys.tolist(), key=lambda key: key not in resident):
                times = uses[key]
                times.pop()
                again = times[-1] if times else turn
                if key in resident:
                    hits += 1
                elif len(resident) >= num_places:
                    while resident.get(heap[0][1]) != -heap[0][0]:
                        heappop(heap)
                    if -heap[0][0] <= again:
                        continue
                    del resident[heappop(heap)[1]]
                resident[key] = again
                heappush(heap, (-again, key))
        found.append(hits)
    return found


def foresight_hits(steps: Sequence[Step], pool: Pool, window: int) -> list[int]:
    """Hits per step of a policy that is told exactly what this step and the next ``window`` will use, layer by layer
    (-1: nothing), and for what lies beyond goes by what :class:`Successor` knows, in exact order at every miss. With
    the window of the whole trace it is Belady's rule."""
    learner = Successor(pool, freezes=False)
    num_layers, total = pool.num_layers, pool.num_layers * len(steps)
    following = _following(steps, pool)
    resident = np.zeros(pool.num_layers * pool.num_experts, dtype=bool)
    found = []
    for number, layers in enumerate(steps):
        learner.step(layers)
        beyond = learner.known_worth().astype(np.float64)
        end = min(total, (number + window + 1) * num_layers)
        sure = float(beyond.max()) + total + 1
        value = np.where(following[number] < end, sure - following[number], beyond)
        after = np.where(following[number + 1] < end, sure - following[number + 1], beyond)
        hits = 0
        for used in layers:
            value[used] = after[used]  # the next use of what was used just now comes with a later step
            hits += int(resident[used].sum())
            for key in used[~resident[used]].tolist():
                held = np.flatnonzero(resident)
                if len(held) < pool.num_places:
                    resident[key] = True
                    continue
                victim = held[value[held].argmin()]
                if value[key] > value[victim]:
                    resident[victim], resident[key] = False, True
        found.append(hits)
    return found


def _following(steps: Sequence[Step], pool: Pool) -> Keys:
    """[steps + 1, keys] the turn, counted in layers of steps, at which each key is used next from a step's begin on;
    the number of all turns where it is not."""
    found = np.full(
        (len(steps) + 1, pool.num_layers * pool.num_experts), pool.num_layers * len(steps), dtype=np.int64
    )
    for number in range(len(steps) - 1, -1, -1):
        found[number] = found[number + 1]
        for layer, keys in enumerate(steps[number]):
            found[number, keys] = number * pool.num_layers + layer
    return found
