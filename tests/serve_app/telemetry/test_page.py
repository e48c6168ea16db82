"""The Prometheus page: every name of the table with its kind, each figure once, however many Routers there are."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric as Parsed
from prometheus_client.parser import text_string_to_metric_families

from serve_app.deployments import dispatch
from serve_app.deployments.backend import RouterBackend, Telemetry
from serve_app.deployments.request_record import outcome_of
from serve_app.http.errors import DeadlinePassed
from serve_app.policies.admission import RefusalReason
from serve_app.telemetry import metrics as names
from serve_app.telemetry.metric import exposed_labels, exposed_name
from serve_app.telemetry.metrics import ASKED, COUNTED, ROUTER_METRICS, TABLE
from serve_app.telemetry.page import page_of
from serve_app.telemetry.router_metrics import RouterFacts, RouterMetrics
from serve_app.telemetry.token_gaps import TokenGaps
from serve_app.telemetry.worker_metrics import WORKER_METRICS
from tests.helpers.eventually import soon
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served
from tests.serve_app.telemetry.workers import all_extra, dense, expert_report, whole
from worker.api import FinishReason, WorkerSnapshot
from worker.engines.fake import FakeEngine
from worker.errors import InvalidRequest, Overloaded

ANSWER = "0123456789"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
PARTS = ("_bucket", "_sum", "_count")


class Whole(FakeEngine):
    """Reports what an engine with paged experts, graphs, prefix cache and host tier would, too."""

    def snapshot(self) -> WorkerSnapshot:
        return replace(super().snapshot(), extra=all_extra(), experts=expert_report().residency)


def router(name: str = "r1") -> RouterMetrics:
    """A Router's metrics, each row told or asked once, with its number in the table."""
    facts = {
        metric: (lambda n=number, m=metric: [(tuple("x" for _ in m.labels), n)])
        for number, metric in enumerate(ASKED)
    }
    made = RouterMetrics(RouterFacts(facts), name)
    for metric in COUNTED:
        made.add(metric, 1.0, *("x" for _ in metric.labels))
    made.gaps.came("x", 2, 0.05)
    return made


def parsed(page: bytes) -> dict[str, Parsed]:
    """Families by exposed name; fails where a sample is not Prometheus text, or a family is split."""
    found: dict[str, Parsed] = {}
    for family in text_string_to_metric_families(page.decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in found, f"{name} comes in two pieces"
        found[name] = family
    return found


def ended(page: dict[str, Parsed]) -> dict[str, float]:
    """Answers by outcome, of those that there were."""
    return {s.labels["outcome"]: s.value for s in page["headroom_requests_total"].samples if s.value}


def check_against_table(page: bytes) -> None:
    """All of the table, and nothing else: names, kinds, descriptions, labels."""
    found = parsed(page)
    assert set(found) == {exposed_name(metric) for metric in TABLE}
    for metric in TABLE:
        family = found[exposed_name(metric)]
        assert family.type == metric.kind, metric.name
        assert family.documentation == metric.description
        for sample in family.samples:
            labels = set(sample.labels) - ({"le"} if sample.name.endswith("_bucket") else set())
            assert labels == set(exposed_labels(metric)), sample
            assert sample.name.removeprefix(exposed_name(metric)) in ("", *PARTS)


def test_every_name_of_the_table_is_on_the_page_with_its_kind_and_labels() -> None:
    check_against_table(page_of([router().figures()], [whole(), dense()]))


def test_a_live_page_of_the_service_shows_the_whole_table(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER, tokens_per_s=200.0))

    async def use(cluster: Cluster) -> None:
        await soon(lambda: len(cluster.dispatcher.live_reports()) == 2)
        assert (await cluster.client.post(CHAT, json=BODY)).status_code == 200
        cluster.replicas["replica0"].vetoes = cluster.replicas["replica1"].vetoes = 1
        assert (await cluster.client.post(CHAT, json=BODY)).status_code == 429  # a retry and a refusal
        page = (await cluster.client.get("/metrics")).content
        check_against_table(page)
        samples = [sample for family in parsed(page).values() for sample in family.samples]
        replicas = [s.labels["replica"] for s in samples if s.name == "headroom_worker_running"]
        assert sorted(replicas) == ["replica0", "replica1"]

        def of(name: str, **labels: str) -> float:
            [value] = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
            return value

        assert of("headroom_requests_total", outcome="stop") == 1
        assert of("headroom_requests_total", outcome="refused") == 1
        assert of("headroom_retries_total", reason="refused") == 1
        assert of("headroom_refusals_total", reason="worker") == 1
        assert of("headroom_placements_total") == 3
        assert of("headroom_generated_tokens_total") == len(ANSWER) + 1
        assert of("headroom_time_to_first_token_seconds_count") == 1
        assert of("headroom_queue_duration_seconds_count") == 3
        # All but the tokens of the first message have a gap before them.
        assert 0 < of("headroom_inter_token_latency_seconds_count") <= len(ANSWER)
        assert of("headroom_workers") == 2
        assert of("headroom_replica_bounds", bound="max") == 1
        http = {"http_route": CHAT, "http_request_method": "POST"}
        name = "http_server_request_duration_seconds_count"
        assert of(name, **http, http_response_status_code="200") == 1
        assert of(name, **http, http_response_status_code="429") == 1

    served(folder, use, num_replicas=2, make_engine=Whole)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_was_not_left(tmp_path: Path, stream: bool) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER, tokens_per_s=200.0))

    async def use(cluster: Cluster) -> None:
        answer = await cluster.client.post(CHAT, json={**BODY, "stop": ["56"], "stream": stream})
        assert '"finish_reason":"stop"' in answer.text
        assert '"56' not in answer.text
        page = parsed((await cluster.client.get("/metrics")).content)
        assert ended(page) == {"stop": 1}

    served(folder, use)


