"""Spans: one tree per request from the client to the worker's phases, nothing of the text, nothing where it is off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from serve_app.deployments.backend import Telemetry
from serve_app.telemetry.spans import WithoutBackground, is_background, span_processors
from serve_app.telemetry.tracing import Tracing
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served
from worker.api import FinishReason, GenerateRequest, RequestTimeline

CHAT = "/v1/chat/completions"
SECRET = "xylophone"
ANSWER = "zeppelin" * 3
BODY = {"messages": [{"role": "user", "content": SECRET}]}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Recorded:
    """Tracing into memory."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = provider.get_tracer("test")
        self.telemetry = Telemetry("r1", tracing=Tracing(self.tracer))

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._memory.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def tree(self) -> dict[str, list[str]]:
        """Names of each span's children, in order of their start."""
        names = {span.context.span_id: span.name for span in self.spans}
        found: dict[str, list[str]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_time or 0):
            parent = names.get(span.parent.span_id, "remote") if span.parent is not None else "none"
            found.setdefault(parent, []).append(span.name)
        return found


def ask(folder: Path, recorded: Recorded, headers: dict[str, str] | None = None, **body: Any) -> None:
    async def use(cluster: Cluster) -> None:
        answer = await cluster.client.post(CHAT, json={**BODY, **body}, headers=headers or {})
        assert answer.status_code == 200, answer.text

    served(folder, use, telemetry=recorded.telemetry)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(
        tmp_path / "m",
        script={
            **scripted(ANSWER),
            "num_experts": 8,
            "experts_per_token": 2,
            "num_layers": 2,
            "resident_experts": 4,
            "expert_bytes": 100,
        },
    )


def test_a_request_is_one_tree_from_the_client_to_the_workers_phases(folder: Path) -> None:
    recorded = Recorded()
    ask(folder, recorded, {"traceparent": f"00-{TRACE}-{PARENT}-01"}, temperature=0.5, seed=7, max_tokens=9)
    assert recorded.tree() == {
        "remote": [f"POST {CHAT}"],
        f"POST {CHAT}": ["tokenize", "chat fake-model"],
        "chat fake-model": ["queue", "place"],
        "place": ["worker"],
        "worker": ["queued", "prefill", "decode"],
    }
    assert {format(span.context.trace_id, "032x") for span in recorded.spans} == {TRACE}
    root = recorded.named(f"POST {CHAT}")
    assert root.parent is not None
    assert format(root.parent.span_id, "016x") == PARENT
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 200


def test_spans_have_the_conventions_attributes_and_what_the_choice_was_made_by(folder: Path) -> None:
    recorded = Recorded()
    ask(folder, recorded, temperature=0.5, seed=7, max_tokens=9)
    answer, place, worker = (recorded.named(name) for name in ("chat fake-model", "place", "worker"))
    told = dict(answer.attributes or {})
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "fake-model"
    assert told["gen_ai.provider.name"] == "headroom"
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.seed"]) == (0.5, 7)
    assert told["gen_ai.request.max_tokens"] == told["gen_ai.usage.output_tokens"] == 9
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0
    assert [event.name for event in answer.events] == ["first token"]
    chosen = dict(place.attributes or {})
    assert chosen["headroom.replica"] == "replica0"
    assert chosen["headroom.placement.candidates"] == 1
    assert chosen["headroom.placement.predicted_ms"] >= chosen["headroom.placement.prefill_ms"] > 0
    assert chosen["headroom.placement.prefix_tokens"] == 0
    did = dict(worker.attributes or {})
    assert did["gen_ai.usage.input_tokens"] == told["gen_ai.usage.input_tokens"] > 0
    assert did["gen_ai.usage.output_tokens"] == 9
    assert did["headroom.finish_reason"] == "length"
    assert did["headroom.worker.expert_misses"] > 0
    assert did["headroom.worker.expert_hits"] + did["headroom.worker.expert_misses"] == 9 * 2 * 2
    assert did["headroom.worker.expert_missed_bytes"] == 100 * did["headroom.worker.expert_misses"]


