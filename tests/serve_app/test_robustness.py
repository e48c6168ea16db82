"""Nothing that a client can send makes a 5xx or a hang, and the OpenAPI document tells the truth about it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
import uvicorn
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serve_app.http.access import AccessRules
from serve_app.http.routes import create_app
from tests.helpers.eventually import PATIENCE_S, ends, eventually
from tests.helpers.tokenizers import JSON_TOOLS_TEMPLATE, MARKS, byte_tokenizer, scripted, write_model_folder
from tests.serve_app.in_process import running_cluster

USER = [{"role": "user", "content": "hi"}]
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
NUM_MUTATIONS = 1500
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "fake-model",
        "messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]}, {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c"}],
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 3, "stop": ["x"], "seed": 1, "n": 2,
        "logit_bias": {"5": -1}, "logprobs": True, "top_logprobs": 2, "stream": False, "user": "u",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {"prompt": ["ab", "cd"], "max_tokens": 2, "logprobs": 1, "echo": False, "best_of": 1},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                  {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "y"}],
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "max_output_tokens": 2,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
    },
    "/tokenize": {"messages": USER, "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**70, 1e308, -0.0, "", "\x00", "\ud800", "a" * 5000, [], [[]], [None], {},
    {"": {}},
    {"a": {"b": {"c": []}}}, "0", "NaN", [1, "a"], {"type": "text"}, {"type": "x", "text": 1}, [{"role": "user"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tools that answers at once."""
    return write_model_folder(
        tmp_path_factory.mktemp("m") / "model",
        script=scripted("ok"),
        template=JSON_TOOLS_TEMPLATE,
        tokenizer=byte_tokenizer(MARKS),
        max_model_len=512,  # bounds the work of requests that ask for all there is
    )


def wait_until_it_answers(url: str) -> None:
    """Returns once somebody answers there."""

    def answers() -> bool:
        try:
            return httpx.get(url + "/health", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The service on a port of its own, in a thread with its own event loop."""
    listening = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    async def run() -> None:
        async with running_cluster(folder, max_running=64, max_queue=1000) as cluster:
            app = create_app(cluster.backend, AccessRules())
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            await asyncio.to_thread(stop.wait)
            server.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    wait_until_it_answers(url)
    yield url
    stop.set()
    thread.join(PATIENCE_S)


def test_every_operation_of_the_document_keeps_its_word(url: str) -> None:
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()
        tried.append(operation.path)

        @hypothesis.settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(
            case=hypothesis.strategies.one_of(
                operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
                operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
            )
            if operation.body
            else operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        )
        def attempt(case: Any) -> None:
            case.call_and_validate(base_url=url, checks=checks, timeout=60)

        attempt()
    assert set(ROUTES) < set(tried)


def mutate(body: Any, chance: Random) -> Any:
    """The body with one thing replaced, removed, added or repeated, at any depth."""
    if isinstance(body, dict) and body and chance.random() < 0.8:
        name = chance.choice(sorted(body))
        changed = dict(body)
        kind = chance.random()
        if kind < 0.5:
            changed[name] = mutate(body[name], chance)
        elif kind < 0.6:
            del changed[name]
        elif kind < 0.7:
            changed[name + "x"] = chance.choice(ODD)
        else:
            changed[name] = chance.choice(ODD)
        return changed
    if isinstance(body, list) and body and chance.random() < 0.8:
        place = chance.randrange(len(body))
        return [*body[:place], mutate(body[place], chance), *body[place + (chance.random() < 0.7) :]]
    return chance.choice(ODD)


def test_a_corpus_of_malformed_bodies_brings_no_5xx_and_no_hang(folder: Path) -> None:
    chance = Random(3)

    async def run() -> dict[int, int]:
        codes: dict[int, int] = {}
        async with running_cluster(folder, max_running=64, max_queue=1000) as cluster:
            for index in range(NUM_MUTATIONS):
                path = ROUTES[index % len(ROUTES)]
                body = mutate(VALID[path], chance)
                content = json.dumps(body, ensure_ascii=True).encode()
                if index % 50 == 0:
                    content = content[: chance.randrange(len(content) + 1)]
                post = cluster.client.post(
                    path, content=content, headers={"content-type": "application/json"}
                )
                response = await ends(post)
                codes[response.status_code] = codes.get(response.status_code, 0) + 1
                assert response.status_code < 500, (path, body, response.text)
                if response.status_code >= 400:
                    assert response.json()["error"]["message"]
            assert await cluster.settle() == 0
        return codes

    codes = asyncio.run(run())
    assert codes[200] > 100, "the corpus is not all nonsense"
    assert codes[400] > 100, "nor all sense"


def test_every_valid_body_of_the_corpus_is_answered(folder: Path) -> None:
    async def run() -> None:
        async with running_cluster(folder) as cluster:
            for path, body in VALID.items():
                response = await cluster.client.post(path, json=body)
                assert response.status_code == 200, (path, response.text)

    asyncio.run(run())


@pytest.mark.parametrize("depth", [100, 500, 900, 990, 5_000, 200_000])
def test_deep_nesting_is_refused_and_not_an_error(folder: Path, depth: int) -> None:
    bodies = [
        b'{"messages": ' + b"[" * depth + b"]" * depth + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "metadata": '
        + b'{"a":' * depth
        + b"1"
        + b"}" * depth
        + b"}",
        b'{"input": "x", "text": {"format": {"type": "json_schema", "schema": '
        + b'{"items":' * depth
        + b"{}"
        + b"}" * depth
        + b"}}}",
    ]
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    function = b'"function": {"name": "f", "%s": %s}'
    as_text = json.dumps(deep.decode()).encode()
    bodies += [
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": %s}' % deep,
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", %s}]}'
        % (function % (b"parameters", deep)),
        *(
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "c", %s}]}]}'
            % (function % (b"arguments", arguments))
            for arguments in (deep, as_text)
        ),
    ]

    async def run() -> None:
        async with running_cluster(folder) as cluster:
            chat = ROUTES[:1]
            for path, body in zip([*chat, *chat, "/v1/responses", *chat * 4], bodies, strict=True):
                headers = {"content-type": "application/json"}
                response = await cluster.client.post(path, content=body, headers=headers)
                assert response.status_code in (200, 400), response.text[:300]

    asyncio.run(run())


def test_half_a_surrogate_pair_in_the_text_of_arguments_is_refused(folder: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]

    async def run() -> None:
        async with running_cluster(folder) as cluster:
            response = await cluster.client.post(ROUTES[0], json={"messages": messages})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"

    asyncio.run(run())
