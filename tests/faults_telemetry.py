"""Planted faults of telemetry: figures counted twice or invented, spans that lose their tree or tell too much."""

from __future__ import annotations

from tests.faults import Fault

_PAGE = "tests/serve_app/telemetry/test_page.py"
_TABLE = "tests/serve_app/telemetry/test_table.py"
_PUSH = "tests/serve_app/telemetry/test_push.py"
_TRACING = "tests/serve_app/telemetry/test_tracing.py"
_BOARDS = "tests/dashboards/test_dashboards.py"

FAULTS = [
    Fault(
        "telemetry: a Router that is heard twice counts twice",
        "serve_app.telemetry.page",
        old="{figures.router: figures for figures in routers}.values()",
        new="list(routers)",
        tests=(f"{_PAGE}::test_any_router_answers_for_all_and_a_workers_figures_come_once",),
    ),
    Fault(
        "telemetry: a stop string makes a client that left",
        "serve_app.text.output",
        old="                    events.completed()\n",
        new="                    pass\n",
        tests=(f"{_PAGE}::test_an_answer_that_a_stop_string_ends_was_not_left[True]",),
    ),
    Fault(
        "telemetry: a push counts what its buckets do not hold",
        "serve_app.telemetry.token_gaps",
        old="count=sum(counts)",
        new="count=gaps.num",
        tests=(f"{_PAGE}::test_a_push_from_its_thread_counts_what_its_buckets_hold",),
    ),
    Fault(
        "telemetry: what a worker does not report is a zero",
        "serve_app.telemetry.worker_metrics",
        old="return [] if value is None else [((), value * scale)]",
        new="return [((), (value or 0.0) * scale)]",
        tests=(f"{_TABLE}::test_what_a_worker_does_not_report_is_no_zero",),
    ),
    Fault(
        "telemetry: pages that are pinned are in no band",
        "serve_app.telemetry.worker_metrics",
        old='        yield (group, "pinned"), held.pinned_bytes\n',
        new="",
        tests=(f"{_TABLE}::test_bands_gap_and_what_is_withheld_make_up_the_arena",),
    ),
    Fault(
        "telemetry: tokens of one message count as one gap",
        "serve_app.telemetry.token_gaps",
        old="        each_s = gap_s / num_tokens\n",
        new="        each_s = gap_s\n",
        tests=(f"{_PAGE}::test_gaps_fall_into_the_buckets_of_their_length",),
    ),
    Fault(
        "telemetry: every path that somebody makes up is a label",
        "serve_app.telemetry.http",
        old='if path.startswith(start)), "")',
        new="if path.startswith(start)), path)",
        tests=(f"{_PAGE}::test_unknown_paths_and_methods_make_no_labels_of_their_own",),
    ),
    Fault(
        "telemetry: each of those who scrape together asks all Routers",
        "serve_app.deployments.backend",
        old="        if self._page is None:\n",
        new="        if True:\n",
        tests=(f"{_PAGE}::test_those_who_ask_together_get_one_page",),
    ),
    Fault(
        "telemetry: a push leaves the token gaps out",
        "serve_app.telemetry.push",
        old="exporter if gaps is None else _WithGaps(exporter, gaps)",
        new="exporter",
        tests=(f"{_PUSH}::test_a_router_pushes_its_own_rows_and_no_workers",),
    ),
    Fault(
        "telemetry: the worker's spans hang on nothing",
        "serve_app.telemetry.tracing",
        old='span = self._tracer.start_span("worker", self._context, start_time',
        new='span = self._tracer.start_span("worker", Context(), start_time',
        tests=(f"{_TRACING}::test_a_request_is_one_tree_from_the_client_to_the_workers_phases",),
    ),
    Fault(
        "telemetry: a client that is not sampled is traced all the same",
        "serve_app.telemetry.tracing",
        old="    if told.is_valid and (not here.is_valid or not told.trace_flags.sampled):\n",
        new="    if False:\n",
        tests=(f"{_TRACING}::test_who_is_not_sampled_leaves_nothing_at_all",),
    ),
    Fault(
        "telemetry: an engine does not stamp its retractions",
        "worker.engines.fake",
        old="retracted_s=(*victim.stamps.retracted_s, time.time())",
        new="retracted_s=()",
        tests=(f"{_TRACING}::test_engines_stamp_their_retractions",),
    ),
    Fault(
        "telemetry: the scheduler does not stamp its retractions",
        "worker.scheduling.scheduler",
        old="(*request.retracted_s, now)[:MAX_RETRACTION_STAMPS]",
        new="()",
        tests=("tests/worker/scheduling/test_scheduler_edges.py::test_a_snapshot_says_what_goes_on",),
    ),
    Fault(
        "telemetry: snapshots keep the arena's figures of the start",
        "worker.engines.native",
        old="            self._arena_figures = arena_figures(report)\n",
        new="",
        tests=("tests/worker/test_figures.py::test_a_snapshot_carries_what_the_arenas_report_says",),
    ),
    Fault(
        "telemetry: a panel adds up labels that are not there",
        "dashboards.queries",
        old="inner = total(rate(metric, \"_bucket\", window, **only), *by, \"le\")",
        new="inner = total(rate(metric, \"_bucket\", window, **only), *by, \"replica\", \"le\")",
        tests=(f"{_BOARDS}::test_the_files_are_what_the_programs_write",),
    ),
]  # fmt: skip
