"""What the arena of each worker holds, what it can still give, and what retractions, prefixes and moves cost."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.queries import of, rate, share, total, worker
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metric import exposed_name

AVAILABLE = f"{of(worker('available'))} / {of(worker('arena'))}"
PER_THOUSAND = f"1000 * {share(rate(worker('retractions')), rate(worker('finished')), 'replica')}"

ARENA = Row(
    "Arena",
    (
        Panel(
            "Arena by what it holds",
            "Every byte of the chosen workers' arenas once. used: running requests; reclaimable: prefixes that may go; "
            "pending: free at a known step; gap: expert places, or nothing; withheld: the experts' floor and rings.",
            "bytes",
            (
                Query(total(of(worker("band")), "state"), "{{state}}"),
                Query(total(of(worker("gap"))), "gap"),
                Query(total(of(worker("withheld"))), "withheld"),
            ),
            width=12,
            stacked=True,
        ),
        Panel(
            "Bands",
            "Bytes of each group's pages, whatever their state: full attention, windows, recurrent state.",
            "bytes",
            (
                Query(total(of(worker("band")), "group"), "{{group}}"),
                Query(total(of(worker("arena"))), "arena"),
            ),
            width=12,
        ),
        Panel(
            "Headroom",
            "Share of the arena that grants could take without sending anybody back.",
            "percentunit",
            (Query(AVAILABLE, "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Pinned",
            "Pages that cannot move: transfers read them.",
            "bytes",
            (Query(total(of(worker("band"), state="pinned"), "replica"), "{{replica}}"),),
        ),
        Panel(
            "Moves",
            "Pages moved a second to make room: beside steps (sealed pages) and between two (mutable ones).",
            "ops",
            (Query(total(rate(worker("moves")), "when"), "{{when}}"),),
        ),
        Panel(
            "Moved bytes",
            "Bytes of those pages a second; each crosses the device's memory twice.",
            "Bps",
            (Query(total(rate(worker("moved")), "when"), "{{when}}"),),
        ),
        Panel(
            "Retractions",
            "Running requests sent back to the queue, a second.",
            "ops",
            (Query(rate(worker("retractions")), "{{replica}}"),),
        ),
        Panel(
            "Retractions per 1,000 answers",
            "A rising figure says that max_running, or the number of replicas, does not suit the load.",
            "short",
            (Query(PER_THOUSAND, "{{replica}}"),),
        ),
    ),
)

PREFIXES = Row(
    "Prefixes",
    (
        Panel(
            "Prefix hits",
            "Share of prompt tokens whose pages were reused.",
            "percentunit",
            (
                Query(
                    share(rate(worker("cached_tokens")), rate(worker("prompt_tokens")), "replica"),
                    "{{replica}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Kept prefixes",
            "Bytes that the prefix tree holds, pages that running requests share included.",
            "bytes",
            (Query(of(worker("prefix_held")), "{{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Nodes",
            "Size of the prefix tree.",
            "short",
            (Query(of(worker("prefix_nodes")), "{{replica}}"),),
        ),
        Panel(
            "Let go",
            "Bytes of prefixes evicted a second.",
            "Bps",
            (Query(rate(worker("prefix_evicted")), "{{replica}}"),),
        ),
        Panel(
            "Saved and lost",
            "Seconds of computing a second that hits saved, and that prefixes let go too early cost again, as the "
            "market prices them.",
            "short",
            (
                Query(total(rate(worker("prefix_saved"))), "saved"),
                Query(total(rate(worker("prefix_recomputed"))), "computed again"),
            ),
        ),
    ),
)

HOST_TIER = Row(
    "Host tier",
    (
        Panel(
            "Host tier",
            "Bytes in use of what host_tier_bytes set aside.",
            "bytes",
            (
                Query(total(of(worker("host_tier_used"))), "used"),
                Query(total(of(worker("host_tier"))), "size"),
            ),
        ),
        Panel(
            "Copies",
            "Bytes a second to the host, and back for requests whose prefix the arena had let go.",
            "Bps",
            (
                Query(total(rate(worker("host_tier_stored"))), "to the host"),
                Query(total(rate(worker("host_tier_restored"))), "back"),
            ),
        ),
        Panel(
            "Waiting copies",
            "Pages to be copied to the host. A growing number: prefixes come faster than the budget of a step.",
            "short",
            (Query(of(worker("host_tier_waiting")), "{{replica}}"),),
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="headroom-memory",
    title="Headroom: memory",
    description="The arena by kind of page and state, headroom, retractions, prefixes, host tier and moves.",
    rows=(ARENA, PREFIXES, HOST_TIER),
    models_from=exposed_name(names.WORKERS),
    replicas_from=exposed_name(worker("arena")),
)
