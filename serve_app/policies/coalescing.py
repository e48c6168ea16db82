"""Decides when a stream's tokens are sent: the first at once, later ones gathered so that the transport keeps up.

A message costs the transport about the same whether it carries one token or sixteen. The interval is the number of
open streams over the messages a second that it carries (less a reserve), at most ``max_interval_s``, and a stream
with ``max_tokens`` gathered is sent whatever the clock says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoalescingConfig:
    """What the transport carries and how long a token may be kept back.

    Attributes:
        messages_per_s: what the transport carries, all streams of this process together.
        reserve: share of it left free for first tokens and bursts.
        max_interval_s: most time between a token and its message.
        max_tokens: most tokens per message.
        min_interval_s: below it nothing is gained by waiting: send at once.
    """

    messages_per_s: float = 2_400.0
    reserve: float = 0.3
    max_interval_s: float = 0.1
    max_tokens: int = 16
    min_interval_s: float = 0.004


def interval_s(num_streams: int, config: CoalescingConfig) -> float:
    """Seconds between two messages of one stream when ``num_streams`` are open; 0: every token at once."""
    wanted = num_streams / (config.messages_per_s * (1.0 - config.reserve))
    if wanted < config.min_interval_s:
        return 0.0
    return min(wanted, config.max_interval_s)


class StreamPacer:
    """When one stream is due. Feed it what arrived; ask when to send."""

    def __init__(self, config: CoalescingConfig) -> None:
        self._config = config
        self._last_sent_s: float | None = None

    def due_s(self, num_gathered: int, finished: bool, num_streams: int, now_s: float) -> float:
        """The time at which what is gathered must be sent; at or before ``now_s``: now.

        The first tokens, the end and a full message are due at once; with nothing gathered, infinity.
        """
        if finished or num_gathered >= self._config.max_tokens:
            return now_s
        if num_gathered == 0:
            return float("inf")
        if self._last_sent_s is None:
            return now_s
        return self._last_sent_s + interval_s(num_streams, self._config)

    def sent(self, now_s: float) -> None:
        """A message of this stream was sent."""
        self._last_sent_s = now_s