def test_an_answer_that_is_made_to_fit_the_arena_counts_once(tmp_path: Path) -> None:
    script = {**scripted(ANSWER), "bytes_per_token": 1000, "arena_bytes": 40_000}
    folder = write_model_folder(tmp_path / "m", script=script)

    async def use(cluster: Cluster) -> None:
        assert (await cluster.client.post(CHAT, json=BODY)).status_code == 200  # with no limit of its own
        too_long = {"prompt": [1] * 35, "max_tokens": 10}
        assert (await cluster.client.post("/v1/completions", json=too_long)).status_code == 400
        page = parsed((await cluster.client.get("/metrics")).content)
        assert ended(page) == {"stop": 1, "invalid": 1}

    served(folder, use)


def test_what_has_not_happened_yet_is_told_as_none(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))

    async def use(cluster: Cluster) -> None:
        page = parsed((await cluster.client.get("/metrics")).content)

        def told(name: str, label: str) -> set[tuple[str, float]]:
            return {(s.labels[label], s.value) for s in page[name].samples}

        assert told("headroom_requests_total", "outcome") == {(outcome, 0) for outcome in names.OUTCOMES}
        assert told("headroom_refusals_total", "reason") == {(reason, 0) for reason in names.REFUSAL_REASONS}
        assert told("headroom_retries_total", "reason") == {(reason, 0) for reason in names.RETRY_REASONS}
        assert told("headroom_generated_tokens_total", "model") == {("fake-model", 0)}

    served(folder, use)


def test_the_reasons_are_those_that_the_service_counts_by() -> None:
    # Those of the queue by their names; the others stand where they are counted.
    source = inspect.getsource(dispatch)
    counted = {kind: set(re.findall(rf'counts\.{kind}\["(\w+)"', source)) for kind in ("refusals", "retries")}
    assert counted["refusals"] | {reason.name.lower() for reason in RefusalReason} == set(
        names.REFUSAL_REASONS
    )
    assert counted["retries"] | {"lost"} == set(names.RETRY_REASONS)
    errors = (
        InvalidRequest("x", "y"),
        Overloaded("z", 1.0),
        DeadlinePassed("late"),
        asyncio.CancelledError(),
    )
    others = {outcome_of(error) for error in (*errors, RuntimeError())}
    assert others | {FinishReason.STOP.value, FinishReason.LENGTH.value} == set(names.OUTCOMES)


def test_unknown_paths_and_methods_make_no_labels_of_their_own(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))

    async def use(cluster: Cluster) -> None:
        for path in ("/nothing/1", "/nothing/2", "/v1/models/a", "/v1/models/b"):
            await cluster.client.get(path)
        await cluster.client.request("MADEUP", "/nothing/3")
        page = (await cluster.client.get("/metrics")).content
        seen = {
            (s.labels["http_request_method"], s.labels["http_route"]): s.value
            for s in parsed(page)["http_server_request_duration_seconds"].samples
            if s.name.endswith("_count")
        }
        assert seen == {("GET", ""): 2, ("GET", "/v1/models/{name:path}"): 2, ("_OTHER", ""): 1}

    served(folder, use)


def test_an_error_that_nobody_expected_counts_as_500(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))

    async def use(cluster: Cluster) -> None:
        def broken(self: Any) -> bool:
            raise RuntimeError("of the test")

        monkeypatch.setattr(RouterBackend, "is_ready", broken)
        assert (await cluster.client.get("/ready")).status_code == 500
        families = parsed((await cluster.client.get("/metrics")).content)
        seen = [s for s in families["http_server_request_duration_seconds"].samples if "count" in s.name]
        assert [(s.labels["http_route"], s.labels["http_response_status_code"]) for s in seen] == [
            ("/ready", "500")
        ]

    served(folder, use)


