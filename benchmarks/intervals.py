"""Confidence intervals of shares and of paired differences of shares."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

Z_95 = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""


def wilson_interval(right: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Interval of a share from ``right`` of ``total`` (Wilson 1927): sound for few samples and near 0 and 1."""
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} of {total} is no share")
    share = right / total
    middle = share + z * z / (2 * total)
    spread = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At either end the bound is exact; the formula would leave a rounding error there.
    low = (middle - spread) / scale if right > 0 else 0.0
    high = (middle + spread) / scale if right < total else 1.0
    return low, high


def paired_difference(
    first: Sequence[bool], second: Sequence[bool], z: float = Z_95
) -> tuple[float, float, float]:
    """(share of ``second`` minus share of ``first``, low, high) over the same questions in the same order.

    The interval is of the mean of the single differences (normal approximation): questions that both get right or
    both get wrong tell nothing about the difference and do not widen it.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError("a paired difference needs two sequences of equal length, at least 2")
    singles = [int(b) - int(a) for a, b in zip(first, second, strict=True)]
    count = len(singles)
    mean = sum(singles) / count
    variance = sum((single - mean) ** 2 for single in singles) / (count - 1)
    spread = z * sqrt(variance / count)
    return mean, mean - spread, mean + spread