def test_a_phase_begins_where_the_one_before_ends_and_all_lie_in_the_workers_span(folder: Path) -> None:
    recorded = Recorded()
    ask(folder, recorded)
    queued, prefill, decode, worker = map(recorded.named, ("queued", "prefill", "decode", "worker"))
    assert worker.start_time == queued.start_time
    assert queued.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time == worker.end_time
    assert [(event.name, event.timestamp) for event in worker.events] == [("first token", decode.start_time)]


def test_no_span_has_text_of_prompt_answer_or_error(folder: Path) -> None:
    recorded = Recorded()

    async def use(cluster: Cluster) -> None:
        assert (await cluster.client.post(CHAT, json=BODY)).status_code == 200
        grammar = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": SECRET}}}
        refused = await cluster.client.post(CHAT, json={**BODY, "response_format": grammar})
        assert refused.status_code == 400
        wrong = await cluster.client.post(CHAT, json={**BODY, "tools": [{"type": SECRET}]})
        assert wrong.status_code == 400

    served(folder, use, telemetry=recorded.telemetry)
    text = "".join(span.to_json() for span in recorded.spans)
    assert "chat fake-model" in text
    assert SECRET not in text
    assert "zeppelin" not in text


def test_a_veto_and_the_try_after_it_are_two_places(folder: Path) -> None:
    recorded = Recorded()

    async def use(cluster: Cluster) -> None:
        for replica in cluster.replicas.values():
            replica.vetoes = 1
        assert (await cluster.client.post(CHAT, json=BODY)).status_code == 429

    served(folder, use, num_replicas=2, telemetry=recorded.telemetry)
    assert recorded.tree()["chat fake-model"] == ["queue", "place", "queue", "place"]
    places = [span for span in recorded.spans if span.name == "place"]
    assert {(span.attributes or {})["headroom.replica"] for span in places} == {"replica0", "replica1"}
    assert all((span.attributes or {})["error.type"] == "Overloaded" for span in places)
    answer = recorded.named("chat fake-model")
    assert (answer.attributes or {})["error.type"] == "refused"
    assert not answer.status.is_ok
    root = recorded.named(f"POST {CHAT}")
    assert (root.attributes or {})["http.response.status_code"] == 429
    assert root.status.is_unset, "the client's load is no fault of the server"


def test_each_answer_of_a_request_has_its_own_branch(folder: Path) -> None:
    recorded = Recorded()
    ask(folder, recorded, n=3)
    assert recorded.tree()[f"POST {CHAT}"] == ["tokenize", *["chat fake-model"] * 3]
    assert recorded.tree()["place"] == ["worker"] * 3


