"""Decides how far apart a stream's messages are: gathered so that the transport keeps up, the first one at once.

A message costs the transport about the same whether it carries one token or sixteen. The interval is the number of
open streams over the messages a second that the transport carries (less a reserve). It has a bound, but a high one:
more messages than are carried would queue up, and every stream would be late for good.
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
        min_interval_s: below it nothing is gained by waiting: send at once.
    """

    messages_per_s: float = 1_500.0
    reserve: float = 0.3
    max_interval_s: float = 1.0
    min_interval_s: float = 0.004


def interval_s(num_streams: int, config: CoalescingConfig) -> float:
    """Seconds between two messages of one stream when ``num_streams`` are open; 0: every token at once."""
    wanted = num_streams / (config.messages_per_s * (1.0 - config.reserve))
    if wanted < config.min_interval_s:
        return 0.0
    return min(wanted, config.max_interval_s)


SHORTEST_REST_S = 0.004
"""What an engine's fast step takes."""
LONGEST_REST_S = 0.015
ROUNDS_PER_INTERVAL = 5
"""Few enough to be cheap, and so many that a Router is never busy for long with what one of them brings."""


def rest_s(interval_s: float) -> float:
    """Seconds between two rounds over the streams of one Router, each of which sends what is due together."""
    return min(max(interval_s / ROUNDS_PER_INTERVAL, SHORTEST_REST_S), LONGEST_REST_S)
