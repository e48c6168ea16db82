"""Where each row's new tokens end its output: vectorised over the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

from worker.scheduling.rows import RowTable
from worker.scheduling.step import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class Stops:
    """Per row: whether its token ended the output, by an end token or by the length."""

    by_token: BoolArray
    by_length: BoolArray


def check_stops(rows: RowTable, slots: IntArray, tokens: IntArray, totals: IntArray) -> Stops:
    """Judges one new token per row.

    Args:
        slots: [n] the rows' slots.
        tokens: [n] their new tokens.
        totals: [n] tokens known with the new one.

    End tokens are impossible before ``min_tokens``: one that a runner lets through there does not end the output.
    """
    ended = (tokens[:, None] == rows.stop_ids[slots]).any(axis=1)
    if len(rows.end_ids):
        ended |= (tokens[:, None] == rows.end_ids).any(axis=1) & rows.heeds_eos[slots]
    ended &= totals > rows.min_total[slots]
    return Stops(ended, ~ended & (totals >= rows.max_total[slots]))
