"""The table's rows about workers: what each figure is called, what it means, and how it is read from a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve_app.telemetry.metric import WORKER_LABELS, Metric
from worker.api import WorkerSnapshot


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's last report: its model, Serve's name of it, how old the report is, and what it says."""

    model: str
    replica: str
    age_s: float
    snapshot: WorkerSnapshot


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values by what the row's own labels are: those behind ``model`` and ``replica``."""


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """A row of the table, and how it is read from a report; no sample where the report does not have it."""

    metric: Metric
    read: Callable[[WorkerState], Samples]


def _row(
    name: str,
    kind: str,
    unit: str,
    description: str,
    read: Callable[[WorkerState], Samples],
    *labels: str,
) -> WorkerMetric:
    return WorkerMetric(
        Metric(f"headroom.worker.{name}", kind, unit, description, (*WORKER_LABELS, *labels)), read
    )


def _of(value: Callable[[WorkerSnapshot], float]) -> Callable[[WorkerState], Samples]:
    return lambda state: [((), value(state.snapshot))]


def _paged(value: Callable[[WorkerSnapshot], float]) -> Callable[[WorkerState], Samples]:
    """Of workers that page experts alone."""
    return lambda state: [((), value(state.snapshot))] if state.snapshot.experts is not None else []


def _extra(key: str, scale: float = 1.0) -> Callable[[WorkerState], Samples]:
    def read(state: WorkerState) -> Samples:
        value = state.snapshot.extra.get(key)
        return [] if value is None else [((), value * scale)]

    return read


def _extras(keys: dict[str, tuple[str, ...]]) -> Callable[[WorkerState], Samples]:
    def read(state: WorkerState) -> Samples:
        extra = state.snapshot.extra
        return [(labels, extra[key]) for key, labels in keys.items() if key in extra]

    return read


def _bands(state: WorkerState) -> Samples:
    for group, held in state.snapshot.headroom.kinds.items():
        yield (group, "used"), held.used_bytes
        yield (group, "pinned"), held.pinned_bytes
        yield (group, "pending"), held.pending_bytes
        yield (group, "reclaimable"), held.reclaimable_bytes
        yield (group, "free"), held.free_bytes


def _withheld(snapshot: WorkerSnapshot) -> float:
    room = snapshot.headroom
    in_bands = sum(
        held.used_bytes + held.pinned_bytes + held.pending_bytes + held.reclaimable_bytes + held.free_bytes
        for held in room.kinds.values()
    )
    return room.arena_bytes - room.gap_bytes - in_bands


def _lanes(state: WorkerState) -> Samples:
    seen, extra = state.snapshot, state.snapshot.extra
    if "expert_misses_in_place" not in extra:
        return
    in_place = extra["expert_misses_in_place"]
    yield ("hit",), seen.expert_hits
    yield ("tee",), seen.expert_misses - in_place
    yield ("in_place",), in_place
    yield ("prefill_hit",), extra["expert_prefill_hits"]
    yield ("prefill_in_place",), extra["expert_prefill_misses"]
    yield ("staged",), extra["expert_staged"]


def _num_experts(snapshot: WorkerSnapshot) -> float:
    return snapshot.experts.num_layers * snapshot.experts.num_experts if snapshot.experts else 0


