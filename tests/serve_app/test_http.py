"""The HTTP surface over fake engines, without Ray: bodies, errors in OpenAI's shape, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.eventually import soon
from tests.helpers.tokenizers import byte_tokenizer, scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served, sse_chunks

USER = [{"role": "user", "content": "Say something."}]
ANSWER = "A zebra crosses the road."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that always answers ``ANSWER``."""
    return write_model_folder(tmp_path / "model", script=scripted(ANSWER))


def post(folder: Path, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    """One request to a fresh service."""

    async def use(cluster: Cluster) -> httpx.Response:
        return await cluster.client.post(path, json=body)

    response: httpx.Response = served(folder, use, **options)
    return response


def test_chat_answers_with_text_usage_and_reason(folder: Path) -> None:
    body = post(folder, {"model": "fake-model", "messages": USER}).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == ANSWER
    assert body["choices"][0]["finish_reason"] == "stop"
    prompt = "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(byte_tokenizer().encode(prompt).ids)
    num_answer = len(ANSWER) + 1  # and the end token
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["completion_tokens"] == num_answer
    assert body["usage"]["total_tokens"] == num_prompt + num_answer


def test_chat_stream_has_role_text_reason_usage_and_end(folder: Path) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = post(folder, {"model": "fake-model", "messages": USER, **options})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, end = sse_chunks(response.text)
    assert end == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in parsed}) == 1
    assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in parsed if c["choices"]) == ANSWER
    assert [c["choices"][0]["finish_reason"] for c in parsed if c["choices"]][-1] == "stop"
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert [chunk["usage"] for chunk in parsed[:-1]] == [None] * (len(parsed) - 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "now", "parameters": {}}]),
        ("function_call", "auto"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
    ],
)
def test_what_would_make_it_another_answer_is_refused(folder: Path, field: str, value: Any) -> None:
    response = post(folder, {"messages": USER, field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    neutral = {"functions": None, "function_call": "none", "modalities": ["text"]}
    assert post(folder, {"messages": USER, **neutral}).status_code == 200


def test_a_stream_without_usage_option_has_no_usage_chunk(folder: Path) -> None:
    response = post(folder, {"messages": USER, "stream": True})
    assert all(json.loads(chunk)["choices"] for chunk in sse_chunks(response.text)[:-1])


def test_max_tokens_ends_with_length(folder: Path) -> None:
    body = post(folder, {"messages": USER, "max_tokens": 7}).json()
    assert body["choices"][0]["message"]["content"] == ANSWER[:7]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 7


def test_max_completion_tokens_wins_over_its_old_name(folder: Path) -> None:
    body = post(folder, {"messages": USER, "max_tokens": 7, "max_completion_tokens": 3}).json()
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_tokens_is_cut_and_counted(folder: Path, stream: bool) -> None:
    options = {"stop": ["crosses", "never"], "stream": stream, "stream_options": {"include_usage": True}}
    response = post(folder, {"messages": USER, **options})
    if stream:
        chunks = [json.loads(chunk) for chunk in sse_chunks(response.text)[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        reason = chunks[-2]["choices"][0]["finish_reason"]
        usage = chunks[-1]["usage"]
    else:
        body = response.json()
        text = body["choices"][0]["message"]["content"]
        reason, usage = body["choices"][0]["finish_reason"], body["usage"]
    assert text == "A zebra "
    assert reason == "stop"
    assert usage["completion_tokens"] == len("A zebra crosses")


def test_a_character_over_tokens_comes_whole(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted("né 漢 👩‍👩‍👧 ok"))
    response = post(folder, {"messages": USER, "stream": True})
    chunks = [json.loads(chunk) for chunk in sse_chunks(response.text)[:-1]]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "né 漢 👩‍👩‍👧 ok"
    assert not any("\ufffd" in text for text in texts)


def test_completions_take_text_and_ids(folder: Path) -> None:
    by_text = post(folder, {"prompt": "abc"}, "/v1/completions").json()
    assert by_text["object"] == "text_completion"
    assert by_text["choices"][0] == {
        "index": 0,
        "text": ANSWER[:16],
        "logprobs": None,
        "finish_reason": "length",
    }
    assert by_text["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    by_ids = post(folder, {"prompt": [97, 98, 99]}, "/v1/completions").json()
    assert by_ids["choices"] == by_text["choices"]


def test_several_prompts_and_choices_have_their_indices(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script={"output": "echo", "tokens_per_s": 200.0})
    body = post(folder, {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 4}, "/v1/completions").json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "abab"),
        (1, "abab"),
        (2, "xyzx"),
        (3, "xyzx"),
    ]
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["prompt_tokens"] == 5


def test_choices_of_one_seed_differ_and_repeat(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script={"output": "random"})
    request = {"prompt": "ab", "n": 3, "seed": 7, "max_tokens": 12}
    first = [c["text"] for c in post(folder, request, "/v1/completions").json()["choices"]]
    again = [c["text"] for c in post(folder, request, "/v1/completions").json()["choices"]]
    other = [c["text"] for c in post(folder, {**request, "seed": 70}, "/v1/completions").json()["choices"]]
    assert len(set(first)) == 3
    assert first == again
    assert not set(first) & set(other)


def test_a_streamed_request_of_several_choices_brings_all(folder: Path) -> None:
    response = post(folder, {"messages": USER, "stream": True, "n": 3})
    texts = {0: "", 1: "", 2: ""}
    reasons = {}
    for chunk in sse_chunks(response.text)[:-1]:
        choice = json.loads(chunk)["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == dict.fromkeys(range(3), ANSWER)
    assert reasons == dict.fromkeys(range(3), "stop")


def test_logprobs_have_one_entry_per_token_of_text(folder: Path) -> None:
    chat = post(folder, {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == ANSWER[:5]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in ANSWER[:5].encode()]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    plain = post(folder, {"prompt": "ab", "logprobs": 1, "max_tokens": 5}, "/v1/completions").json()
    logprobs = plain["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(ANSWER[:5])
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 5


@pytest.mark.parametrize("stop", [None, ["€c"]])
def test_offsets_count_characters_and_not_their_parts(tmp_path: Path, stop: list[str] | None) -> None:
    folder = write_model_folder(tmp_path / "model", script=scripted("a€b€d"), tokenizer=byte_tokenizer())
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 9, "stop": stop}
    logprobs = post(folder, body, "/v1/completions").json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:5] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3, 3, 3, 4]
    assert all(len(top) >= 2 for top in logprobs["top_logprobs"])
    streamed = post(folder, {**body, "stream": True}, "/v1/completions").text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    offsets = [n for chunk in chunks for n in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER, "temperature": "warm"}, "temperature"),
        ({"messages": USER, "temperature": 99}, "temperature"),
        ({"messages": USER, "top_p": 0}, "top_p"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_tokens": 2**63}, "max_tokens"),
        ({"messages": USER, "top_k": 2**63}, "top_k"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "n": 1000}, "n"),
        ({"messages": USER, "seed": 2**64}, "seed"),
        ({"messages": USER, "stop": [""]}, "stop"),
        ({"messages": USER, "priority": 3}, "priority"),
        ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": USER, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"messages": USER, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": USER, "logit_bias": {"1": 101}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({}, "messages"),
    ],
)
def test_a_malformed_field_is_named(folder: Path, body: dict[str, Any], param: str) -> None:
    response = post(folder, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_parts_that_are_no_text_are_named(folder: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    response = post(
        folder, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content.1"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}'])
def test_a_body_that_is_no_json_object_is_a_400(folder: Path, raw: bytes) -> None:
    async def use(cluster: Cluster) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await cluster.client.post("/v1/chat/completions", content=raw, headers=headers)

    response = served(folder, use)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_says_what_was_cached(tmp_path: Path, stream: bool) -> None:
    script = scripted(ANSWER, prefix_blocks=16, tokens_per_s=500.0)
    folder = write_model_folder(tmp_path / "cached", script=script, max_model_len=1024)
    body = {"model": "fake-model", "prompt": "x" * 300, "max_tokens": 20, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}

    async def use(cluster: Cluster) -> list[int]:
        found = []
        for stop in ([], [], ["zebra"]):
            answer = await cluster.client.post("/v1/completions", json={**body, **options, "stop": stop})
            said = json.loads(sse_chunks(answer.text)[-2]) if stream else answer.json()
            found.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert served(folder, use) == [0, 256, 256]


def test_a_body_without_the_header_of_json_is_told_which(folder: Path) -> None:
    async def use(cluster: Cluster) -> httpx.Response:
        # As curl -d sends it.
        headers = {"content-type": "application/x-www-form-urlencoded"}
        return await cluster.client.post(
            "/v1/chat/completions", content=b'{"model": "demo"}', headers=headers
        )

    response = served(folder, use)
    assert response.status_code == 400
    assert "header Content-Type: application/json" in response.json()["error"]["message"]


def test_an_unknown_model_is_a_404_that_lists_the_known(folder: Path) -> None:
    response = post(folder, {"model": "other", "messages": USER})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "fake-model" in error["message"]


def test_a_path_that_is_not_there_answers_in_the_same_shape(folder: Path) -> None:
    response = post(folder, {}, "/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_a_prompt_that_is_too_long_names_both_numbers(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted(ANSWER), max_model_len=64)
    limited = post(folder, {"prompt": "x" * 60, "max_tokens": 10}, "/v1/completions")
    assert limited.status_code == 400
    error = limited.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "70" in error["message"]
    assert "64" in error["message"]
    unlimited = post(folder, {"messages": [{"role": "user", "content": "x" * 80}]})
    assert unlimited.status_code == 400
    assert "64" in unlimited.json()["error"]["message"]


def test_an_answer_without_a_limit_may_fill_what_the_arena_holds(tmp_path: Path) -> None:
    script = {"output": "echo", "bytes_per_token": 1000, "arena_bytes": 40_000}
    folder = write_model_folder(tmp_path / "m", script=script)
    body = post(folder, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}).json()
    assert body["usage"]["total_tokens"] == 40
    assert body["choices"][0]["finish_reason"] == "length"


def test_null_fields_and_parts_are_accepted(folder: Path) -> None:
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "seed",
        "logit_bias",
        "stream",
        "user",
        "logprobs",
    ]
    fields += [
        "top_logprobs",
        "stream_options",
        "presence_penalty",
        "frequency_penalty",
        "metadata",
        "cache_salt",
    ]
    content = [{"type": "text", "text": "Say "}, {"type": "text", "text": "something."}]
    messages = [{"role": "user", "content": content, "name": None, "tool_calls": None}]
    body = post(folder, {"messages": messages, **dict.fromkeys(fields)}).json()
    assert body["choices"][0]["message"]["content"] == ANSWER
    plain = post(folder, {"messages": USER}).json()
    assert body["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_fields_without_a_meaning_are_listed_in_the_answer(folder: Path) -> None:
    response = post(folder, {"messages": USER, "mirostat": 2, "keep_alive": "5m"})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "keep_alive, mirostat"


def test_models_health_and_metrics(folder: Path) -> None:
    async def use(cluster: Cluster) -> None:
        get = cluster.client.get
        await cluster.client.post("/v1/chat/completions", json={"messages": USER})
        listed = (await get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["fake-model"]
        assert (await get("/v1/models/fake-model")).json()["id"] == "fake-model"
        assert (await get("/v1/models/none")).status_code == 404
        assert (await get("/health")).status_code == 200
        assert (await get("/ready")).status_code == 200

        async def page_now() -> str:
            return str((await get("/metrics")).text)

        # What is said of a worker is what it reported last.
        tokens = f'headroom_generated_tokens_total{{model="fake-model",router="router0"}} {len(ANSWER) + 1}.0'
        idle = 'headroom_worker_running{model="fake-model",replica="replica0"} 0.0'
        page = await soon(page_now, lambda page: tokens in page and idle in page)
        assert 'headroom_requests_total{model="fake-model",outcome="stop",router="router0"} 1.0' in page
        assert "headroom_time_to_first_token_seconds_bucket" in page

    served(folder, use)


def test_not_ready_before_a_worker_has_reported(folder: Path) -> None:
    async def use(cluster: Cluster) -> None:
        assert (await cluster.client.get("/ready")).status_code == 503
        assert (await cluster.client.get("/health")).status_code == 200
        late = await cluster.client.post("/v1/chat/completions", json={"messages": USER})
        assert late.status_code == 429
        assert int(late.headers["retry-after"]) >= 1

    served(folder, use, report=False, queue_timeout_s=0.2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_first_tokens_leave_is_a_503(tmp_path: Path, stream: bool) -> None:
    # Not streamed, nothing leaves before the end.
    folder = write_model_folder(tmp_path / "m", script={**scripted(ANSWER), "die_after_tokens": 3})

    async def use(cluster: Cluster) -> None:
        body = {"messages": USER, "stream": stream}
        if stream:
            cluster.replicas["replica0"].engine._counters.generated_tokens = 3
        answer = await cluster.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "worker_failed"

    served(folder, use)


def test_an_engine_that_dies_later_ends_the_stream_with_an_error_event(tmp_path: Path) -> None:
    script = {**scripted(ANSWER, tokens_per_s=20.0), "die_after_tokens": 3}
    folder = write_model_folder(tmp_path / "m", script=script)
    response = post(folder, {"messages": USER, "stream": True})
    assert response.status_code == 200
    *chunks, end = sse_chunks(response.text)
    assert end == "[DONE]"
    assert json.loads(chunks[-1])["error"]["code"] == "worker_failed"
    assert json.loads(chunks[0])["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_long_prompt_does_not_hold_up_the_event_loop(folder: Path, path: str) -> None:
    async def longest_share(cluster: Cluster) -> float:
        """The longest time that nothing else ran, as a share of the request's."""
        loop = asyncio.get_running_loop()
        asked = asyncio.create_task(cluster.client.post(path, json={"prompt": "a b " * 400_000}))
        started = last = loop.time()
        longest = 0.0
        while not asked.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, loop.time() - last), loop.time()
        assert (await asked).status_code == (400 if path == "/v1/completions" else 200)
        return longest / (last - started)

    async def use(cluster: Cluster) -> None:
        # Reading the body still takes the loop's time; tokenising is the bulk and must not. A machine that is busy
        # elsewhere can hold anything up once.
        for _ in range(3):
            if await longest_share(cluster) < 0.5:
                return
        raise AssertionError("the event loop was held up three times")

    served(folder, use)
