"""Planted faults of the policies: what a Router must not believe, count wrongly or let through."""

from __future__ import annotations

from tests.faults import Fault

_TESTS = "tests/serve_app/policies"
_VIEW = "serve_app.policies.replica_view"
_PLACEMENT = "serve_app.policies.placement"
_PREDICTION = "serve_app.policies.prediction"
_PREFIX = "serve_app.policies.prefix_affinity"
_EXPERTS = "serve_app.policies.expert_affinity"
_ADMISSION = "serve_app.policies.admission"
_SCALING = "serve_app.policies.autoscaling"

FAULTS = [
    Fault(
        "own placements in flight are not counted",
        _PLACEMENT,
        old="chosen.view.sent(ticket,",
        new="(lambda *given: None)(ticket,",
        tests=(
            f"{_TESTS}/test_placement.py::test_a_burst_under_one_snapshot_does_not_stampede_the_idle_replica",
        ),
    ),
    Fault(
        "a placement ended elsewhere stays booked",
        _PLACEMENT,
        old="        view.ended(ticket)\n        facts",
        new="        facts",
        tests=(f"{_TESTS}/test_placement.py::test_a_veto_excludes_and_gives_the_booking_back",),
    ),
    Fault(
        "stale snapshots are trusted for ever",
        _VIEW,
        old="return min(1.0, max(0.0, 1.0 - late))",
        new="return 1.0 if late else 1.0",
        tests=(
            f"{_TESTS}/test_placement.py::test_an_aged_replica_is_taken_for_an_average_one_and_not_for_an_idle_one",
        ),
    ),
    Fault(
        "a replica whose snapshots stopped never counts as dead",
        _VIEW,
        old="return self.snapshot is not None and self.age_s(now_s) > DEAD_AGE_S",
        new="return False",
        tests=(f"{_TESTS}/test_placement.py::test_dead_and_removed_replicas_get_nothing",),
    ),
    Fault(
        "out-of-order snapshots are accepted",
        _VIEW,
        old="            return Accepted.OUT_OF_ORDER",
        new="            pass",
        tests=(f"{_TESTS}/test_placement.py::test_out_of_order_reports_change_nothing",),
    ),
    Fault(
        "a delta of experts is applied to any base",
        _VIEW,
        old="experts.base_generation == self._resident_generation",
        new="experts.base_generation is not None",
        tests=(f"{_TESTS}/test_replica_view.py::test_expert_deltas_apply_to_their_base_only",),
    ),
    Fault(
        "a snapshot confirms placements made after it was taken",
        _VIEW,
        old="if sent.sent_s > taken_s or (",
        new="if (",
        tests=(f"{_TESTS}/test_replica_view.py::test_a_snapshot_taken_before_a_placement_cannot_contain_it",),
    ),
    Fault(
        "missing expert residency counts as nothing missing",
        _PLACEMENT,
        old="return {name: known.get(name, mean) for name in bits}",
        new="return {name: known.get(name, 0.0) for name in bits}",
        tests=(
            f"{_TESTS}/test_placement.py::test_a_replica_that_reports_no_experts_is_taken_for_an_average_one",
        ),
    ),
    Fault(
        "the veto's replica is asked again",
        _PLACEMENT,
        old="with_fleet_mean(alive).items() if name not in exclude}",
        new="with_fleet_mean(alive).items()}",
        tests=(f"{_TESTS}/test_placement.py::test_a_veto_excludes_and_gives_the_booking_back",),
    ),
    Fault(
        "the share of a replica is not bounded",
        _PLACEMENT,
        old="fair = self._share.allowed(free, now_s)",
        new="fair = list(free)",
        tests=(
            f"{_TESTS}/test_placement.py::test_no_replica_gets_more_than_its_bound_of_the_latest_placements",
        ),
    ),
    Fault(
        "the expert term is left out",
        _PREDICTION,
        old="        experts=work.missing_experts * expert_ms",
        new="        experts=0.0 * work.missing_experts * expert_ms",
        tests=(f"{_TESTS}/test_prediction.py::test_terms",),
    ),
    Fault(
        "a lack of headroom costs nothing",
        _PREDICTION,
        old="missing = max(0.0, needed - load.available_bytes)",
        new="missing = min(0.0, needed - load.available_bytes)",
        tests=(f"{_TESTS}/test_placement.py::test_the_cheaper_replica_wins",),
    ),
    Fault(
        "prefixes are shared between salts",
        _PREFIX,
        old="blake2b(salt.encode(), digest_size=8)",
        new="blake2b(b'', digest_size=8)",
        tests=(f"{_TESTS}/test_prefix_affinity.py::test_a_hash_stands_for_everything_before_it",),
    ),
    Fault(
        "the prefix map grows without bound",
        _PREFIX,
        old="        self.resize(replica_id, self._max_blocks)",
        new="        pass",
        tests=(
            f"{_TESTS}/test_prefix_affinity.py::test_the_map_is_bounded_and_forgets_the_oldest_tail_first",
        ),
    ),
    Fault(
        "expert counters wrap around",
        _EXPERTS,
        old="up = used & ~(low & middle & high)",
        new="up = used",
        tests=(f"{_TESTS}/test_expert_affinity.py::test_counters_saturate_at_both_ends",),
    ),
    Fault(
        "the admission queue has no bound",
        _ADMISSION,
        old="if len(self) >= self._config.max_waiting:",
        new="if len(self) < 0:",
        tests=(f"{_TESTS}/test_admission.py::test_the_bound_counts_taken_ones_and_refuses_with_a_time",),
    ),
    Fault(
        "deadlines do not end a wait",
        _ADMISSION,
        old="if waiting.deadline_s <= now_s]",
        new="if waiting.deadline_s <= 0]",
        tests=(f"{_TESTS}/test_admission.py::test_deadlines_end_the_wait",),
    ),
    Fault(
        "the more streams, the more messages",
        "serve_app.policies.coalescing",
        old="    max_interval_s: float = 1.0\n",
        new="    max_interval_s: float = 0.1\n",
        tests=(f"{_TESTS}/test_coalescing.py::test_so_it_does_by_default_up_to_a_thousand_streams",),
    ),
    Fault(
        "a scaling policy that fails takes the controller with it",
        _SCALING,
        old="        except Exception as error:",
        new="        except KeyboardInterrupt as error:",
        tests=(f"{_TESTS}/test_autoscaling.py::test_a_failure_inside_never_leaves_the_policy",),
    ),
    Fault(
        "missing metrics count as calm",
        _SCALING,
        old="readings = [reading for reading in inputs.readings if reading.complete]",
        new="readings = list(inputs.readings)",
        tests=(f"{_TESTS}/test_autoscaling.py::test_desired_replicas",),
    ),
    Fault(
        "no metrics at all count as calm",
        _SCALING,
        old="    if len(readings) < inputs.num_running:\n        return False\n",
        new="",
        tests=(f"{_TESTS}/test_autoscaling.py::test_desired_replicas",),
    ),
    Fault(
        "replicas are asked for again while they load",
        _SCALING,
        old="    if inputs.num_running < target:",
        new="    if inputs.num_running < 0:",
        tests=(f"{_TESTS}/test_autoscaling.py::test_desired_replicas",),
    ),
    Fault(
        "the wish to shrink is taken back before the target follows",
        _SCALING,
        old='{calm_s:.0f} s", since_s, target)',
        new='{calm_s:.0f} s", inputs.now_s, target)',
        tests=(f"{_TESTS}/test_autoscaling.py::test_the_wish_to_shrink_stands_until_the_target_follows",),
    ),
    Fault(
        "a tenant that lost its home settles anywhere",
        "serve_app.policies.placement",
        old="            near = _with_fewest_missing(near)\n",
        new="            pass\n",
        tests=(
            "tests/serve_app/policies/test_placement.py"
            "::test_a_tenant_that_lost_its_home_settles_where_its_experts_are",
        ),
    ),
    Fault(
        "residency blurs what is known of use",
        "serve_app.policies.placement",
        old="        if used is None and self._use_is_told:\n",
        new="        if False:\n",
        tests=(
            "tests/serve_app/policies/test_placement.py::test_residency_does_not_blur_what_is_known_of_use",
        ),
    ),
]
