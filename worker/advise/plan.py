"""Works out what fits on a machine, and the limits of speed there, for one model, one format and one workload."""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.advise.formats import WeightFormat
from worker.advise.geometry import ModelGeometry
from worker.advise.limits import (
    LinkCurve,
    batch_limit_by_slots,
    distinct_experts,
    foresight_step_s,
    in_layer_step_s,
    resident_step_s,
    step_read_bytes,
    uniform_miss_rate,
)

RESIDENT_STEPS = (0, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 896)
"""Experts resident per layer for which rows are shown, as far as the model has so many."""

RUNTIME_BYTES = 1_500_000_000
"""Set aside on the GPU unless told otherwise: an assumption, not a measurement."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has. ``runtime_bytes`` of the GPU go to the driver's context, workspaces and activations.
    ``gather``: (bytes, seconds) measured to bring experts of a layer together; empty: at the link's rate."""

    gpu_bytes: int
    link_bytes_per_s: float
    host_bytes: int
    memory_bytes_per_s: float
    runtime_bytes: int = RUNTIME_BYTES
    gather: tuple[tuple[int, float], ...] = ()

    def link_curve(self, expert_bytes: int) -> LinkCurve:
        """``t_link(n)`` for experts of so many bytes."""
        if not self.gather:
            return LinkCurve.at_rate(expert_bytes, self.link_bytes_per_s)
        return LinkCurve(tuple((num_bytes / expert_bytes, seconds) for num_bytes, seconds in self.gather))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of it: ``concurrency`` requests that decode together, each with ``context`` tokens."""

    concurrency: int = 1
    context: int = 4096
    kv_dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class ResidentRow:
    """One line of the table: ``num_resident`` experts of each layer on the device (K).

    Attributes:
        places_bytes: arena bytes of those places.
        fits: whether they, the dense weights and the workload's requests fit together.
        context_tokens: most tokens per request at the workload's concurrency; 0 if not even the state fits.
        old_batch_limit: requests a step under the old rule.
        miss_rate: of uniform routing.
        link_bytes: bytes over the link per step at that rate.
        in_layer_s, foresight_s: least seconds of a step.
    """

    num_resident: int
    places_bytes: int
    fits: bool
    context_tokens: int
    old_batch_limit: int
    miss_rate: float
    link_bytes: float
    in_layer_s: float
    foresight_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits where. ``num_resident`` is K for the workload, None when the dense weights and the requests do not
    fit; ``places`` counts expert places over all layers."""

    geometry: ModelGeometry
    weights: WeightFormat
    machine: Machine
    workload: Workload
    dense_bytes: int
    arena_bytes: int
    requests_bytes: int
    places: int
    num_resident: int | None
    host_store_bytes: int
    distinct_per_layer: float
    resident_s: float
    rows: tuple[ResidentRow, ...]

    @property
    def fits_resident(self) -> bool:
        """Whether every expert can stay on the device beside the workload."""
        return self.num_resident is not None and self.num_resident >= self.geometry.num_experts

    @property
    def host_fits(self) -> bool:
        """Whether the host store fits the machine's memory."""
        return self.host_store_bytes <= self.machine.host_bytes

    @property
    def largest_concurrency(self) -> int:
        """Requests of the workload's context that fit when no expert is resident."""
        each = self.geometry.request_bytes(self.workload.context, self.workload.kv_dtype)
        return max(0, self.arena_bytes) // each


