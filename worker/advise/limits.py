"""The physical limits of a step, and the share of them that a measurement reached.

The only place where such a limit or share is computed. ``benchmarks.limits`` hands on what is here: rooms import
downwards only, and the advisor, which is part of the worker, needs the same arithmetic as the benchmarks.
Bytes are bytes, rates are bytes per second, times are seconds; nothing knows a model or a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


def distinct_experts(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """Expected distinct experts of one layer that ``num_tokens`` independent tokens touch, ``E(1 - (1 - k/E)^b)``.

    Each expert is missed by one token with probability 1 - k/E (uniform routing). Real text touches fewer.
    """
    return float(num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** num_tokens))


def uniform_miss_rate(num_resident: float, num_experts: int) -> float:
    """Share of routed (token, expert) pairs that find their expert elsewhere, when ``num_resident`` of each layer's
    experts are on the device and routing is uniform: ``1 - K/E``."""
    return max(0.0, 1.0 - num_resident / num_experts)


def token_link_bytes(num_layers: int, experts_per_token: int, miss_rate: float, expert_bytes: int) -> float:
    """Bytes over the link for one token alone in its step: ``layers * experts_per_token * miss_rate * S``."""
    return num_layers * experts_per_token * miss_rate * expert_bytes


def link_rate_needed(tokens_per_s: float, all_miss_bytes: float) -> float:
    """Link rate that ``tokens_per_s`` would need if every expert of every token came over it."""
    return tokens_per_s * all_miss_bytes


def implied_miss_rate(tokens_per_s: float, link_bytes_per_s: float, all_miss_bytes: float) -> float:
    """The highest miss rate that a measured speed leaves room for: more misses would not have fitted the link."""
    return min(1.0, link_bytes_per_s / link_rate_needed(tokens_per_s, all_miss_bytes))


def step_read_bytes(
    dense_bytes: float, num_layers: int, num_distinct: float, expert_bytes: int, kv_bytes: float
) -> float:
    """Bytes that one decode step reads from device memory with all experts resident:
    ``W_dense + layers * distinct * S + KV``, ``kv_bytes`` over all requests and their contexts."""
    return dense_bytes + num_layers * num_distinct * expert_bytes + kv_bytes


def resident_step_s(read_bytes: float, memory_bytes_per_s: float) -> float:
    """``T_resident``: the least time of a step that reads ``read_bytes`` from device memory."""
    return read_bytes / memory_bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """``t_link(n)``: seconds to bring n experts of one layer, from measured points, straight lines between them.

    ``points`` are (number of experts, seconds) with numbers above 0; (0, 0) is implied, and beyond the last point
    the last line goes on.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        numbers = [number for number, _ in self.points]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] <= 0:
            raise ValueError("a link curve needs points with rising numbers of experts above 0")

    @classmethod
    def at_rate(cls, expert_bytes: int, link_bytes_per_s: float) -> LinkCurve:
        """The curve of a link that keeps one rate whatever the number of experts."""
        return cls(((1.0, expert_bytes / link_bytes_per_s),))

    def seconds(self, num_experts: float) -> float:
        """Seconds to bring ``num_experts``."""
        points = ((0.0, 0.0), *self.points)
        for (left, left_s), (right, right_s) in pairwise(points):
            if num_experts <= right or right == points[-1][0]:
                return left_s + (right_s - left_s) * (num_experts - left) / (right - left)
        raise AssertionError("the last line has no end")


def in_layer_step_s(resident_s: float, misses: Sequence[tuple[float, float]], link: LinkCurve) -> float:
    """The limit of a paged step that learns a layer's experts only in that layer.

    ``T_resident + sum over layers of max(0, t_link(n_l) - t_hit_l)``.

    Args:
        resident_s: T_resident of the same step.
        misses: per layer (n_l, t_hit_l): misses counted there and seconds that its hits take meanwhile.
        link: t_link.
    """
    return resident_s + sum(max(0.0, link.seconds(count) - hit_s) for count, hit_s in misses)


def foresight_step_s(resident_s: float, miss_bytes: float, link_bytes_per_s: float) -> float:
    """What a step could reach if every miss were known ahead: ``max(T_resident, miss_bytes / link)``."""
    return max(resident_s, miss_bytes / link_bytes_per_s)


def mixed_steps_tokens_per_s(
    weights_s: float, state_s: float, prompt_s: float, num_rows: int, num_output: float
) -> float:
    """Output tokens per second when prompts are computed in the same steps as decode rows, so that reading the weights
    hides behind the prompts' operations or these behind the reading; KV and states are read beside either.

    ``1 / (max(weights_s / num_rows, prompt_s / num_output) + state_s / num_rows)``

    Args:
        weights_s, state_s: of one decode step, seconds to read weights, and to read KV and states.
        prompt_s: seconds of one prompt's operations.
        num_rows: decode rows of a step. num_output: output tokens of a request.
    """
    return 1.0 / (max(weights_s / num_rows, prompt_s / num_output) + state_s / num_rows)


def batch_limit_by_slots(num_resident: int, experts_per_token: int) -> int:
    """The old rule: with fixed slots per layer at most ``K // experts_per_token`` requests a step, since all experts
    of a step had to be resident at once. Headroom has no such limit; the figure is for comparison."""
    return num_resident // experts_per_token


def share_of_limit(limit_s: float, measured_s: float) -> float:
    """How much of the limit a measurement reached, 0..1: the least possible time over the time that it took."""
    if measured_s <= 0.0:
        raise ValueError(f"a measured time must be above 0, not {measured_s}")
    return limit_s / measured_s
