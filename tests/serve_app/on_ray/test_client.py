"""The official client against real Ray Serve: sync, async, errors; and the other transport in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.drills.figures import by_router
from serve_app.http.api_keys import new_key
from serve_app.telemetry.spans import is_background
from tests.helpers.collector import branches, collecting
from tests.helpers.eventually import eventually
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.conftest import Deploy, ServedApp

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MESSAGES = [{"role": "user", "content": "hello"}]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def small(deploy_module: Deploy, tmp_path_factory: pytest.TempPathFactory) -> ServedApp:
    """One worker with a batch of one and a queue of two."""
    folder = write_model_folder(
        tmp_path_factory.mktemp("m") / "small", script=scripted("Yes.", tokens_per_s=20.0), max_model_len=3000
    )
    options = {"max_running": 1, "worker_backlog": 0, "max_queue": 2}
    return deploy_module("small", model=str(folder), **options)


@pytest.fixture(scope="module")
def client(small: ServedApp) -> openai.OpenAI:
    """A client without retries."""
    return openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0)


def test_sync_chat_completion_and_model_list(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=MESSAGES, seed=1, temperature=0)
    assert answer.choices[0].message.content == "Yes."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    plain = client.completions.create(model="small", prompt="ab", max_tokens=2)
    assert plain.choices[0].text == "Ye"
    assert [model.id for model in client.models.list()] == ["small"]


def test_async_chat_completion(small: ServedApp) -> None:
    async def run() -> str | None:
        async with openai.AsyncOpenAI(base_url=small.url + "/v1", api_key="none") as client:
            answer = await client.chat.completions.create(model="small", messages=MESSAGES)
            return answer.choices[0].message.content

    assert asyncio.run(run()) == "Yes."


def test_errors_have_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as malformed:
        client.chat.completions.create(model="small", messages=MESSAGES, temperature=99)
    assert malformed.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="3000") as long:
        client.completions.create(model="small", prompt="x" * 4000)
    assert long.value.code == "context_length_exceeded"


def test_past_the_queue_the_clients_see_rate_limits(small: ServedApp) -> None:
    async def run() -> list[object]:
        async with openai.AsyncOpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            endless = {"ignore_eos": True, "max_tokens": 2000}
            holding = await create(model="small", messages=MESSAGES, stream=True, extra_body=endless)
            await anext(aiter(holding))
            asked = [asyncio.create_task(create(model="small", messages=MESSAGES)) for _ in range(8)]
            # One runs; of the others two may wait until it leaves.
            async with asyncio.timeout(30):
                while sum(task.done() for task in asked) < 6:
                    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
            await holding.close()
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(run())
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(refused) == 6, answers
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    served = [answer for answer in answers if answer not in refused]
    assert [answer.choices[0].message.content for answer in served] == ["Yes.", "Yes."]  # type: ignore[attr-defined]


def test_health_readiness_and_metrics_over_serve(small: ServedApp, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="small", messages=MESSAGES)
    assert httpx.get(small.url + "/health", timeout=20).status_code == 200
    assert httpx.get(small.url + "/ready", timeout=20).status_code == 200
    page = httpx.get(small.url + "/metrics", timeout=20).text
    assert set(by_router(page, "headroom_workers").values()) == {1}
    stopped = re.findall(r'headroom_requests_total\{model="small",outcome="stop",router="\w+"\} (\S+)', page)
    assert sum(map(float, stopped)) >= 1


def test_an_engine_that_dies_is_replaced(deploy: Deploy, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script={**scripted("abcdef"), "die_after_tokens": 10})
    app = deploy("mortal", model=str(folder))
    client = openai.OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0)
    create = client.chat.completions.create
    assert create(model="m", messages=MESSAGES).choices[0].message.content == "abcdef"
    with pytest.raises(openai.InternalServerError) as failed:
        create(model="m", messages=MESSAGES)
    assert failed.value.status_code == 503
    # The health check finds it dead and Serve starts another; until then requests wait or are told to come again.
    patient = openai.OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=60, timeout=60)
    assert (
        patient.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content == "abcdef"
    )


def test_several_models_answer_by_name_to_those_who_have_a_key(deploy: Deploy, tmp_path: Path) -> None:
    for name in ("left", "right/2"):
        write_model_folder(tmp_path / name, script=scripted(f"I am {name}."))
    models = {name: {"model": str(tmp_path / name)} for name in ("left", "right/2")}
    (tmp_path / "models.json").write_text(json.dumps(models))
    key, entry = new_key("tester")
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    files = {"models_file": str(tmp_path / "models.json"), "api_keys_file": str(tmp_path / "keys.json")}
    app = deploy("several", **files)
    client = openai.OpenAI(base_url=app.url + "/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=app.url + "/v1", api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in client.models.list()] == ["left", "right/2"]
    for name in models:
        answer = client.chat.completions.create(model=name, messages=MESSAGES)
        assert answer.choices[0].message.content == f"I am {name}."
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="left, right/2"):
        client.chat.completions.create(model="middle", messages=MESSAGES)


def test_a_redeployment_lets_running_streams_end(deploy: Deploy, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted("z" * 100, tokens_per_s=20.0))
    options = {"model": str(folder), "graceful_shutdown_timeout_s": 120.0}
    app = deploy("moved", **options)
    old = app.worker_pids()
    client = openai.OpenAI(base_url=app.url + "/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    text = next(iter(stream)).choices[0].delta.content or ""
    deploy("moved", **options, max_queue=3, max_running=5)
    assert not set(app.worker_pids()) <= set(old), "there is a new worker"
    assert client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=2).choices
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "z" * 100
    # Nothing that the Router keeps open holds the old worker up until its time (two minutes) is over.
    eventually(app.worker_pids, lambda pids: not set(old) & set(pids), within_s=60.0, pause_s=0.1)


TREE = (
    "replica_handle_request Router __call__",
    "POST /v1/chat/completions",
    "chat fox",
    "place",
    "route_to_replica Worker generate",
    "replica_handle_request Worker generate",
    "worker",
    "decode",
)
"""Serve's spans and ours, one in the other, of a request over HAProxy."""


@pytest.mark.timeout(500)
def test_the_streaming_tests_pass_over_haproxy_too_traced_from_end_to_end() -> None:
    # Serve reads these when it is imported, so the other transport needs a process of its own.
    with collecting() as collector:
        environment = {
            **os.environ,
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "serve_app.telemetry.spans:span_processors",
            "RAY_SERVE_TRACING_SAMPLING_RATIO": "1.0",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command.append("tests/serve_app/on_ray/test_streaming.py")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "5 passed" in done.stdout
    spans = collector.spans()
    assert TREE in branches(spans)
    assert not [span.name for span in spans if is_background(span.name, bool(span.parent_span_id))]
    pushed = collector.metrics()
    assert set(pushed) == {"router", "worker"}
    assert "headroom.inter_token_latency" in pushed["router"]
    assert "headroom.worker.generated_tokens" in pushed["worker"] - pushed["router"]
