"""The running requests as arrays, one place per slot, so that a decode step needs no loop over requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.scheduling.request import Request
from worker.scheduling.step import BoolArray, IntArray

FREE = -1
IN_FLIGHT = -1
"""A row's last token that is still on the device."""
TAIL_TOKENS = 64


class RowTable:
    """Structure of arrays over ``max_running`` slots; a slot is taken from a request's admission to its end.

    ``num_known`` and ``num_computed`` run ahead of what was applied: they count the steps in flight, so that the next
    step can be planned by subtraction. ``steps_in_flight`` and ``samples_in_flight`` say how far ahead.
    """

    def __init__(self, max_running: int, end_token_ids: tuple[int, ...]) -> None:
        def ints(fill: int = 0) -> IntArray:
            return np.full(max_running, fill, dtype=np.int64)

        def flags() -> BoolArray:
            return np.zeros(max_running, dtype=np.bool_)

        self.requests = ints(FREE)
        self.num_known = ints()
        self.num_computed = ints()
        self.num_prompt = ints()
        self.max_total = ints()
        self.min_total = ints()
        self.capacity = ints()
        self.last_token = ints()
        self.steps_in_flight = ints()
        self.samples_in_flight = ints()
        self.leaving = flags()
        self.held = flags()
        """rows of the prefill pass in flight"""
        self.certain = flags()
        self.has_grammar = flags()
        self.heeds_eos = flags()
        self.next_checkpoint = ints()
        self.num_kept = ints()
        """tokens of the row that the prefix cache is known to hold"""
        self.stop_ids: IntArray = np.full((max_running, 1), -1, dtype=np.int64)
        self.end_ids: IntArray = np.array(end_token_ids, dtype=np.int64)
        self._tail: IntArray = np.zeros((max_running, TAIL_TOKENS), dtype=np.int64)
        self._tail_len = ints()
        self.request_ids = [""] * max_running
        self._occupants: list[Request | None] = [None] * max_running
        self._free = list(range(max_running - 1, -1, -1))

    @property
    def num_running(self) -> int:
        """Slots taken."""
        return len(self._occupants) - len(self._free)

    @property
    def num_free(self) -> int:
        """Slots left."""
        return len(self._free)

    def occupant(self, slot: int) -> Request:
        """The request in a slot."""
        request = self._occupants[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} is empty")
        return request

    def taken(self) -> IntArray:
        """Slots taken, ascending."""
        return np.flatnonzero(self.requests != FREE)

    def slot_of(self, number: int) -> int | None:
        """The slot of a request, None if it does not run."""
        found = np.flatnonzero(self.requests == number)
        return int(found[0]) if len(found) else None

    def holds(self, slot: int, number: int) -> bool:
        """Whether the slot is the request's, and the request is to stay."""
        return bool(self.requests[slot] == number and not self.leaving[slot])

    def place(self, request: Request, num_computed: int, capacity: int) -> int:
        """Gives ``request`` a slot; its first ``num_computed`` tokens are in its pages already."""
        slot = self._free.pop()
        sampling = request.asked.sampling
        self._occupants[slot] = request
        self.request_ids[slot] = request.asked.request_id
        self.requests[slot] = request.number
        self.num_known[slot] = request.num_known
        self.num_computed[slot] = num_computed
        self.num_prompt[slot] = request.num_prompt
        self.max_total[slot] = request.max_total
        self.min_total[slot] = request.num_prompt + sampling.min_tokens
        self.capacity[slot] = capacity
        self.last_token[slot] = request.prefill[-1]
        self.steps_in_flight[slot] = self.samples_in_flight[slot] = 0
        self.leaving[slot] = self.held[slot] = False
        self.heeds_eos[slot] = not sampling.ignore_eos
        self.certain[slot] = request.ends_at_limit
        self.has_grammar[slot] = request.asked.grammar is not None
        self.next_checkpoint[slot] = self.num_kept[slot] = 0
        self._tail_len[slot] = 0
        self._set_stop_ids(slot, sampling.stop_token_ids)
        return slot

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((len(self.stop_ids), len(stop_ids)), -1, dtype=np.int64)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def vacate(self, slot: int) -> Request:
        """Ends a request's use of its slot, its tokens flushed."""
        self.flush(slot)
        request = self.occupant(slot)
        self._occupants[slot] = None
        self.requests[slot] = FREE
        self.leaving[slot] = self.held[slot] = False
        self._free.append(slot)
        return request

    def append(self, slots: IntArray, tokens: IntArray) -> None:
        """One new token for each of the slots, which must differ."""
        self._tail[slots, self._tail_len[slots]] = tokens
        self._tail_len[slots] += 1
        for slot in slots[self._tail_len[slots] == TAIL_TOKENS].tolist():
            self.flush(slot)

    def flush(self, slot: int) -> None:
        """Hands the newest tokens to the request."""
        count = int(self._tail_len[slot])
        if count:
            self.occupant(slot).generated.extend(self._tail[slot, :count].tolist())
            self._tail_len[slot] = 0

    def num_generated(self, slots: IntArray) -> IntArray:
        """Output tokens applied so far."""
        found: IntArray = self.num_known[slots] - self.samples_in_flight[slots] - self.num_prompt[slots]
        return found

    def runnable(self) -> IntArray:
        """Slots that have something to compute now, ascending."""
        ready: npt.NDArray[np.bool_] = (self.requests != FREE) & ~self.leaving & ~self.held
        # At the limit nothing is left to sample; the row only waits for its last token to be applied.
        ready &= self.num_known < self.max_total
        # The mask of a row bound by a grammar is known when its last token is.
        ready &= ~(self.has_grammar & (self.samples_in_flight > 0))
        return np.flatnonzero(ready)