def make_plan(geometry: ModelGeometry, weights: WeightFormat, machine: Machine, workload: Workload) -> Plan:
    """The plan of ``geometry`` in ``weights`` on ``machine`` under ``workload``."""
    dense_bytes = geometry.dense_held_bytes(weights)
    arena_bytes = machine.gpu_bytes - machine.runtime_bytes - dense_bytes
    requests_bytes = workload.concurrency * geometry.request_bytes(workload.context, workload.kv_dtype)
    left = arena_bytes - requests_bytes
    places, num_resident = 0, None
    if left >= 0:
        num_resident = geometry.num_experts
        if geometry.num_moe_layers:
            places = min(left // geometry.place_bytes(weights), geometry.num_routed_experts)
            num_resident = places // geometry.num_moe_layers
    distinct = 0.0
    if geometry.num_experts:
        distinct = distinct_experts(geometry.num_experts, geometry.experts_per_token, workload.concurrency)
    resident_s = resident_step_s(
        step_read_bytes(
            geometry.dense_read_bytes(weights),
            geometry.num_moe_layers,
            distinct,
            geometry.expert_bytes(weights),
            requests_bytes,
        ),
        machine.memory_bytes_per_s,
    )
    plan = Plan(
        geometry=geometry,
        weights=weights,
        machine=machine,
        workload=workload,
        dense_bytes=dense_bytes,
        arena_bytes=arena_bytes,
        requests_bytes=requests_bytes,
        places=places,
        num_resident=num_resident,
        host_store_bytes=geometry.all_experts_bytes(weights),
        distinct_per_layer=distinct,
        resident_s=resident_s,
        rows=(),
    )
    return _with_rows(plan)


def _with_rows(plan: Plan) -> Plan:
    geometry = plan.geometry
    counts: set[int] = set()
    if geometry.num_experts:
        counts = {count for count in RESIDENT_STEPS if count < geometry.num_experts} | {geometry.num_experts}
        if plan.num_resident is not None:
            counts.add(plan.num_resident)
    rows = tuple(resident_row(plan, count) for count in sorted(counts))
    return replace(plan, rows=rows)


def resident_row(plan: Plan, num_resident: int) -> ResidentRow:
    """The line for ``num_resident`` experts per layer under uniform routing."""
    geometry, machine, workload = plan.geometry, plan.machine, plan.workload
    expert_bytes = geometry.expert_bytes(plan.weights)
    places_bytes = num_resident * geometry.num_moe_layers * geometry.place_bytes(plan.weights)
    miss_rate = uniform_miss_rate(num_resident, geometry.num_experts)
    missed = plan.distinct_per_layer * miss_rate
    hit_s = (plan.distinct_per_layer - missed) * expert_bytes / machine.memory_bytes_per_s
    link = machine.link_curve(expert_bytes)
    link_bytes = geometry.num_moe_layers * missed * expert_bytes
    left = plan.arena_bytes - places_bytes
    return ResidentRow(
        num_resident=num_resident,
        places_bytes=places_bytes,
        fits=left >= plan.requests_bytes,
        context_tokens=context_that_fits(geometry, max(0, left) // workload.concurrency, workload.kv_dtype),
        old_batch_limit=batch_limit_by_slots(num_resident, geometry.experts_per_token),
        miss_rate=miss_rate,
        link_bytes=link_bytes,
        in_layer_s=in_layer_step_s(plan.resident_s, [(missed, hit_s)] * geometry.num_moe_layers, link),
        foresight_s=foresight_step_s(plan.resident_s, link_bytes, machine.link_bytes_per_s),
    )


def context_that_fits(geometry: ModelGeometry, request_bytes: int, kv_dtype: str) -> int:
    """Most tokens of a request that has ``request_bytes`` of the arena, at most what the model was trained for."""
    low, high = 0, geometry.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if geometry.request_bytes(middle, kv_dtype) <= request_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def prefill_link_bytes(plan: Plan, num_tokens: int) -> float:
    """Bytes over the link for one chunk of ``num_tokens`` at the plan's K, uniform routing."""
    geometry = plan.geometry
    if not geometry.num_experts:
        return 0.0
    touched = distinct_experts(geometry.num_experts, geometry.experts_per_token, num_tokens)
    missed = touched * uniform_miss_rate(plan.num_resident or 0, geometry.num_experts)
    return geometry.num_moe_layers * missed * geometry.expert_bytes(plan.weights)
