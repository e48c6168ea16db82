"""What a conversation, prefix or tenant likely uses of the experts, and how much of that a replica would miss.

Per key a counter of three bits for each of a fixed sample of (layer, expert) cells, kept as three bit planes, so that
learning and predicting are a few operations on whole numbers. The sample takes whole bytes of the residency bitmap at
an odd stride, at most :data:`SAMPLE_BYTES` of them: 384 bytes a key for a model of 48 x 128 experts.

Evidence is the bitmap of experts that a request used where the worker reports one (``TokenEvent.used_expert_bits``).
Otherwise it is the replica's residency when the request ended: it holds the neighbours' experts too, but only a key's
own are there every time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

SAMPLE_BYTES = 128
MIN_OBSERVATIONS = 2

LEVEL_MARK = "\x1f"
"""Between the levels of an affinity key."""
MOST_LEVEL_CHARS = 128
"""A longer level is replaced by its hash: keys are remembered by the thousand, and clients choose them."""


def joined_levels(levels: Iterable[str]) -> str:
    """One affinity key of several, the broadest first (a tenant, then a user, then a conversation); empty ones are left
    out."""
    return LEVEL_MARK.join(_short(level.replace(LEVEL_MARK, "")) for level in levels if level)


def _short(level: str) -> str:
    return level if len(level) <= MOST_LEVEL_CHARS else blake2b(level.encode(), digest_size=32).hexdigest()


def affinity_keys(joined: str) -> tuple[str, ...]:
    """The keys that :func:`joined_levels` made one of, the most specific first: each level with those above it."""
    levels = joined.split(LEVEL_MARK) if joined else []
    return tuple(LEVEL_MARK.join(levels[:end]) for end in range(len(levels), 0, -1))


def sample_stride(num_bytes: int) -> int:
    """The smallest odd stride that leaves at most SAMPLE_BYTES; odd, so that it visits every part of a layer."""
    stride = 1
    while -(-num_bytes // stride) > SAMPLE_BYTES:
        stride += 2
    return stride


def sample(bits: bytes) -> int:
    """The sampled cells of a residency bitmap (``ExpertResidency.bits``) as one whole number."""
    return int.from_bytes(bits[:: sample_stride(len(bits))], "little")


@dataclass(frozen=True, slots=True)
class ExpertProfile:
    """Three-bit counters of the sampled cells as bit planes, lowest bit first, and how often they were trained."""

    planes: tuple[int, int, int]
    num_observations: int

    def trained(self, used: int, mask: int) -> ExpertProfile:
        """Counters up by one where ``used`` has a bit, down by one elsewhere (within ``mask``), saturating."""
        low, middle, high = self.planes
        up = used & ~(low & middle & high)
        down = mask & ~used & (low | middle | high)
        carry, borrow = low & up, ~low & down
        high ^= (carry & middle) | (borrow & ~middle)
        middle ^= carry | borrow
        low ^= up | down
        return ExpertProfile((low & mask, middle & mask, high & mask), self.num_observations + 1)

    def expected_missing(self, resident: int) -> float:
        """Likely cells that are not resident, each weighted 1/4 to 1 by how sure it is to be used."""
        low, middle, high = self.planes
        missing = high & ~resident
        sure = missing.bit_count() + (missing & low).bit_count() + 2 * (missing & middle).bit_count()
        return sure / 4


class ExpertAffinity:
    """Profiles by key, the least recently used forgotten beyond ``max_keys``."""

    def __init__(self, max_keys: int = 8_192) -> None:
        self._max_keys = max_keys
        self._profiles: OrderedDict[str, ExpertProfile] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._profiles)

    def observe(self, keys: Sequence[str], used_bits: bytes) -> None:
        """A request of these keys used (or left resident) the experts of ``used_bits``.

        A bitmap of another length belongs to another model: everything learned is dropped.
        """
        if len(used_bits) != self._num_bytes:
            self._profiles.clear()
            self._num_bytes = len(used_bits)
        used = sample(used_bits)
        mask = (1 << (8 * -(-len(used_bits) // sample_stride(len(used_bits))))) - 1
        for key in keys:
            # Half-way up: one observation must be able to tip a counter either way.
            profile = self._profiles.pop(key, None) or ExpertProfile((mask, mask, 0), 0)
            self._profiles[key] = profile.trained(used, mask)
        while len(self._profiles) > self._max_keys:
            self._profiles.popitem(last=False)

    def profile(self, keys: Sequence[str]) -> ExpertProfile | None:
        """The profile of the first key (most specific first) that was observed often enough; None: no idea."""
        for key in keys:
            profile = self._profiles.get(key)
            if profile is not None and profile.num_observations >= MIN_OBSERVATIONS:
                self._profiles.move_to_end(key)
                return profile
        return None

    def expected_misses(self, profile: ExpertProfile, resident_bits: bytes) -> float:
        """Experts of the whole model that a request of ``profile`` would likely miss where ``resident_bits`` are."""
        if len(resident_bits) != self._num_bytes or not resident_bits:
            return 0.0
        return profile.expected_missing(sample(resident_bits)) * sample_stride(len(resident_bits))
