"""How clients are served: rate, errors and duration, tokens, queue, placement, and replicas."""

from __future__ import annotations

from dashboards.grafana import Choice, Dashboard, Panel, Query, Row
from dashboards.queries import of, quantile, quoted, rate, share, total, within, worker
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metric import exposed_name

GENERATES = "=~" + quoted("/v1/(chat/completions|completions|responses)")
FAILED = "=~" + quoted("failed|expired")
DESIRED = 'ray_serve_autoscaling_desired_replicas{deployment=~"Worker.*"}'
"""Of Ray Serve's own figures, which Ray exports elsewhere; empty where those are not scraped."""
FIRST_TOKEN_BOUND = "$first_token_s"
TOKEN_BOUND = "$token_s"


def _quantiles(metric_name: str, panel: str, description: str, *shares: float) -> Panel:
    metric = getattr(names, metric_name)
    queries = tuple(Query(quantile(s, metric), f"p{s * 100:g}") for s in shares)
    return Panel(panel, description, "s", queries)


NOW = Row(
    "Now",
    (
        Panel(
            "Answers",
            "Answers that ended, a second.",
            "reqps",
            (Query(total(rate(names.REQUESTS)), "answers"),),
            "stat",
            4,
            4,
        ),
        Panel(
            "Failed",
            "Share of answers that failed or ran out of time. Refusals and clients that left are not among them.",
            "percentunit",
            (Query(share(rate(names.REQUESTS, outcome=FAILED), rate(names.REQUESTS)), "failed"),),
            "stat",
            4,
            4,
        ),
        Panel(
            "Refused",
            "Share of answers that were refused with 429.",
            "percentunit",
            (Query(share(rate(names.REQUESTS, outcome="refused"), rate(names.REQUESTS)), "refused"),),
            "stat",
            4,
            4,
        ),
        Panel(
            "First token, p95",
            "From arrival to the first tokens, the queue included.",
            "s",
            (Query(quantile(0.95, names.TIME_TO_FIRST_TOKEN), "p95"),),
            "stat",
            4,
            4,
        ),
        Panel(
            "Between tokens, p95",
            "Gap before each later token, as clients see it.",
            "s",
            (Query(quantile(0.95, names.INTER_TOKEN_LATENCY), "p95"),),
            "stat",
            4,
            4,
        ),
        Panel(
            "Tokens out",
            "Tokens generated for clients, a second.",
            "cps",
            (Query(total(rate(names.GENERATED_TOKENS)), "tokens"),),
            "stat",
            4,
            4,
        ),
    ),
)

