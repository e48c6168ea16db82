"""Tools, reasoning and structured output over the API, read back with the official client's typed helpers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.helpers.schemas import random_schema
from tests.helpers.tokenizers import (
    HARMONY_MARKS,
    HARMONY_TEMPLATE,
    JSON_TOOLS_TEMPLATE,
    MARKS,
    XML_TOOLS_TEMPLATE,
    byte_tokenizer,
    scripted,
    write_model_folder,
)
from tests.helpers.walk_engine import WalkEngine
from tests.serve_app.in_process import Cluster, served, sse_chunks
from worker.config import WorkerConfig

NUM_SCHEMAS = 500
USER = [{"role": "user", "content": "What is the weather?"}]
END = 258
FORMATS = {
    "chatml_json": (JSON_TOOLS_TEMPLATE, MARKS),
    "qwen3_xml": (XML_TOOLS_TEMPLATE, MARKS),
    "harmony": (HARMONY_TEMPLATE, HARMONY_MARKS),
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Looks.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "now"}},
]


def model_folder(path: Path, name: str, script: dict[str, object] | None = None) -> Path:
    """A folder whose template is of a format."""
    template, marks = FORMATS[name]
    return write_model_folder(
        path / name, script=script, template=template, tokenizer=byte_tokenizer(marks), max_model_len=16_384
    )


def walking(config: WorkerConfig, lead: str = "") -> WalkEngine:
    """Makes the engine that draws any allowed token."""
    return WalkEngine(Path(config.model), 300, END, lead, max_model_len=16_384)


def client_of(cluster: Cluster) -> openai.AsyncOpenAI:
    """The official client, wired to the application without a network."""
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=cluster.client, max_retries=0
    )


async def ask(cluster: Cluster, **body: Any) -> dict[str, Any]:
    response = await cluster.client.post("/v1/chat/completions", json={"messages": USER, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def test_500_random_schemas_and_prompts_all_validate(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "chatml_json")

    async def use(cluster: Cluster) -> None:
        async def one(seed: int) -> None:
            chance = Random(seed)
            schema = random_schema(chance)
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            prompt = [
                {"role": "user", "content": "".join(chance.choices("abc xyz漢", k=chance.randint(1, 40)))}
            ]
            body = {"messages": prompt, "response_format": wanted, "seed": seed, "max_tokens": 8000}
            if seed % 2:
                choice = await ask(cluster, **body)
                text, reason = choice["message"]["content"], choice["finish_reason"]
            else:
                response = await cluster.client.post("/v1/chat/completions", json={**body, "stream": True})
                choices = [json.loads(chunk)["choices"][0] for chunk in sse_chunks(response.text)[:-1]]
                text = "".join(choice["delta"].get("content", "") for choice in choices)
                reason = choices[-1]["finish_reason"]
            assert reason == "stop"
            jsonschema.validate(json.loads(text), schema)

        for start in range(0, NUM_SCHEMAS, 20):
            await asyncio.gather(*(one(seed) for seed in range(start, start + 20)))

    served(folder, use, make_engine=walking, max_running=1000)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_and_its_arguments_validate(tmp_path: Path, name: str, stream: bool) -> None:
    async def use(cluster: Cluster) -> None:
        for seed in range(10):
            body = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 4000}
            if stream:
                calls, reason = await streamed_calls(cluster, **body)
            else:
                choice = await ask(cluster, **body)
                message, reason = choice["message"], choice["finish_reason"]
                assert message["content"] is None
                calls = [
                    (c["id"], c["function"]["name"], c["function"]["arguments"])
                    for c in message["tool_calls"]
                ]
            assert reason == "tool_calls"
            assert len({call_id for call_id, _, _ in calls}) == len(calls) >= 1
            for _, function, arguments in calls:
                schema = PARAMETERS if function == "get_weather" else {"type": "object"}
                jsonschema.validate(json.loads(arguments), schema)

    served(model_folder(tmp_path, name), use, make_engine=walking)


async def streamed_calls(cluster: Cluster, **body: Any) -> tuple[list[tuple[str, str, str]], str | None]:
    """Calls of a streamed answer, put together from their pieces as the official client does it."""
    stream = await client_of(cluster).chat.completions.create(
        model="fake-model", messages=USER, stream=True, **body
    )
    calls: dict[int, tuple[str, str, str]] = {}
    reason = None
    async for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.function is not None
            call_id, name, arguments = calls.get(piece.index, ("", "", ""))
            calls[piece.index] = (
                call_id + (piece.id or ""),
                name + (piece.function.name or ""),
                arguments + (piece.function.arguments or ""),
            )
    return [calls[index] for index in sorted(calls)], reason


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_that_call_and_parallel_calls_can_be_forbidden(tmp_path: Path, name: str) -> None:
    choice = {"type": "function", "function": {"name": "now"}}

    async def use(cluster: Cluster) -> None:
        for seed in range(5):
            answer = await ask(
                cluster,
                tools=TOOLS,
                tool_choice=choice,
                seed=seed,
                max_tokens=4000,
                parallel_tool_calls=False,
            )
            assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["now"]

    served(model_folder(tmp_path, name), use, make_engine=walking)


def test_structure_begins_behind_the_reasoning(tmp_path: Path) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}

    async def use(cluster: Cluster) -> None:
        answer = await ask(cluster, response_format=wanted, enable_thinking=True, max_tokens=4000)
        assert answer["message"]["reasoning_content"] == "I wonder {"
        jsonschema.validate(json.loads(answer["message"]["content"]), PARAMETERS)

    served(model_folder(tmp_path, "chatml_json"), use, make_engine=partial(walking, lead="I wonder {"))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'


def test_free_answers_are_split_into_reasoning_text_and_calls(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "chatml_json", scripted(f"Hm.\n</think>\n\nI look.\n{CALL}"))

    async def use(cluster: Cluster) -> None:
        answer = await ask(cluster, tools=TOOLS, enable_thinking=True)
        message = answer["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["content"] == "I look."
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo", "days": 3}
        assert answer["finish_reason"] == "tool_calls"
        # Without tools, or with tool_choice none, the same text is text.
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await ask(cluster, enable_thinking=True, **body)
            assert answer["message"]["content"] == f"I look.\n{CALL}"
            assert answer["finish_reason"] == "stop"

    served(folder, use)


def test_a_conversation_with_calls_and_results_is_rendered(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "chatml_json", scripted("Rain."))
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]

    async def use(cluster: Cluster) -> None:
        answer = await ask(cluster, messages=turns, tools=TOOLS)
        assert answer["message"]["content"] == "Rain."
        for text in ("{", '{"a": ' + "[" * 100_000):
            bad = {**call, "function": {"name": "now", "arguments": text}}
            turns[1]["tool_calls"] = [bad]  # type: ignore[index]
            response = await cluster.client.post("/v1/chat/completions", json={"messages": turns})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"

    served(folder, use)


class Weather(BaseModel):
    """Asks for the weather."""

    city: str
    unit: Literal["c", "f"]


class Report(BaseModel):
    """An answer with a nested list."""

    title: str
    places: list[Weather]


def test_the_clients_typed_helpers_parse_answers_and_calls(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        chat = client_of(cluster).chat.completions
        parsed = await chat.parse(
            model="fake-model", messages=USER, response_format=Report, seed=3, max_tokens=8000
        )
        assert isinstance(parsed.choices[0].message.parsed, Report)
        tool = openai.pydantic_function_tool(Weather)
        called = await chat.parse(
            model="fake-model", messages=USER, tools=[tool], tool_choice="required", seed=4, max_tokens=8000
        )
        calls = called.choices[0].message.tool_calls
        assert calls
        assert isinstance(calls[0].function.parsed_arguments, Weather)
        events = []
        async with chat.stream(
            model="fake-model", messages=USER, response_format=Report, seed=5, max_tokens=8000
        ) as stream:
            async for event in stream:
                events.append(event.type)
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Report)
        assert {"chunk", "content.delta", "content.done"} <= set(events)

    served(model_folder(tmp_path, "chatml_json"), use, make_engine=walking)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools.0.function.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
    ],
)
def test_what_cannot_be_done_names_its_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async def use(cluster: Cluster) -> httpx.Response:
        return await cluster.client.post("/v1/chat/completions", json={"messages": USER, **body})

    response = served(model_folder(tmp_path, "chatml_json"), use, make_engine=walking)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_model_whose_template_knows_no_tools_says_so(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "plain", script=scripted("x"))

    async def use(cluster: Cluster) -> httpx.Response:
        return await cluster.client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})

    response = served(folder, use)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
