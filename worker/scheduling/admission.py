"""Whether a request can ever finish here (asked at the door), and whether admitting it now would end in retractions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memory.api import Headroom, Ledger, PageKind, PageSpec, PrefixMatch
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
    wanted = ", ".join(f"{count:,} bytes of {group!r}" for group, count in shortage.missing_bytes.items())
    what = f"the worker's arena of {arena_bytes:,} bytes (wanted: {wanted}; lower max_tokens or raise arena_bytes)"
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
        if request.ends_at_limit:
            return left
        least = request.num_prompt + request.asked.sampling.min_tokens - request.num_known
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


def has_fixed_shares(empty: Headroom) -> bool:
    """Whether a ledger's groups own their bytes for good: then they own them before anything was granted."""
    return sum(kind.free_bytes for kind in empty.kinds.values()) > empty.gap_bytes


class AdmissionControl:
    """Admits a request when the memory that all will need at their common peak is there, by forecast.

    Only FULL pages grow with the output. Where one arena serves all groups, whatever any group can give counts, and a
    request that ends gives back its STATE and WINDOW pages as well; with fixed shares FULL has its own bytes alone.
    """

    def __init__(self, specs: Mapping[str, PageSpec], forecast: OutputForecast, fixed_shares: bool) -> None:
        self.forecast = forecast
        self._full = [spec for spec in specs.values() if spec.kind is PageKind.FULL]
        self._page_tokens = max((spec.page_tokens for spec in self._full), default=1)
        self._token_bytes = sum(spec.page_bytes / spec.page_tokens for spec in self._full)
        self._fixed_shares = fixed_shares
        self._side_bytes = 0 if fixed_shares else sum(_side_bytes(spec) for spec in specs.values())

    def expects_room(self, request: Request, rows: RowTable, headroom: Headroom, match: PrefixMatch) -> bool:
        """Whether ``request``, which would start behind ``match``, is likely to end, and let the others end, without
        anybody being sent back."""
        slots = rows.taken()
        if not len(slots) or not self._full:
            return True
        # What comes back from the host needs new pages; taking the rest makes its pages unevictable.
        num_cached = max(0, match.num_tokens - int(match.host_bytes / self._token_bytes))
        known = rows.num_known[slots]
        side = int(self._side_bytes / self._token_bytes)
        half = self._page_tokens // 2  # a last page is half full on average
        held = np.minimum(rows.capacity[slots], known + self._page_tokens)
        peak = peak_growth_tokens(
            np.append(held + side, 0),
            np.append(np.maximum(0, known + half - held), request.num_known + half - num_cached + side),
            np.append(self.forecast.remaining(rows, slots), self.forecast.remaining_of(request)),
        )
        return peak * self._token_bytes <= self._spare_bytes(headroom, num_cached)

    def _spare_bytes(self, headroom: Headroom, num_cached: int) -> float:
        own = [headroom.kinds[spec.name] for spec in self._full]
        if self._fixed_shares:
            spare = sum(kind.free_bytes + kind.reclaimable_bytes + kind.pending_bytes for kind in own)
        else:
            spare = headroom.available_bytes
        return spare - min(num_cached * self._token_bytes, sum(kind.reclaimable_bytes for kind in own))


def _side_bytes(spec: PageSpec) -> int:
    """Bytes of STATE and WINDOW pages that a running answer holds in a group."""
    if spec.kind is PageKind.STATE:
        return spec.page_bytes
    if spec.window is None:
        return 0
    return (-(-spec.window // spec.page_tokens) + 1) * spec.page_bytes
