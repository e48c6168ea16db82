"""What a Router believes about one replica: its last snapshot, and what this Router did since that was taken.

A snapshot is old when it arrives and older when it is used, so a view never answers with it alone. It adds the
Router's own placements that the snapshot cannot contain yet, takes off those that ended since, and lets the backlog
drain at the replica's measured rate in between. Trust in the snapshot is full up to one second of age and gone at
five, when the replica counts as dead. Times are seconds on the Router's clock; the worker's clock is only compared
with itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from worker.api import ExpertResidency, WorkerSnapshot

TRUSTED_AGE_S = 1.0
DEAD_AGE_S = 5.0
CLOCK_DRIFT = 2e-4
"""Two machines' clocks drift apart by less than this share of the time."""
MAX_TRANSIT_S = 2.0
"""Of a snapshot's delay on the way, at most this much is believed: a clock that jumped must not kill a replica."""
CONFIRM_TIMEOUT_S = 5.0
"""A placement older than this counts as contained in the next snapshot, whatever the counters say."""
RATE_WINDOW_S = 0.5
RATE_WEIGHT = 0.3


class Accepted(Enum):
    """What became of a snapshot that was offered to a view."""

    NEW = "new"
    OUT_OF_ORDER = "out of order"


@dataclass(frozen=True, slots=True)
class SentLoad:
    """What one placement brings to a replica: prompt tokens left to compute, and bytes it will come to hold."""

    prompt_tokens: float
    held_bytes: float


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load as best known now.

    Attributes:
        trust: 1 for a fresh snapshot, 0 for none or a dead one; callers blend with what they know of the others.
        num_active: requests running or waiting there, own ones in flight included.
        num_running: those of them that run, as far as known.
        max_running: how many may run at once; 0 if unknown.
        backlog_tokens: prompt tokens that are to be computed before a request placed now.
        available_bytes: headroom left after own placements in flight; negative when over-committed. None if it never
            reported.
        unseen_active, unseen_tokens: of these, own placements that the snapshot does not contain.
    """

    trust: float
    num_active: float
    num_running: float
    max_running: int
    backlog_tokens: float
    available_bytes: float | None
    unseen_active: int = 0
    unseen_tokens: float = 0.0

    @property
    def reported(self) -> bool:
        """Whether the replica ever sent a snapshot."""
        return self.available_bytes is not None


@dataclass(slots=True)
class _Sent:
    load: SentLoad
    sent_s: float


class ReplicaView:
    """One replica as seen by one Router. Not thread-safe: one event loop owns it."""

    def __init__(self, replica_id: str, default_tokens_per_s: float) -> None:
        self.replica_id = replica_id
        self.snapshot: WorkerSnapshot | None = None
        self.prefill_tokens_per_s = default_tokens_per_s
        self.resident_bits: bytes | None = None
        self.resident_is_whole = False
        self.num_absent_experts = 0
        """Experts of all layers that are not resident there; 0 where the replica reports no residency."""
        self._resident_generation = -1
        self._received_s = 0.0
        self._clock_offset_s: float | None = None
        self._transit_s = 0.0
        self._unconfirmed: OrderedDict[int, _Sent] = OrderedDict()
        self._confirmed: dict[int, SentLoad] = {}
        self._ended: list[SentLoad] = []
        self._rate_from: tuple[float, int] | None = None

    # -- snapshots ----------------------------------------------------------------------------------------------

    def accept(self, snapshot: WorkerSnapshot, now_s: float) -> Accepted:
        """Takes a snapshot in unless a later one was seen; a view that is dead starts anew with any sequence."""
        last = self.snapshot
        if last is not None and snapshot.sequence <= last.sequence and not self.is_dead(now_s):
            return Accepted.OUT_OF_ORDER
        if last is None or snapshot.sequence <= last.sequence:
            self._restart()
            last = None
        self._note_transit(snapshot.time_s, now_s, last)
        self._confirm(snapshot, last, now_s)
        self._learn_rate(snapshot, last)
        self._note_experts(snapshot.experts)
        self.snapshot = snapshot
        self._received_s = now_s
        return Accepted.NEW

    def age_s(self, now_s: float) -> float:
        """Seconds since the last snapshot was taken; infinite when there was none."""
        if self.snapshot is None:
            return float("inf")
        return max(0.0, now_s - self._received_s + self._transit_s)

    def trust(self, now_s: float) -> float:
        """How far the last snapshot is believed: 1 up to TRUSTED_AGE_S, then falling to 0 at DEAD_AGE_S."""
        late = (self.age_s(now_s) - TRUSTED_AGE_S) / (DEAD_AGE_S - TRUSTED_AGE_S)
        return min(1.0, max(0.0, 1.0 - late))

    def is_dead(self, now_s: float) -> bool:
        """Whether snapshots stopped for too long. A replica that never sent one is unknown, not dead."""
        return self.snapshot is not None and self.age_s(now_s) > DEAD_AGE_S

    @property
    def num_free_places(self) -> int:
        """Expert places that hold no expert so far; 0 where the replica does not say. A place that pages have taken is
        none: no more of them lie in the gap than its bytes hold."""
        extra = self.snapshot.extra if self.snapshot is not None else {}
        places, place_bytes = extra.get("expert_places", 0.0), extra.get("expert_bytes", 0.0)
        if self.snapshot is None or not place_bytes:
            return 0
        usable = self.snapshot.headroom.gap_bytes / place_bytes
        if places:  # else it has made no step yet, and laid none out
            usable = min(usable, places)
        return max(0, int(usable - extra.get("experts_resident", 0.0)))

    # -- own placements -----------------------------------------------------------------------------------------

    @property
    def num_own(self) -> int:
        """Own placements that have not ended."""
        return len(self._unconfirmed) + len(self._confirmed)

    @property
    def unseen_tokens(self) -> float:
        """Prompt tokens of own placements that no snapshot contains so far."""
        return sum(sent.load.prompt_tokens for sent in self._unconfirmed.values())

    def sent(self, ticket: int, load: SentLoad, now_s: float) -> None:
        """Books an own placement."""
        self._unconfirmed[ticket] = _Sent(load, now_s)

    def started(self, ticket: int) -> None:
        """An own placement's prompt is computed: it is no longer before others. Unknown tickets are ignored."""
        if (sent := self._unconfirmed.get(ticket)) is not None:
            sent.load = SentLoad(0.0, sent.load.held_bytes)

    def ended(self, ticket: int) -> None:
        """An own placement ended (finished, failed, vetoed); unknown tickets are ignored."""
        if self._unconfirmed.pop(ticket, None) is None:
            load = self._confirmed.pop(ticket, None)
            if load is not None:  # the last snapshot still counts it
                self._ended.append(load)

    def load(self, now_s: float) -> ReplicaLoad:
        """The load now, by dead reckoning from the last snapshot."""
        snapshot = self.snapshot
        own_bytes = sum(sent.load.held_bytes for sent in self._unconfirmed.values())
        if snapshot is None:
            unseen = len(self._unconfirmed)
            backlog = self._backlog(0.0, 0.0, now_s)
            return ReplicaLoad(0.0, unseen, 0.0, 0, backlog, None, unseen, self.unseen_tokens)
        taken_s = self._received_s - self._transit_s
        # Those that the snapshot contains and that ended since.
        active = snapshot.num_running + snapshot.num_waiting + len(self._unconfirmed) - len(self._ended)
        freed_bytes = sum(load.held_bytes for load in self._ended)
        return ReplicaLoad(
            trust=self.trust(now_s),
            num_active=max(active, len(self._unconfirmed) + len(self._confirmed)),
            num_running=max(0, snapshot.num_running - len(self._ended)),
            max_running=snapshot.max_running,
            backlog_tokens=self._backlog(float(snapshot.waiting_tokens), taken_s, now_s),
            available_bytes=snapshot.headroom.available_bytes - own_bytes + freed_bytes,
            unseen_active=len(self._unconfirmed),
            unseen_tokens=self.unseen_tokens,
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _backlog(self, tokens: float, since_s: float, now_s: float) -> float:
        """Tokens before us: ``tokens`` at ``since_s``, own placements added when sent, drained at the rate."""
        rate = self.prefill_tokens_per_s
        for sent in self._unconfirmed.values():
            tokens = max(0.0, tokens - rate * max(0.0, sent.sent_s - since_s)) + sent.load.prompt_tokens
            since_s = max(since_s, sent.sent_s)
        return max(0.0, tokens - rate * max(0.0, now_s - since_s))

    def _restart(self) -> None:
        """Another engine life under the same id: its counters and experts begin anew."""
        self._clock_offset_s = None
        self._ended.clear()
        self._rate_from = None
        self.resident_bits = None
        self.resident_is_whole = False

    def _note_transit(self, taken_s: float, now_s: float, last: WorkerSnapshot | None) -> None:
        # Clocks of two machines differ by an unknown offset; the fastest delivery seen so far stands for it. It is
        # believed a little less with time, or a drift would look like a growing delay.
        offset = now_s - taken_s
        if self._clock_offset_s is None or last is None:
            self._clock_offset_s = offset
        faded = self._clock_offset_s + CLOCK_DRIFT * max(0.0, now_s - self._received_s)
        self._clock_offset_s = min(faded, offset)
        self._transit_s = min(offset - self._clock_offset_s, MAX_TRANSIT_S)

    def _confirm(self, snapshot: WorkerSnapshot, last: WorkerSnapshot | None, now_s: float) -> None:
        # Requests of other Routers are in the counter too, so this confirms at most what it can contain.
        arrived = snapshot.num_submitted - (last.num_submitted if last else 0)
        if last is None and not self._unconfirmed:
            return
        taken_s = now_s - self._transit_s
        for ticket in list(self._unconfirmed):
            sent = self._unconfirmed[ticket]
            if sent.sent_s > taken_s or (arrived <= 0 and now_s - sent.sent_s < CONFIRM_TIMEOUT_S):
                break
            arrived -= 1
            self._confirmed[ticket] = self._unconfirmed.pop(ticket).load
        gone = snapshot.num_finished + snapshot.num_aborted
        before = (last.num_finished + last.num_aborted) if last else 0
        del self._ended[: max(0, gone - before)]
        if gone == before and snapshot.num_running + snapshot.num_waiting == 0:
            self._ended.clear()

    def _learn_rate(self, snapshot: WorkerSnapshot, last: WorkerSnapshot | None) -> None:
        """Prefill rate over windows in which there was always a backlog: only then is it the replica's own."""
        computed = snapshot.prompt_tokens - snapshot.cached_tokens
        if last is None or last.waiting_tokens == 0 or snapshot.waiting_tokens == 0:
            self._rate_from = (snapshot.time_s, computed)
            return
        if self._rate_from is None:
            self._rate_from = (last.time_s, last.prompt_tokens - last.cached_tokens)
        seconds = snapshot.time_s - self._rate_from[0]
        tokens = computed - self._rate_from[1]
        if seconds >= RATE_WINDOW_S and tokens > 0:
            self.prefill_tokens_per_s += RATE_WEIGHT * (tokens / seconds - self.prefill_tokens_per_s)
            self._rate_from = (snapshot.time_s, computed)

    def _note_experts(self, experts: ExpertResidency | None) -> None:
        if experts is None:
            return
        if experts.base_generation is None:
            self.resident_bits = experts.bits
            self.resident_is_whole = True
        elif self.resident_bits is not None and experts.base_generation == self._resident_generation:
            flipped = int.from_bytes(self.resident_bits, "little") ^ int.from_bytes(experts.bits, "little")
            self.resident_bits = flipped.to_bytes(len(self.resident_bits), "little")
        else:  # a delta was lost: the old bits are the best there is until a whole map comes
            self.resident_is_whole = False
            return
        self._resident_generation = experts.generation
        resident = int.from_bytes(self.resident_bits, "little").bit_count()
        self.num_absent_experts = experts.num_layers * experts.num_experts - resident