REQUESTS = Row(
    "Rate and errors",
    (
        Panel(
            "Answers by outcome",
            "stop and length are complete answers; left: the client went away; expired: request_timeout_s passed.",
            "reqps",
            (Query(total(rate(names.REQUESTS), "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "HTTP responses by status",
            "All routes, requests refused ahead of the models (401, 413, a key's 429) included. 499: nobody was left.",
            "reqps",
            (
                Query(
                    total(rate(names.HTTP_DURATION, "_count"), "http_response_status_code"),
                    "{{http_response_status_code}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "HTTP duration by route, p95",
            "First byte to last byte of the response; a stream's is its whole length.",
            "s",
            (
                Query(
                    quantile(0.95, names.HTTP_DURATION, "http_route", http_route=GENERATES), "{{http_route}}"
                ),
            ),
        ),
        Panel(
            "Refusals by reason",
            "queue_full: max_queue; deadline and waited: queue_timeout_s; worker: the last worker vetoed; no_worker: "
            "none has started.",
            "reqps",
            (Query(total(rate(names.REFUSALS), "reason"), "{{reason}}"),),
        ),
        Panel(
            "Retries by reason",
            "Answers moved before their first token. refused: a worker's veto, which corrects what a Router could not "
            "know; lost: it died; gone: Serve no longer routes to it.",
            "reqps",
            (Query(total(rate(names.RETRIES), "reason"), "{{reason}}"),),
        ),
        Panel(
            "Vetoes per placement",
            "Share of placements that came to nothing. Above a few percent, Routers decide by old news.",
            "percentunit",
            (Query(share(rate(names.RETRIES), rate(names.PLACEMENTS)), "retries"),),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        _quantiles(
            "TIME_TO_FIRST_TOKEN", "Time to first token", "From arrival, queue included.", 0.5, 0.95, 0.99
        ),
        _quantiles(
            "INTER_TOKEN_LATENCY",
            "Inter-token latency",
            "Each token's gap at the Router. Its high quantiles show prompts that hold streams up.",
            0.5,
            0.95,
            0.99,
        ),
        _quantiles(
            "TIME_PER_OUTPUT_TOKEN",
            "Time per output token",
            "Mean gap of an answer, one value each.",
            0.5,
            0.95,
            0.99,
        ),
        Panel(
            "Time to first token",
            "How many answers got their first token after how long.",
            "s",
            (
                Query(
                    total(f"increase({of(names.TIME_TO_FIRST_TOKEN, '_bucket')}[$__rate_interval])", "le"),
                    "{{le}}",
                ),
            ),
            "heatmap",
        ),
        Panel(
            "Within the promise",
            "Share of answers whose first token, and of tokens whose gap, kept to the bounds chosen above.",
            "percentunit",
            (
                Query(within(names.TIME_TO_FIRST_TOKEN, FIRST_TOKEN_BOUND), "first token"),
                Query(within(names.INTER_TOKEN_LATENCY, TOKEN_BOUND), "tokens"),
                Query(within(names.TIME_PER_OUTPUT_TOKEN, TOKEN_BOUND), "answers by mean gap"),
            ),
            most=1,
        ),
        Panel(
            "Whole answers",
            "From arrival to the last token.",
            "s",
            tuple(Query(quantile(s, names.REQUEST_DURATION), f"p{s * 100:g}") for s in (0.5, 0.95)),
        ),
    ),
)

TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Tokens in and out",
            "Prompt tokens of started answers, those of them that were cached, and generated tokens.",
            "cps",
            (
                Query(total(rate(names.PROMPT_TOKENS)), "prompt"),
                Query(total(rate(names.CACHED_TOKENS)), "of which cached"),
                Query(total(rate(names.GENERATED_TOKENS)), "generated"),
            ),
        ),
        Panel(
            "Prefix hits, believed and found",
            "Share of prompt tokens that placement believed to be cached where it sent them, and that were. Apart: "
            "workers evict what Routers count on, or answers go elsewhere.",
            "percentunit",
            (
                Query(share(rate(names.PLACEMENT_PREFIX_TOKENS), rate(names.PROMPT_TOKENS)), "believed"),
                Query(share(rate(names.CACHED_TOKENS), rate(names.PROMPT_TOKENS)), "found"),
            ),
        ),
        Panel(
            "Generated by worker",
            "Tokens a second of each worker, those of answers that clients left included.",
            "cps",
            (Query(rate(worker("generated_tokens")), "{{replica}}"),),
            stacked=True,
        ),
    ),
)

QUEUE = Row(
    "Queue and load",
    (
        Panel(
            "Waiting and open",
            "Answers waiting in Routers for a worker, and answers at workers.",
            "short",
            (
                Query(total(of(names.QUEUED)), "waiting in Routers"),
                Query(total(of(names.OPEN)), "at workers"),
                Query(total(of(worker("waiting"))), "waiting at workers"),
            ),
        ),
        Panel(
            "Time in the queue",
            "From a Router's queue to a worker, once per placement.",
            "s",
            tuple(Query(quantile(s, names.QUEUE_DURATION), f"p{s * 100:g}") for s in (0.5, 0.95, 0.99)),
        ),
        Panel(
            "Wait at workers",
            "Mean wait in a worker's own queue lately, or the age of its head if that is more.",
            "s",
            (Query(of(worker("queue_wait")), "{{replica}}"),),
        ),
        Panel(
            "Batch",
            "Requests in each worker's batch over max_running.",
            "percentunit",
            (Query(f"{of(worker('running'))} / {of(worker('max_running'))}", "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Step",
            "Mean length of recent steps: what a stream's next token waits for.",
            "s",
            (Query(of(worker("step")), "{{replica}}"),),
        ),
        Panel(
            "Steps by kind",
            "What steps computed, and whether as a replayed CUDA graph or eagerly. Eager decode steps cost launches.",
            "ops",
            (Query(total(rate(worker("graph_steps")), "phase", "mode"), "{{phase}}, {{mode}}"),),
            stacked=True,
        ),
    ),
)

REPLICAS = Row(
    "Replicas",
    (
        Panel(
            "Workers",
            "Workers that Routers hear, the bounds of autoscaling, and what its policy asks for (Ray's own figure).",
            "short",
            (
                Query(f"max by (model) ({of(names.WORKERS)})", "{{model}}: reporting"),
                Query(f"max by (model, bound) ({of(names.REPLICA_BOUNDS)})", "{{model}}: {{bound}}"),
                Query(f"max by (deployment) ({DESIRED})", "{{deployment}}: desired"),
            ),
        ),
        Panel(
            "What autoscaling looks at",
            "Retractions a second, waits, and active requests over rows: high ones add a replica.",
            "short",
            (
                Query(f"avg by (model) ({of(worker('retraction_rate'))})", "{{model}}: retractions a second"),
                Query(f"avg by (model) ({of(worker('queue_wait'))})", "{{model}}: wait in seconds"),
                Query(
                    f"(sum by (model) ({of(worker('running'))}) + sum by (model) ({of(worker('waiting'))}))"
                    f" / sum by (model) ({of(worker('max_running'))})",
                    "{{model}}: active over rows",
                ),
            ),
        ),
        Panel(
            "Requests of workers",
            "Taken in, ended by themselves, and aborted, a second.",
            "reqps",
            (
                Query(total(rate(worker("submitted"))), "taken in"),
                Query(total(rate(worker("finished"))), "finished"),
                Query(total(rate(worker("aborted"))), "aborted"),
            ),
        ),
        Panel(
            "Reports",
            "Age of each worker's last report. Above 1 s it loses trust, above 5 s the worker counts as dead.",
            "s",
            (Query(of(worker("report_age")), "{{replica}}"),),
        ),
        Panel(
            "Draining",
            "1 while a worker takes no new requests.",
            "short",
            (Query(of(worker("draining")), "{{replica}}"),),
            most=1,
        ),
        Panel(
            "Tokens that wait",
            "Prompt tokens in workers' queues.",
            "short",
            (Query(of(worker("waiting_tokens")), "{{replica}}"),),
            stacked=True,
        ),
        Panel("Models", "What is loaded.", "none", (Query(of(names.MODEL_INFO), ""),), "table", 12, 6),
        Panel("Builds", "What each Router runs.", "none", (Query(of(names.BUILD_INFO), ""),), "table", 12, 6),
    ),
)


def _seconds(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(repr(bound) for bound in bounds)


DASHBOARD = Dashboard(
    uid="headroom-serving",
    title="Headroom: serving",
    description="Rate, errors and duration of answers, the queue, placement and replicas.",
    rows=(NOW, REQUESTS, LATENCY, TOKENS, QUEUE, REPLICAS),
    models_from=exposed_name(names.WORKERS),
    replicas_from=exposed_name(worker("running")),
    choices=(
        Choice("first_token_s", "First token within (s)", _seconds(names.SECONDS), "2.0"),
        Choice("token_s", "Token within (s)", _seconds(names.TOKEN_SECONDS), "0.05"),
    ),
)
