"""Paged experts: how many are resident, how often they are hit, what misses cost, and whether their bytes are right."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.queries import of, rate, share, total, worker
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metric import exposed_name

HITS, MISSES = rate(worker("expert_hits")), rate(worker("expert_misses"))
HIT_RATE = f"{total(HITS, 'replica')} / ({total(HITS, 'replica')} + {total(MISSES, 'replica')})"

RESIDENCY = Row(
    "Residency",
    (
        Panel(
            "Places now (K over all layers)",
            "Places for experts in the arena at this moment, experts that have one, and all there are. Requests take "
            "places and give them back.",
            "short",
            (
                Query(of(worker("expert_places")), "{{replica}}: places"),
                Query(of(worker("experts_resident")), "{{replica}}: resident"),
                Query(of(worker("experts")), "{{replica}}: all experts"),
            ),
            width=12,
        ),
        Panel(
            "Share of experts with a place",
            "1: every expert of every layer is resident.",
            "percentunit",
            (Query(f"{of(worker('experts_resident'))} / {of(worker('experts'))}", "{{replica}}"),),
            width=12,
            most=1,
        ),
        Panel(
            "Bytes of places",
            "Arena bytes that experts may use now: places times the largest expert.",
            "bytes",
            (Query(f"{of(worker('expert_places'))} * {of(worker('expert_block'))}", "{{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Evictions and rescues",
            "Experts a second that lost their place to another, and that were saved when pages took their place.",
            "ops",
            (
                Query(total(rate(worker("expert_evictions"))), "evicted"),
                Query(total(rate(worker("experts_rescued"))), "rescued"),
            ),
        ),
        Panel(
            "Ghosts",
            "Experts that lost their place lately and have none again: what a few more places would hold.",
            "short",
            (Query(of(worker("expert_ghosts")), "{{replica}}"),),
        ),
        Panel(
            "Misses of ghosts",
            "Share of misses that were of such experts; high: more places would pay.",
            "percentunit",
            (Query(share(rate(worker("expert_ghost_hits")), MISSES, "replica"), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Frozen",
            "1 while a step needs more experts than there are places: nothing is evicted, misses are read in place.",
            "short",
            (Query(of(worker("experts_frozen")), "{{replica}}"),),
            most=1,
        ),
    ),
)

LANES = Row(
    "Hits, misses and the link",
    (
        Panel(
            "Hit rate",
            "Share of the distinct experts of decode steps that were resident.",
            "percentunit",
            (Query(HIT_RATE, "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Uses by lane",
            "Distinct experts of steps a second. tee: read over the link and kept; in_place: read and not kept; "
            "prefill_*: of prompts; staged: copied ahead for a pass.",
            "ops",
            (Query(total(rate(worker("expert_uses")), "lane"), "{{lane}}"),),
            stacked=True,
        ),
        Panel(
            "Misses",
            "Experts of decode steps a second that had no place.",
            "ops",
            (Query(MISSES, "{{replica}}"),),
        ),
        Panel(
            "Bytes over the link by lane",
            "What experts bring over the link a second.",
            "Bps",
            (Query(total(rate(worker("expert_brought")), "lane"), "{{lane}}"),),
            stacked=True,
        ),
        Panel(
            "Bytes of misses",
            "Of decode steps alone, by worker; any engine that pages experts reports it.",
            "Bps",
            (Query(rate(worker("expert_missed")), "{{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Link busy",
            "Share of the time for which the link carried experts that decode steps missed, at this machine's measured "
            "rate. Near 1, the link sets the pace.",
            "percentunit",
            (Query(rate(worker("link_busy")), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Misses per token",
            "Experts missed per generated token, all layers together.",
            "short",
            (Query(share(MISSES, rate(worker("generated_tokens")), "replica"), "{{replica}}"),),
        ),
        Panel(
            "Steps",
            "Steps a second; with misses, what each of them waits for.",
            "ops",
            (Query(rate(worker("steps")), "{{replica}}"),),
        ),
    ),
)

CHECK = Row(
    "Self-check",
    (
        Panel(
            "Places checked",
            "Resident experts a second whose bytes were compared with what was loaded. A difference ends the worker; "
            "this stands still where no steps run, and nowhere else.",
            "ops",
            (Query(rate(worker("expert_checks")), "{{replica}}"),),
        ),
        Panel(
            "A round takes",
            "How long until every place has had its turn, at the present rate.",
            "s",
            (Query(f"{of(worker('expert_places'))} / {rate(worker('expert_checks'))}", "{{replica}}"),),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="headroom-experts",
    title="Headroom: experts",
    description="Places now, hit rate, bytes by lane, the link and the self-check of paged experts.",
    rows=(RESIDENCY, LANES, CHECK),
    models_from=exposed_name(names.WORKERS),
    replicas_from=exposed_name(worker("experts")),
)
