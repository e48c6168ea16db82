"""The responses API with the official client, and the two tokenizer endpoints."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.helpers.eventually import soon
from tests.helpers.tokenizers import byte_tokenizer, scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served, sse_chunks
from tests.serve_app.test_tools import CALL, client_of, model_folder, walking

ANSWER = "A zebra crosses."


def test_text_in_text_out(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        answer = await client_of(cluster).responses.create(
            model="fake-model", input="Hello", instructions="Be brief.", temperature=0, metadata={"a": "b"}
        )
        assert answer.output_text == ANSWER
        assert (answer.status, answer.object) == ("completed", "response")
        assert answer.usage is not None
        assert answer.usage.output_tokens == len(ANSWER) + 1
        assert answer.metadata == {"a": "b"}
        cut = await client_of(cluster).responses.create(
            model="fake-model", input="Hello", max_output_tokens=3
        )
        assert (cut.output_text, cut.status) == (ANSWER[:3], "incomplete")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"

    served(write_model_folder(tmp_path / "m", script=scripted(ANSWER)), use)


def test_a_streamed_response_with_reasoning_text_and_a_call(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "chatml_json", scripted(f"Hm.\n</think>\n\nI look.\n{CALL}"))
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}

    async def use(cluster: Cluster) -> None:
        stream = await client_of(cluster).responses.create(
            model="fake-model", input="Hi", tools=[tool], reasoning={"effort": "low"}, stream=True
        )
        events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = events[-1].response
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[0].content[0].text == "Hm."
        assert final.output_text == "I look."
        assert final.usage.output_tokens_details.reasoning_tokens == len("Hm.")
        assert json.loads(final.output[2].arguments) == {"city": "Oslo", "days": 3}
        for kind, whole in (
            ("response.reasoning_text.delta", "Hm."),
            ("response.output_text.delta", "I look."),
            ("response.function_call_arguments.delta", final.output[2].arguments),
        ):
            assert "".join(event.delta for event in events if event.type == kind) == whole
        # The call's result goes back with everything that was said before.
        back = [
            {"role": "user", "content": "Hi"},
            *(item.model_dump(exclude_none=True) for item in final.output),
            {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "rain"},
        ]
        again = await client_of(cluster).responses.create(model="fake-model", input=back, tools=[tool])
        assert again.status == "completed"

    served(folder, use)


class Answer(BaseModel):
    """What is to be parsed."""

    title: str
    scores: list[int]


def test_the_clients_parse_helper_gets_its_type(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        parsed = await client_of(cluster).responses.parse(model="fake-model", input="x", text_format=Answer)
        assert isinstance(parsed.output_parsed, Answer)

    served(model_folder(tmp_path, "chatml_json"), use, make_engine=partial(walking))


def test_an_engine_that_dies_ends_a_response_as_failed(tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path / "m", script={**scripted(ANSWER, tokens_per_s=20.0), "die_after_tokens": 5}
    )

    async def use(cluster: Cluster) -> None:
        # Once it says that it is dead, requests wait for its replacement: it does not come to say so here.
        await soon(cluster.dispatcher.live_reports)
        cluster.reporting.clear()
        response = await cluster.client.post("/v1/responses", json={"input": "x", "stream": True})
        blocks = [block for block in response.text.split("\n\n") if block]
        last = json.loads(blocks[-1].split("data: ")[1])
        assert blocks[-1].startswith("event: response.failed\n")
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["message"]
        assert (await cluster.client.post("/v1/responses", json={"input": "x"})).status_code == 503

    served(folder, use)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools.0.function.name"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_done_names_its_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async def use(cluster: Cluster) -> None:
        response = await cluster.client.post("/v1/responses", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param

    served(write_model_folder(tmp_path / "m", script=scripted(ANSWER)), use)


def test_a_clients_error_class_fits(tmp_path: Path) -> None:
    async def use(cluster: Cluster) -> None:
        with pytest.raises(openai.NotFoundError):
            await client_of(cluster).responses.create(model="other", input="x")

    served(write_model_folder(tmp_path / "m", script=scripted(ANSWER)), use)


def test_tokenize_and_detokenize_are_each_others_inverse(tmp_path: Path) -> None:
    text = "né 漢 <|im_end|>!"

    async def use(cluster: Cluster) -> None:
        post = cluster.client.post
        found = (await post("/tokenize", json={"prompt": text})).json()
        assert found == {"count": 10, "max_model_len": 4096, "tokens": byte_tokenizer().encode(text).ids}
        back = (await post("/detokenize", json={"tokens": found["tokens"]})).json()
        assert back == {"prompt": "né 漢 !"}
        messages = [{"role": "user", "content": "a"}]
        chat = (await post("/tokenize", json={"messages": messages})).json()
        usage = (await post("/v1/chat/completions", json={"messages": messages})).json()["usage"]
        assert chat["count"] == usage["prompt_tokens"]
        for bad in ({}, {"prompt": "x", "messages": messages}):
            assert (await post("/tokenize", json=bad)).status_code == 400
        refused = await post("/detokenize", json={"tokens": [5, 10_000]})
        assert refused.json()["error"]["param"] == "tokens.1"
        assert not sse_chunks(refused.text)

    served(write_model_folder(tmp_path / "m", script=scripted(ANSWER)), use)
