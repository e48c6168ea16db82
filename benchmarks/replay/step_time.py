"""How long a step takes on one H200, from what it reads and computes.

    step = max(weights read / bandwidth, work / compute) + KV and states read / bandwidth + launches + decode rows

The rates come from :mod:`benchmarks.replay.rates`: measured ones where there are any. Distinct experts of n tokens:
``E (1 - (1 - k/E)^n)``. With paged experts a decode step waits for what its layers miss beyond what they compute
meanwhile, and prompts are computed in staged passes of up to :data:`STAGED_TOKENS` tokens that stream every missing
expert once, beside decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.replay.rates import ASSUMED, Rates
from benchmarks.replay.shapes import ModelShape
from worker.scheduling.step import BoolArray, StepPlan

POPULARITY = 0.7
"""Exponent of the Zipf law by which experts are taken to be chosen when they are paged: an assumption."""
STAGED_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, and experts read over the link in it."""

    seconds: float
    misses: float = 0.0
    staged: float = 0.0
    """misses streamed for prompts"""


class StepTime:
    """Prices plans of one model at one grain: a plan with decode rows stands for ``grain`` real steps, one without
    for as many as its prompts need.

    Args:
        step_tokens: most real tokens of a real step, where experts are not paged.
        rates: of the machine.
    """

    def __init__(self, shape: ModelShape, grain: int, step_tokens: int, rates: Rates = ASSUMED) -> None:
        self.shape = shape
        self.rates = rates
        self._grain = grain
        self._step_tokens = step_tokens
        ranks = np.arange(1, shape.num_experts + 1, dtype=np.float64) ** -POPULARITY
        share = ranks / ranks.sum() if shape.num_experts else ranks
        # A token never takes an expert twice: no probability passes 1.
        self._chosen = np.minimum(0.999, shape.experts_per_token * share)

    def price(self, plan: StepPlan, num_places: int = 0) -> StepCost:
        """The cost of a planned step; with paged experts ``num_places`` of them are resident, the most popular."""
        grain = self._grain
        decode = plan.samples & (plan.query_len == 1) & (plan.num_computed > 0)
        num_decode = int(decode.sum())
        num_prefill = int(plan.query_len[~decode].sum()) * grain
        read, flops = self._decode_work(plan, decode), self._prefill_flops(plan, ~decode)
        head = 2 * self.shape.head_params * num_decode
        states = 2 * self.shape.state_bytes * int((~decode).sum())
        if self.shape.paged:
            decoding = StepCost(0.0)
            if num_decode:
                decoding = self._step(num_decode, head, read, num_places, num_rows=num_decode)
            passes = -(-num_prefill // STAGED_TOKENS)
            staged = self._step(
                min(num_prefill, STAGED_TOKENS), flops / max(1, passes), states, num_places, True
            )
            return StepCost(
                decoding.seconds * grain + staged.seconds * passes,
                decoding.misses * grain + staged.misses * passes,
                staged.misses * passes,
            )
        steps = max(grain if num_decode else 1, -(-num_prefill // self._step_tokens))
        tokens = num_decode + num_prefill / steps
        mixed = self._step(tokens, head + flops / steps, read + states / steps, 0, num_rows=num_decode)
        return StepCost(mixed.seconds * steps)

    def _decode_work(self, plan: StepPlan, decode: BoolArray) -> float:
        """Bytes of KV and states that the decode rows read and write in a real step."""
        shape = self.shape
        contexts = (plan.num_computed[decode] + 1) * self._grain
        window = np.minimum(contexts, shape.window) * shape.window_token_bytes
        return float((contexts * shape.full_token_bytes + window + 2 * shape.state_bytes).sum())

    def _prefill_flops(self, plan: StepPlan, prefill: BoolArray) -> float:
        """Work of the prompts' chunks beyond that of their tokens in :meth:`_step`: attention, and the head once for
        each prompt that ends."""
        lengths = plan.query_len[prefill] * self._grain
        middle = plan.num_computed[prefill] * self._grain + lengths / 2
        ended = int((prefill & plan.samples).sum())
        attention = self.shape.attention_flops * float((lengths * middle).sum())
        return attention + 2 * self.shape.head_params * ended

    def _step(
        self,
        tokens: float,
        more_flops: float,
        read_bytes: float,
        num_places: int,
        staged: bool = False,
        num_rows: int = 0,
    ) -> StepCost:
        """One real step of ``tokens`` tokens, ``num_rows`` of them of decode rows."""
        shape, rates = self.shape, self.rates
        weights, misses = self._weights(tokens, num_places)
        compute = (2 * shape.token_params * tokens + more_flops) / rates.flops_per_s
        seconds = max(weights / rates.weight_bytes_per_s, compute) + read_bytes / rates.kv_bytes_per_s
        seconds += rates.layer_s * shape.num_layers + rates.row_s * num_rows
        link = misses * shape.expert_bytes / rates.link_bytes_per_s
        # A staged pass streams the next layers' experts while it computes; a decode layer waits for its own.
        overlap = seconds if staged else seconds * 0.5
        return StepCost(seconds + max(0.0, link - overlap), misses)

    def _weights(self, tokens: float, num_places: int) -> tuple[float, float]:
        """Bytes of weights that a real step reads from HBM, and experts that it misses."""
        shape = self.shape
        if not shape.num_moe_layers or tokens <= 0:
            return shape.dense_bytes, 0.0
        if not shape.paged:
            chosen = shape.experts_per_token / shape.num_experts
            distinct = shape.num_experts * (1 - (1 - chosen) ** tokens)
            return shape.dense_bytes + shape.num_moe_layers * distinct * shape.expert_bytes, 0.0
        active = shape.num_moe_layers * (1 - (1 - self._chosen) ** tokens)
        resident = min(shape.num_experts, num_places // shape.num_moe_layers)
        hits, misses = float(active[:resident].sum()), float(active[resident:].sum())
        return shape.dense_bytes + hits * shape.expert_bytes, misses