def test_an_answer_that_a_stop_string_ends_is_no_failure(folder: Path) -> None:
    recorded = Recorded()
    ask(folder, recorded, stop=[ANSWER[3]])
    span = recorded.named("chat fake-model")
    assert (span.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.status.is_unset


def test_a_stream_whose_client_leaves_ends_its_spans(tmp_path: Path) -> None:
    slow = write_model_folder(tmp_path / "slow", script=scripted("y" * 400, tokens_per_s=200.0))
    recorded = Recorded()

    async def use(cluster: Cluster) -> None:
        stream = asyncio.create_task(cluster.client.post(CHAT, json={**BODY, "stream": True}))
        await cluster.flowing(3)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    served(slow, use, telemetry=recorded.telemetry)
    assert (recorded.named("chat fake-model").attributes or {})["error.type"] == "left"
    assert (recorded.named("worker").attributes or {})["headroom.finish_reason"] == "left"


def test_retractions_are_events_at_their_time() -> None:
    recorded = Recorded()
    request = GenerateRequest("r", (1, 2, 3))
    with recorded.tracer.start_as_current_span("root"), recorded.tracer.start_as_current_span("parent"):
        spans = Tracing(recorded.tracer).worker(request)
    stamps = RequestTimeline(10.0, 11.0, 12.0, 15.0, 3, 0, 5, 2, retracted_s=(13.0, 14.0))
    spans.told(stamps)
    spans.ended(FinishReason.STOP, {"steps": 7})
    worker = recorded.named("worker")
    seen = [(event.name, event.timestamp) for event in worker.events]
    assert seen == [("first token", 12 * 10**9), ("retracted", 13 * 10**9), ("retracted", 14 * 10**9)]
    assert (worker.attributes or {})["headroom.retractions"] == 2
    assert (worker.attributes or {})["headroom.worker.steps"] == 7
    spans.ended(FinishReason.STOP, {})
    assert len(recorded.spans) == 6, "told twice, made once"


def test_a_root_that_serve_began_at_a_worker_gets_no_children() -> None:
    recorded = Recorded()
    with recorded.tracer.start_as_current_span("replica_handle_request Worker generate"):
        spans = Tracing(recorded.tracer).worker(GenerateRequest("r", (1, 2, 3)))
    assert not spans.is_recording


def test_engines_stamp_their_retractions(tmp_path: Path) -> None:
    script = {**scripted("y" * 30, tokens_per_s=400.0), "bytes_per_token": 1, "arena_bytes": 90}
    tight = write_model_folder(tmp_path / "tight", script=script)
    recorded = Recorded()

    async def use(cluster: Cluster) -> None:
        body = {"prompt": [1] * 25, "max_tokens": 30}
        await asyncio.gather(*(cluster.client.post("/v1/completions", json=body) for _ in range(3)))

    served(tight, use, telemetry=recorded.telemetry, backlog=8)
    workers = [span for span in recorded.spans if span.name == "worker"]
    sent_back = [sum(event.name == "retracted" for event in span.events) for span in workers]
    assert sent_back == [(span.attributes or {})["headroom.retractions"] for span in workers]
    assert sum(sent_back) > 0
    assert {span.name for span in recorded.spans} >= {"POST /v1/completions", "text_completion fake-model"}


def test_who_is_not_sampled_leaves_nothing_at_all(folder: Path) -> None:
    recorded = Recorded()
    ask(folder, recorded, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert not recorded.spans
    never = Recorded(ratio=0.0)
    ask(folder, never)
    assert not never.spans


def test_a_client_that_is_not_sampled_outweighs_a_root_that_serve_began(folder: Path) -> None:
    recorded = Recorded()
    with recorded.tracer.start_as_current_span("replica_handle_request Router __call__"):
        ask(folder, recorded, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert [span.name for span in recorded.spans] == ["replica_handle_request Router __call__"]


def test_without_a_tracer_nothing_is_made_and_the_process_has_no_provider_of_ours(folder: Path) -> None:
    off = Tracing.of_process()
    assert not off.is_on
    with off.inside("x") as span, off.http("POST", CHAT, {}) as other:
        assert not span.is_recording()
        assert not other.is_recording()
    request = GenerateRequest("r", (1,))
    assert not off.answer("m", request).is_recording
    assert not off.worker(request).is_recording
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)


def test_what_is_off_costs_next_to_nothing() -> None:
    off, request = Tracing(), GenerateRequest("r", (1,))

    def once() -> None:
        answer = off.answer("m", request)
        with answer.queue():
            pass
        with answer.place("a", {}):
            pass
        answer.first_tokens(1)
        off.worker(request).ended(FinishReason.STOP, {})
        answer.ended("stop", 1, 0)

    once()
    began_s = time.process_time()
    for _ in range(1000):
        once()
    assert (time.process_time() - began_s) / 1000 < 100e-6, "a request's, of processor time"


def test_serves_spans_of_the_background_and_of_no_caller_are_dropped() -> None:
    for name in ("route_to_replica Worker trunk", "replica_handle_request Router report"):
        assert is_background(name, True)
        assert is_background(name, False)
    for name in ("replica_handle_request Worker generate", "route_to_replica Worker-a b generate"):
        assert is_background(name, False)
        assert not is_background(name, True)
    for name in ("proxy_http_request GET", "trunk", "replica_handle_request Router __call__", "worker"):
        assert not is_background(name, False)
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(WithoutBackground(SimpleSpanProcessor(memory)))
    tracer = provider.get_tracer("test")
    for name in ("replica_handle_request Router report", "replica_handle_request Router __call__"):
        tracer.start_span(name).end()
    assert [span.name for span in memory.get_finished_spans()] == ["replica_handle_request Router __call__"]


def test_serve_gets_a_list_of_processors_without_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    [processor] = span_processors()
    processor.shutdown()
