"""Faults of elastic expert places that the suite must notice: bans, rescues, the floor, prefill passes and rings."""

from __future__ import annotations

from tests.faults import Fault

EXACT = (
    "tests/worker/experts/test_elastic_exactness.py::test_forced_growth_and_shrinking_leave_the_bits[int4]"
)
RESCUE = "tests/memory/test_rescue.py"
PASSES = "tests/worker/scheduling/test_prefill_passes.py"
STAGED = "tests/worker/experts/test_prefill_passes.py"
PRICES = "tests/worker/scheduling/test_pass_prices.py"
BENCHMARK = "tests/benchmarks/test_elastic.py"
REPLAY = "tests/benchmarks/test_expert_replay.py"

FAULTS = [
    Fault(
        "elastic: a place is banned when pages were already written there",
        "worker.execution.runner",
        old="""            self.pager.begin_step(plan.step, plan.commands, plan.num_decode_rows, self._uploads)
            if use is not None:
                use.clear_started()
        self.arena.apply(plan.commands)
""",
        new="""            self.arena.apply(plan.commands)
            self.pager.begin_step(plan.step, plan.commands, plan.num_decode_rows, self._uploads)
""",
        tests=(EXACT,),
    ),
    Fault(
        "elastic: a banned place may still be taken by a miss",
        "memory.device.residency",
        old="        owner.copy_(torch.where(ban, BANNED, torch.where(",
        new="        owner.copy_(torch.where(ban, FREE, torch.where(",
        tests=(EXACT,),
    ),
    Fault(
        "rescue: over a stamped place",
        "memory.device.residency",
        old="torch.where((self.owner == BANNED) | (self.stamp >= self._step), torch.inf, worth)",
        new="torch.where(self.owner == BANNED, torch.inf, worth)",
        tests=(f"{RESCUE}::test_nothing_is_put_over_what_the_last_step_used",),
    ),
    Fault(
        "rescue: into a place that is banned as well",
        "memory.device.residency",
        old="torch.where((self.owner == BANNED) | (self.stamp >= self._step), torch.inf, worth)",
        new="torch.where(self.stamp >= self._step, torch.inf, worth)",
        tests=(f"{RESCUE}::test_the_invariants_hold_over_random_steps_with_rescues[0-lfru]",),
    ),
    Fault(
        "rescue: who lost the place is still read there",
        "memory.device.rescue",
        old="        residency.vacate(places)\n",
        new="",
        tests=(f"{RESCUE}::test_the_hottest_go_over_the_coldest",),
    ),
    Fault(
        "rescue: published without its bytes",
        "memory.device.rescue",
        old="copy_pages(self._grid, source[taken], target[taken])",
        new="pass",
        tests=(f"{RESCUE}::test_the_hottest_go_over_the_coldest", EXACT),
    ),
    Fault(
        "rescue: the coldest first",
        "memory.device.rescue",
        old="torch.topk(heat, self._most)",
        new="torch.topk(torch.where(dropped >= 0, -heat, heat), self._most)",
        tests=(f"{RESCUE}::test_the_hottest_go_over_the_coldest",),
    ),
    Fault(
        "rescue: beyond its budget",
        "memory.device.rescue",
        old="min(budget_bytes // grid.stride(0), residency.num_places)",
        new="residency.num_places * bool(budget_bytes)",
        tests=(f"{RESCUE}::test_the_budget_bounds_the_copies",),
    ),
    Fault(
        "ghosts: a hit counts as one",
        "memory.device.ghosts",
        old="self.hits += (wanted & self._ghost).sum(1)",
        new="self.hits += wanted.sum(1)",
        tests=("tests/memory/test_ghosts.py::test_the_last_losses_are_remembered_and_counted_when_wanted",),
    ),
    Fault(
        "passes: the floor of places is broken by a ring",
        "memory.ledger.extents",
        old="self.usable_places() - num_places < self.floor_places",
        new="False",
        tests=(f"{PASSES}::test_a_ring_leaves_the_floor_of_places",),
    ),
    Fault(
        "passes: pages of a pass under way are not pinned",
        "worker.scheduling.passes",
        old="self._pins = [self._ledger.pin(int(number)) for number in self._rows.requests[slots]]",
        new="self._pins = [self._ledger.pin(int(number)) for number in self._rows.requests[slots][:1]]",
        tests=(f"{PASSES}::test_pages_of_a_pass_stay_where_they_are",),
    ),
    Fault(
        "passes: a row runs on beside its pass",
        "worker.scheduling.passes",
        old="        self._rows.held[slots] = True\n",
        new="",
        tests=(f"{PASSES}::test_prompts_that_wait_share_a_pass_and_streams_go_on_beside_it",),
    ),
    Fault(
        "passes: a checkpoint is taken of what is not computed yet",
        "worker.scheduling.prefixes",
        old=" & ~rows.leaving & ~rows.held & ",
        new=" & ~rows.leaving & ",
        tests=(f"{PASSES}::test_random_loads_in_too_little_memory_get_the_right_answers",),
    ),
    Fault(
        "passes: the ring is given back while it is read",
        "worker.scheduling.passes",
        old="        self._ring = self._take_ring(num_tokens)\n        return self._ring\n",
        new="        ring = self._take_ring(num_tokens)\n        if ring is not None:\n"
        "            self._ledger.return_ring(ring)\n        return ring\n",
        tests=(f"{PASSES}::test_prompts_that_wait_share_a_pass_and_streams_go_on_beside_it",),
    ),
    Fault(
        "passes: the ring's halves are one",
        "worker.experts.pass_ring",
        old="range(first + size, first + 2 * size))",
        new="range(first, first + size))",
        tests=(f"{STAGED}::test_passes_give_the_bits_of_residency[int4]",),
    ),
    Fault(
        "passes: a half is filled before its layer was computed",
        "worker.experts.pass_ring",
        old="        held = self._held[row % 2]\n        return",
        new="        held = self._held[row % 2].clone()\n        self.done(row)\n        return",
        tests=(f"{STAGED}::test_passes_give_the_bits_of_residency[int4]",),
    ),
    Fault(
        "passes: streams wait for the whole pass",
        "worker.loop",
        old="layers.advance(self._slice_s() if beside_steps else None)",
        new="layers.advance(None)",
        tests=(f"{PASSES}::test_prompts_that_wait_share_a_pass_and_streams_go_on_beside_it",),
    ),
    Fault(
        "passes: streams are slowed down by what a pass makes of their steps",
        "worker.loop",
        old="calm_s = min(self._calm_s or self._decode_s, self._decode_s)",
        new="calm_s = self._decode_s",
        tests=(f"{PASSES}::test_the_pace_of_streams_leaves_the_rest_of_the_time_to_a_pass",),
    ),
    Fault(
        "passes: a pass has no time where steps have become longer since",
        "worker.loop",
        old="max(calm_s, self._decode_s / 2)",
        new="calm_s",
        tests=(f"{PASSES}::test_a_pass_has_its_time_where_steps_have_become_longer_since",),
    ),
    Fault(
        "passes: a slice makes up for all that earlier ones lacked",
        "worker.execution.prefill_pass",
        old="most = int(MOST_OVER * seconds / self._layer_s)",
        new="most = int(exact)",
        tests=(f"{STAGED}::test_the_pace_of_layers_is_kept_from_pass_to_pass",),
    ),
    Fault(
        "passes: the device waits while a half is filled",
        "worker.experts.pass_ring",
        old="self._block_bytes[row], RING_PROGRAMS)",
        new="self._block_bytes[row])",
        tests=(f"{STAGED}::test_a_half_is_filled_by_programs_that_leave_the_device_to_others",),
    ),
    Fault(
        "passes: the link waits for the layer that follows",
        "worker.experts.pager",
        old="        ring.done(row)\n",
        new="        if row:\n            ring.done(row - 1)\n",
        tests=(f"{STAGED}::test_the_link_works_while_layers_are_computed",),
    ),
    Fault(
        "rescue: compiled when the first places are taken",
        "worker.experts.pager",
        old="        self._rescuer.apply([block.to(device) for block in encode_places([PlaceRange(0, 0)], ())])\n",
        new="",
        tests=(f"{STAGED}::test_the_kernels_of_a_first_ban_are_ready_before_anybody_waits",),
    ),
    Fault(
        "passes: a long prompt's passes take longer and longer",
        "worker.scheduling.limits",
        old="first = 1.0 + num_computed / self.equal_context",
        new="first = 1.0",
        tests=(f"{PRICES}::test_passes_of_a_long_prompt_take_as_long_each[40-32000-3]",),
    ),
    Fault(
        "passes: the link is not done when a pass is",
        "worker.scheduling.limits",
        old="max(1, int(whole / priced), ceil(",
        new="max(1, ceil(whole / priced), ceil(",
        tests=(f"{PRICES}::test_passes_of_a_long_prompt_take_as_long_each[40-32000-3]",),
    ),
    Fault(
        "passes: each prompt of a pass may cost what the pass may",
        "worker.scheduling.passes",
        old="min(share, budget.cost)",
        new="share",
        tests=(f"{PRICES}::test_prompts_share_what_a_pass_may_cost",),
    ),
    Fault(
        "passes: streams wait for a pass to begin",
        "worker.loop",
        old="return self._launch_next()  # while its first experts come",
        new="return True  # while its first experts come",
        tests=(f"{PASSES}::test_prompts_that_wait_share_a_pass_and_streams_go_on_beside_it",),
    ),
    Fault(
        "passes: prompts stamp and page",
        "worker.experts.pager",
        old="        if self._ring is not None:\n            return self._run_pass(",
        new="        if self._ring is not None and row < 0:\n            return self._run_pass(",
        tests=(f"{STAGED}::test_the_ring_brings_what_is_missing_and_is_given_back",),
    ),
    Fault(
        "market: misses of what is new ask for more places",
        "memory.ledger.market",
        old="    if new.num_free > FREE_SHARE * new.num_places:\n",
        new="    if new.num_free < 0:\n",
        tests=("tests/memory/test_market.py::test_misses_ask_for_no_places_while_some_are_free",),
    ),
    Fault(
        "market: a lull costs the prefixes as fast as need does",
        "memory.ledger.market",
        old="urgency = min(1.0, self.prices.expert * held_bytes / URGENT_GAIN_MS)",
        new="urgency = 1.0",
        tests=(
            "tests/memory/test_market.py::test_idle_prefixes_give_way_to_missing_experts_at_the_agreed_pace",
        ),
    ),
    Fault(
        "market: time spent on prompts counts for nothing",
        "memory.ledger.market",
        old="prompts = max(staged, min(1.0, (prompt_s - old_prompt_s) / elapsed))",
        new="prompts = staged",
        tests=("tests/memory/test_market.py::test_time_spent_on_prompts_gets_no_shorter_by_another_request",),
    ),
    Fault(
        "market: prompts cost what somebody once assumed",
        "worker.scheduling.trading",
        old="self._prefixes(prompt_scale)",
        new="self._prefixes(1.0)",
        tests=(
            "tests/worker/scheduling/test_scheduler_trading.py"
            "::test_the_market_runs_both_ways_and_prices_prompts_at_what_they_cost_here",
        ),
    ),
    Fault(
        "replay: a layer's last use still holds a place against what the layer misses",
        "worker.experts.policies",
        old="key=lambda key: key not in resident)",
        new="key=lambda key: key)",
        tests=(f"{REPLAY}::test_belady_lets_a_layer_replace_what_it_has_just_used",),
    ),
    Fault(
        "replay: successions are counted backwards",
        "worker.experts.policies",
        old="self._followed[before[:, None], keys % experts] += 1",
        new="self._followed[keys[:, None], before % experts] += 1",
        tests=(f"{REPLAY}::test_what_follows_is_learnt",),
    ),
    Fault(
        "replay: foresight looks a step too far",
        "worker.experts.policies",
        old="end = min(total, (number + window + 1) * num_layers)",
        new="end = total",
        tests=(f"{REPLAY}::test_foresight_of_everything_is_beladys_rule_and_more_of_it_is_no_worse",),
    ),
    Fault(
        "elastic benchmark: a long context counts as a stall",
        "benchmarks.elasticity.stalls",
        old="self.base_s[rows] + self.token_s * step.kv_tokens",
        new="self.base_s[rows]",
        tests=(f"{BENCHMARK}::test_a_stall_is_what_neither_rows_nor_context_nor_misses_explain",),
    ),
    Fault(
        "elastic benchmark: what a lane costs beyond the link is part of the limit",
        "benchmarks.elasticity.stalls",
        old=" - max(0.0, layer_s) * missing",
        new="",
        tests=(f"{BENCHMARK}::test_a_stall_is_what_neither_rows_nor_context_nor_misses_explain",),
    ),
    Fault(
        "elastic benchmark: steps beside passes count as calm",
        "benchmarks.elasticity.stalls",
        old="not (self.banned_bytes or self.beside_pass)",
        new="not self.banned_bytes",
        tests=(f"{BENCHMARK}::test_a_stall_is_what_neither_rows_nor_context_nor_misses_explain",),
    ),
    Fault(
        "elastic benchmark: a replayed pass takes what streams take",
        "benchmarks.elasticity.stage",
        old="            self._routing.passing = True\n",
        new="            self._routing.passing = self._watch is not None\n",
        tests=(f"{BENCHMARK}::test_a_pass_takes_what_prompts_take_where_all_is_resident_too",),
    ),
    Fault(
        "elastic benchmark: what came after the phase counts",
        "benchmarks.elasticity.phases",
        old="            if request.first_s <= self.deadline_s:\n",
        new="            if request.first_s < inf:\n",
        tests=("tests/benchmarks/test_elastic.py::test_goodput_counts_prompts_as_far_as_they_came",),
    ),
]