def test_any_router_answers_for_all_and_a_workers_figures_come_once(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))
    other = router("r2")

    async def peers() -> list[Any]:
        return [other.figures(), other.figures()]  # it may well be heard twice

    async def use(cluster: Cluster) -> None:
        await cluster.client.post(CHAT, json=BODY)
        families = parsed((await cluster.client.get("/metrics")).content)
        for metric in ROUTER_METRICS:
            routers = [sample.labels["router"] for sample in families[exposed_name(metric)].samples]
            assert "r2" in routers, metric.name
        for family in families.values():
            series = [(sample.name, *sorted(sample.labels.items())) for sample in family.samples]
            assert len(set(series)) == len(series), f"{family.name} has a series twice"
        generated = {s.labels["router"]: s.value for s in families["headroom_generated_tokens_total"].samples}
        assert generated == {"r1": len(ANSWER) + 1, "r2": 1}
        for row in WORKER_METRICS:
            for sample in getattr(families.get(exposed_name(row.metric)), "samples", ()):
                assert "router" not in sample.labels
        assert [s.value for s in families["headroom_worker_max_running"].samples] == [8.0]

    served(folder, use, telemetry=Telemetry("r1", peers=peers))


def test_a_router_that_cannot_ask_the_others_still_tells_of_itself(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))

    async def peers() -> list[Any]:
        raise RuntimeError("Serve is going away")

    async def use(cluster: Cluster) -> None:
        answer = await cluster.client.get("/metrics")
        assert answer.status_code == 200
        routers = {s.labels["router"] for s in parsed(answer.content)["headroom_workers"].samples}
        assert routers == {"r1"}

    served(folder, use, telemetry=Telemetry("r1", peers=peers))


def test_those_who_ask_together_get_one_page(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))
    asked = 0

    async def peers() -> list[Any]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.02)
        return []

    async def use(cluster: Cluster) -> None:
        pages = await asyncio.gather(*(cluster.client.get("/metrics") for _ in range(20)))
        assert asked == 1
        assert len({page.text for page in pages}) == 1
        await cluster.client.get("/metrics")
        assert asked == 2

    served(folder, use, telemetry=Telemetry("r1", peers=peers))


def test_a_page_of_64_workers_is_made_in_a_moment() -> None:
    workers = [whole(f"w{index}") for index in range(64)]
    routers = [router(f"r{index}").figures() for index in range(4)]
    page_of(routers, workers[:1])
    took_s = []
    for _ in range(3):
        began_s = time.process_time()
        page = page_of(routers, workers)
        took_s.append(time.process_time() - began_s)
    assert page.count(b'replica="w63"') == page.count(b'replica="w0"') > len(WORKER_METRICS)
    assert min(took_s) < 0.15, "of processor time, in a thread; about a tenth of it on a quiet machine"


def test_names_that_need_escaping_stay_one_label() -> None:
    odd = 'a"b\\c\nd'
    families = parsed(page_of([router().figures()], [replace(whole(), model=odd)]))
    assert families["headroom_worker_running"].samples[0].labels["model"] == odd


def test_gaps_fall_into_the_buckets_of_their_length() -> None:
    made = router()
    for _ in range(3):
        made.gaps.came("m", 4, 0.08)  # 20 ms each
    made.gaps.came("m", 1, 99.0)
    family = parsed(page_of([made.figures()], []))["headroom_inter_token_latency_seconds"]
    buckets = {
        float(s.labels["le"]): s.value
        for s in family.samples
        if s.name.endswith("_bucket") and s.labels["model"] == "m"
    }
    assert buckets[0.015] == 0
    assert buckets[0.02] == 12
    assert buckets[5.0] == 12
    assert buckets[float("inf")] == 13
    values = {s.name: s.value for s in family.samples if s.labels["model"] == "m"}
    assert values["headroom_inter_token_latency_seconds_count"] == 13
    assert values["headroom_inter_token_latency_seconds_sum"] == pytest.approx(99.24)


def test_a_push_from_its_thread_counts_what_its_buckets_hold() -> None:
    gaps = TokenGaps(names.INTER_TOKEN_LATENCY)
    gaps.came("a", 1, 0.01)
    found = gaps._by_model["a"]

    class ComesMeanwhile(list[int]):
        """While it is read, the event loop counts a token of a model that is new."""

        def __iter__(self) -> Any:
            gaps.came("b", 1, 0.02)
            found.num += 1
            return super().__iter__()

    found.counts = ComesMeanwhile(found.counts)
    [point] = gaps.data().data.data_points
    assert point.attributes == {"model": "a"}
    assert point.count == sum(point.bucket_counts) == 1


def test_a_push_from_its_thread_counts_workers_while_one_comes(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER))

    async def use(cluster: Cluster) -> None:
        dispatcher = cluster.dispatcher
        await soon(dispatcher.live_reports)
        [(name, (at_s, report))] = dispatcher._reports.items()

        class ComesMeanwhile(float):
            """While its age is worked out, the event loop hears of a worker that is new."""

            def __rsub__(self, now_s: float) -> float:
                dispatcher._reports["new"] = (now_s, replace(report, replica_id="new"))
                return now_s - float(self)

        dispatcher._reports[name] = (ComesMeanwhile(at_s), report)
        assert len(dispatcher.live_reports()) == 1

    served(folder, use)


def test_labels_must_be_those_of_the_table() -> None:
    with pytest.raises(ValueError, match="zip"):
        router().add(names.REQUESTS, 1.0, "m")
    with pytest.raises(KeyError):
        router().add(names.QUEUED, 1.0, "m")
