"""The whole way with real weights: the demo model on the native engine, asked with the official client's helpers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import openai
from pydantic import BaseModel

from tests.serve_app.in_process import Cluster, running_cluster
from tests.serve_app.test_tools import client_of
from worker.api import Engine
from worker.config import WorkerConfig
from worker.engines import ENGINES

FOLDER = Path(__file__).resolve().parents[2] / "demo" / "model"
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str


class Sum(BaseModel):
    """A sum and its result."""

    left: int
    right: int
    result: int


def native(config: WorkerConfig) -> Engine:
    """The native engine on the CPU."""
    engine: Engine = ENGINES.load("native")(
        replace(
            config, engine="native", device="cpu", arena_bytes=64 << 20, max_model_len=2048, num_threads=1
        )
    )
    return engine


async def use_helpers(cluster: Cluster) -> None:
    """Streaming, reasoning, tools, parsing, and the same request twice."""
    chat = client_of(cluster).chat.completions
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather", description="Weather of a city")
    common = {"model": "fake-model", "temperature": 0, "max_tokens": 200}

    async with chat.stream(messages=WEATHER, tools=[tool], **common) as stream:
        kinds = {event.type async for event in stream}
        called = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert called.choices[0].finish_reason == "tool_calls"
    calls = called.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, GetWeather)
    assert "Paris" in calls[0].function.parsed_arguments.city

    sums = [{"role": "user", "content": "What is 12 + 30?"}]
    parsed = await chat.parse(messages=sums, response_format=Sum, **common)
    assert isinstance(parsed.choices[0].message.parsed, Sum)

    thoughtful = await chat.create(messages=sums, extra_body={"enable_thinking": True}, **common)
    message = thoughtful.choices[0].message.model_dump()
    assert message["reasoning_content"]
    assert "<think>" not in json.dumps(message)
    assert thoughtful.usage is not None
    details = thoughtful.usage.completion_tokens_details
    assert details is not None
    assert 0 < (details.reasoning_tokens or 0) < thoughtful.usage.completion_tokens

    seeded = [await chat.create(messages=sums, seed=3, **{**common, "temperature": 1.0}) for _ in range(2)]
    assert len({answer.choices[0].message.content for answer in seeded}) == 1

    response = await client_of(cluster).responses.create(
        model="fake-model", input="Hello, who are you?", temperature=0, max_output_tokens=60
    )
    assert response.output_text.strip()


def test_the_clients_helpers_work_on_the_demo_model() -> None:
    async def run() -> None:
        async with running_cluster(FOLDER, make_engine=native) as cluster:
            await use_helpers(cluster)
            assert await cluster.settle() == 0

    asyncio.run(run())
