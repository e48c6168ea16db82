"""The named place of every physical limit and share of a limit; the arithmetic itself lies in ``worker.advise.limits``.

It lies there because rooms import downwards only: the advisor is part of the worker and needs the same limits, the
worker may not import benchmarks, and benchmarks may import anything. Import limits from here in benchmarks.
"""

from worker.advise.limits import (
    LinkCurve,
    batch_limit_by_slots,
    distinct_experts,
    foresight_step_s,
    implied_miss_rate,
    in_layer_step_s,
    link_rate_needed,
    mixed_steps_tokens_per_s,
    resident_step_s,
    share_of_limit,
    step_read_bytes,
    token_link_bytes,
    uniform_miss_rate,
)

__all__ = [
    "LinkCurve",
    "batch_limit_by_slots",
    "distinct_experts",
    "foresight_step_s",
    "implied_miss_rate",
    "in_layer_step_s",
    "link_rate_needed",
    "mixed_steps_tokens_per_s",
    "resident_step_s",
    "share_of_limit",
    "step_read_bytes",
    "token_link_bytes",
    "uniform_miss_rate",
]
