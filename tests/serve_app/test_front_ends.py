"""Bodies in the shapes that the usual front ends send are answered, in the official client's types."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.helpers.tokenizers import JSON_TOOLS_TEMPLATE, MARKS, byte_tokenizer, scripted, write_model_folder
from tests.serve_app.in_process import running_cluster, sse_chunks

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
USED = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "open-webui chat": (CHAT, {
        "stream": True, "model": "m", "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "temperature": 0.7, "top_p": 0.9, "seed": None, "stop": None, "max_tokens": None, "frequency_penalty": None,
        "session_id": "s", "chat_id": "c", "id": "i", "features": {"web_search": False}, "background_tasks": {},
    }),
    "open-webui title": (CHAT, {
        "model": "m", "messages": [{"role": "user", "content": "### Task:\nGive a title."}], "stream": False,
        "max_completion_tokens": 1000, "metadata": {"task": "title_generation", "chat_id": "c"},
    }),
    "langchain invoke": (CHAT, {
        "messages": [{"content": "You help.", "role": "system"}, {"content": "Hi", "role": "user"}],
        "model": "m", "n": 1, "stream": False, "temperature": 0.0,
    }),
    "langchain tools": (CHAT, {
        "messages": [
            {"content": "Look it up", "role": "user"},
            {"content": None, "role": "assistant", "tool_calls": [USED]},
            {"content": "found", "role": "tool", "tool_call_id": "call_1"},
        ],
        "model": "m", "tools": [SEARCH], "parallel_tool_calls": False, "stream": True,
        "stream_options": {"include_usage": True},
    }),
    "llama-index chat": (CHAT, {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Summarise: ..."}]}],
        "model": "m", "stream": False, "temperature": 0.1, "max_tokens": 256, "tool_choice": None, "tools": None,
    }),
    "llama-index complete": (TEXT, {
        "prompt": "Context information is below.", "model": "m", "stream": True, "temperature": 0.1, "max_tokens": 256,
    }),
    "litellm": (CHAT, {
        "model": "m", "messages": [{"role": "user", "content": "hey"}], "user": "", "temperature": 1, "logit_bias": {},
        "presence_penalty": 0, "functions": None, "function_call": None, "response_format": None, "timeout": 600,
        "max_retries": 0, "extra_headers": None, "drop_params": True,
    }),
    "continue chat": (CHAT, {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Explain"}, {"type": "text", "text": "this"}]},
            {"role": "assistant", "content": "", "tool_calls": [{**USED, "index": 0}]},
            {"role": "tool", "content": "result", "tool_call_id": "call_1"},
        ],
        "model": "m", "max_tokens": 2048, "stream": True, "tools": [SEARCH], "parallel_tool_calls": False,
        "stop": ["<|im_end|>", "<|endoftext|>"], "prediction": None,
    }),
    "continue completion": (TEXT, {
        "prompt": "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>", "model": "m", "max_tokens": 256, "stream": True,
        "temperature": 0.01, "stop": ["<|fim_prefix|>", "\n\n"], "suffix": None, "presence_penalty": 0, "top_p": None,
    }),
    "newer chat": (CHAT, {
        "model": "m", "messages": [{"role": "developer", "content": "Short."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 50, "reasoning_effort": "low", "verbosity": "low", "store": False,
        "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "u", "modalities": ["text"],
        "web_search_options": None, "audio": None,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tools that answers at once."""
    return write_model_folder(
        tmp_path_factory.mktemp("m") / "model",
        script=scripted("An answer."),
        template=JSON_TOOLS_TEMPLATE,
        tokenizer=byte_tokenizer(MARKS),
    )


@pytest.mark.parametrize("name", BODIES)
def test_the_body_is_answered_in_the_clients_types(folder: Path, name: str) -> None:
    path, body = BODIES[name]

    async def run() -> str:
        async with running_cluster(folder) as cluster:
            response = await cluster.client.post(path, json={**body, "model": "fake-model"})
            assert response.status_code == 200, response.text
            return response.text

    text = asyncio.run(run())
    if not body.get("stream"):
        kind = ChatCompletion if path == CHAT else Completion
        assert kind.model_validate_json(text, strict=False).choices[0].finish_reason == "stop"
        return
    chunks = [json.loads(chunk) for chunk in sse_chunks(text)[:-1]]
    kind = ChatCompletionChunk if path == CHAT else Completion
    for chunk in chunks:
        # The completion type wants a reason in every chunk; the wire format has null until the last.
        if path == TEXT and chunk["choices"] and chunk["choices"][0]["finish_reason"] is None:
            chunk["choices"][0]["finish_reason"] = "stop"
        kind.model_validate(chunk)
    if body.get("stream_options"):
        assert chunks[-1]["usage"]["completion_tokens"] == len("An answer.") + 1