WORKER_METRICS: tuple[WorkerMetric, ...] = (
    _row("running", "gauge", "{request}", "Requests in the batch.", _of(lambda s: s.num_running)),
    _row("max_running", "gauge", "{request}", "Most requests in a batch.", _of(lambda s: s.max_running)),
    _row("waiting", "gauge", "{request}", "Requests in the worker's queue.", _of(lambda s: s.num_waiting)),
    _row("waiting_tokens", "gauge", "{token}", "Tokens of those.", _of(lambda s: s.waiting_tokens)),
    _row(
        "queue_wait",
        "gauge",
        "s",
        "Recent mean wait in it, or its head's age.",
        _of(lambda s: s.queue_wait_s),
    ),
    _row("draining", "gauge", "", "1 where no new requests are taken.", _of(lambda s: float(s.draining))),
    _row("report_age", "gauge", "s", "Age of the last report.", lambda state: [((), state.age_s)]),
    _row("submitted", "counter", "{request}", "Requests taken in.", _of(lambda s: s.num_submitted)),
    _row(
        "finished",
        "counter",
        "{request}",
        "Requests that ended by themselves.",
        _of(lambda s: s.num_finished),
    ),
    _row("aborted", "counter", "{request}", "Requests that were ended.", _of(lambda s: s.num_aborted)),
    _row(
        "retractions",
        "counter",
        "{retraction}",
        "Running requests sent back.",
        _of(lambda s: s.num_retractions),
    ),
    _row(
        "retraction_rate",
        "gauge",
        "{retraction}/s",
        "The same over the last seconds, as autoscaling sees it.",
        _of(lambda s: s.retraction_rate),
    ),
    _row("steps", "counter", "{step}", "Steps of the engine's loop.", _of(lambda s: s.num_steps)),
    _row("step", "gauge", "s", "Mean length of recent steps.", _of(lambda s: s.step_s)),
    _row(
        "graph_steps",
        "counter",
        "{step}",
        "Steps by what they computed (decode, mixed with prompts) and how (graph replayed, eager).",
        _extras(
            {
                f"graph.{mode}_{phase}_steps": (phase, mode)
                for phase in ("decode", "mixed")
                for mode in ("replayed", "eager")
            }
        ),
        "phase",
        "mode",
    ),
    _row(
        "prompt_tokens",
        "counter",
        "{token}",
        "Prompt tokens of scheduled requests.",
        _of(lambda s: s.prompt_tokens),
    ),
    _row(
        "cached_tokens",
        "counter",
        "{token}",
        "Of those, tokens whose pages were reused.",
        _of(lambda s: s.cached_tokens),
    ),
    _row("generated_tokens", "counter", "{token}", "Tokens generated.", _of(lambda s: s.generated_tokens)),
    # The arena: bands, gap and what is withheld make up its size.
    _row("arena", "gauge", "By", "Size of the arena.", _of(lambda s: s.headroom.arena_bytes)),
    _row("available", "gauge", "By", "What grants could take.", _of(lambda s: s.headroom.available_bytes)),
    _row(
        "gap", "gauge", "By", "Free between the bands, full of experts.", _of(lambda s: s.headroom.gap_bytes)
    ),
    _row(
        "withheld",
        "gauge",
        "By",
        "What pages may not take: the experts' floor, staging rings, ends of grids.",
        _of(_withheld),
    ),
    _row(
        "band",
        "gauge",
        "By",
        "Pages by group and what they are: used, pinned, pending, reclaimable, free.",
        _bands,
        "group",
        "state",
    ),
    _row(
        "moves",
        "counter",
        "{page}",
        "Pages moved, beside steps or between two.",
        _extras({"arena.moves_beside": ("beside",), "arena.moves_between": ("between",)}),
        "when",
    ),
    _row(
        "moved",
        "counter",
        "By",
        "Bytes of those pages.",
        _extras({"arena.moved_beside_bytes": ("beside",), "arena.moved_between_bytes": ("between",)}),
        "when",
    ),
    # Prefix tree and host tier.
    _row("prefix_nodes", "gauge", "{node}", "Nodes of the prefix tree.", _extra("prefix.nodes")),
    _row("prefix_held", "gauge", "By", "Pages that the prefix tree holds.", _extra("prefix.held_bytes")),
    _row("prefix_evicted", "counter", "By", "Pages that it let go.", _extra("prefix.evicted_bytes")),
    _row(
        "prefix_saved",
        "counter",
        "s",
        "Computing that prefix hits saved, as priced.",
        _extra("prefix.saved_ms", 1e-3),
    ),
    _row(
        "prefix_recomputed",
        "counter",
        "s",
        "Computing that let-go prefixes cost again, as priced.",
        _extra("prefix.computed_again_ms", 1e-3),
    ),
    _row("host_tier", "gauge", "By", "Size of the host tier.", _extra("host_tier.budget_bytes")),
    _row("host_tier_used", "gauge", "By", "Of it in use.", _extra("host_tier.used_bytes")),
    _row(
        "host_tier_waiting", "gauge", "{page}", "Pages to be copied there.", _extra("host_tier.waiting_pages")
    ),
    _row("host_tier_stored", "counter", "By", "Copied there.", _extra("host_tier.stored_bytes")),
    _row("host_tier_restored", "counter", "By", "Copied back.", _extra("host_tier.brought_back_bytes")),
    # Paged experts.
    _row("experts", "gauge", "{expert}", "Experts of all layers.", _paged(_num_experts)),
    _row(
        "expert_places", "gauge", "{place}", "Places for experts in the arena now.", _extra("expert_places")
    ),
    _row("experts_resident", "gauge", "{expert}", "Experts that have a place.", _extra("experts_resident")),
    _row(
        "experts_frozen",
        "gauge",
        "",
        "1 while a step needs more experts than places.",
        _extra("experts_frozen"),
    ),
    _row("expert_block", "gauge", "By", "Bytes of the largest expert.", _extra("expert_bytes")),
    _row(
        "expert_hits",
        "counter",
        "{expert}",
        "Experts of decode steps that were resident.",
        _paged(lambda s: s.expert_hits),
    ),
    _row(
        "expert_misses",
        "counter",
        "{expert}",
        "Experts of decode steps that were not.",
        _paged(lambda s: s.expert_misses),
    ),
    _row("expert_missed", "counter", "By", "Bytes of those.", _paged(lambda s: s.expert_bytes_paged)),
    _row(
        "expert_uses",
        "counter",
        "{expert}",
        "Distinct experts of steps, by how each was had.",
        _lanes,
        "lane",
    ),
    _row(
        "expert_brought",
        "counter",
        "By",
        "Bytes of experts over the link, by how.",
        _extras(
            {f"expert_bytes.{lane}": (lane,) for lane in ("tee", "in_place", "prefill_in_place", "staged")}
        ),
        "lane",
    ),
    _row(
        "expert_evictions",
        "counter",
        "{expert}",
        "Experts that lost their place.",
        _extra("expert_evictions"),
    ),
    _row(
        "experts_rescued",
        "counter",
        "{expert}",
        "Experts saved from a banned place.",
        _extra("experts_rescued"),
    ),
    _row(
        "expert_ghosts", "gauge", "{expert}", "Experts whose place was lost lately.", _extra("expert_ghosts")
    ),
    _row("expert_ghost_hits", "counter", "{expert}", "Misses of such experts.", _extra("expert_ghost_hits")),
    _row(
        "link_busy",
        "counter",
        "s",
        "The link busy with experts that decode steps missed.",
        _extra("expert_stall_s"),
    ),
    _row(
        "expert_checks",
        "counter",
        "{place}",
        "Places compared with their expert's hash; a difference ends the worker.",
        _extra("expert_places_checked"),
    ),
)
