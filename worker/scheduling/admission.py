"""Whether a request can ever finish here (asked at the door), and whether admitting it now would end in retractions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memory.api import Headroom, Ledger, PageKind, PageSpec
from worker.api import GenerateRequest
from worker.errors import PromptTooLong
from worker.scheduling.request import Request
from worker.scheduling.rows import RowTable
from worker.scheduling.step import IntArray


def tokens_that_fit(ledger: Ledger, limit: int) -> int:
    """Most tokens, at most ``limit``, that one request alone may have in this arena."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if ledger.can_ever_grant(middle) is None:
            low = middle
        else:
            high = middle - 1
    return low


def check_can_finish(request: GenerateRequest, ledger: Ledger, max_model_len: int, arena_bytes: int) -> None:
    """Raises PromptTooLong when the model's context, or the empty arena, cannot hold prompt and max_tokens."""
    total = len(request.prompt_token_ids) + request.sampling.max_tokens
    if total > max_model_len:
        raise PromptTooLong(total, max_model_len)
    shortage = ledger.can_ever_grant(total)
    if shortage is None:
        return
    missing = ", ".join(f"{count:,} more of {group!r}" for group, count in shortage.missing_bytes.items())
    what = f"the worker's arena of {arena_bytes:,} bytes (missing: {missing}; lower max_tokens or raise arena_bytes)"
    raise PromptTooLong(total, tokens_that_fit(ledger, total), what)


class OutputForecast:
    """How much of what they may still generate running requests will generate: learned from those that ended.

    ``fraction`` moves towards generated/max_tokens of each ended request, and up with each retraction, which says
    that it was too low. Requests that cannot stop early are counted in full.
    """

    def __init__(
        self, fraction: float = 0.5, memory: int = 32, penalty: float = 0.1, least: float = 0.02
    ) -> None:
        self.fraction = fraction
        self._memory = memory
        self._penalty = penalty
        self._least = least

    def ended(self, num_generated: int, max_tokens: int) -> None:
        """A request came to its own end."""
        self.fraction += (num_generated / max_tokens - self.fraction) / self._memory
        self.fraction = min(1.0, max(self._least, self.fraction))

    def retracted(self) -> None:
        """A running request had to be sent back."""
        self.fraction = min(1.0, self.fraction + self._penalty)

    def remaining(self, rows: RowTable, slots: IntArray) -> IntArray:
        """[slots] tokens that each running request is expected to come to hold beyond those known now."""
        left = rows.max_total[slots] - rows.num_known[slots]
        expected = np.where(rows.certain[slots], left, np.ceil(left * self.fraction)).astype(np.int64)
        least: IntArray = rows.min_total[slots] - rows.num_known[slots]
        found: IntArray = np.maximum(expected, least)
        return found

    def remaining_of(self, request: Request) -> int:
        """The same for a request that waits."""
        left = request.max_total - request.num_known
        sampling = request.asked.sampling
        if sampling.ignore_eos and not sampling.stop_token_ids and request.asked.grammar is None:
            return left
        least = request.num_prompt + sampling.min_tokens - request.num_known
        return max(least, int(np.ceil(left * self.fraction)))


def peak_growth_tokens(held: IntArray, growth: IntArray, remaining: IntArray) -> int:
    """Highest net growth, in tokens over what is held now, until all requests have ended.

    All generate one token a step and give back everything when they end, so the peak lies just before some request
    ends: with requests ordered by falling ``remaining``, when the i-th ends those before it hold their growth, and
    those behind it have given back what they held.

    Args:
        held: [n] tokens for which each request holds pages now.
        growth: [n] tokens known but without pages yet.
        remaining: [n] tokens each will still generate.
    """
    if not len(held):
        return 0
    order = np.argsort(-remaining, kind="stable")
    held, growth, remaining = held[order], growth[order], remaining[order]
    alive = np.arange(1, len(order) + 1)
    behind = held.sum() - np.cumsum(held)
    peak = np.cumsum(growth) + alive * remaining - behind
    return int(max(peak.max(), growth.sum()))


class AdmissionControl:
    """Admits a request when the memory that all will need at their common peak is there, by forecast."""

    def __init__(self, specs: Mapping[str, PageSpec], forecast: OutputForecast) -> None:
        self.forecast = forecast
        self._full = [spec for spec in specs.values() if spec.kind is PageKind.FULL]

    def expects_room(self, request: Request, rows: RowTable, headroom: Headroom, num_cached: int) -> bool:
        """Whether ``request`` is likely to end, and let the others end, without anybody being sent back."""
        slots = rows.taken()
        if not len(slots):
            return True
        remaining = np.append(self.forecast.remaining(rows, slots), self.forecast.remaining_of(request))
        known = rows.num_known[slots]
        needed = 0
        for spec in self._full:
            # A last page is half full on average.
            half = spec.page_tokens // 2
            held = np.minimum(rows.capacity[slots], known + spec.page_tokens)
            growth = np.maximum(0, known + half - held)
            peak = peak_growth_tokens(
                np.append(held, 0), np.append(growth, request.num_known + half - num_cached), remaining
            )
            own = headroom.kinds[spec.name]
            own_bytes = own.free_bytes + own.reclaimable_bytes + own.pending_bytes
            needed += max(0, int(peak * spec.page_bytes / spec.page_tokens) - own_bytes)
        return needed <= headroom.gap_bytes
