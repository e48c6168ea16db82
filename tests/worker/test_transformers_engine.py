"""The oracle engine against the library it wraps, on tiny random models."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from demo.tiny import FAMILIES
from tests.helpers.tiny import tiny_folder
from worker.api import FinishReason, GenerateRequest, Grammar, SamplingParams, TokenEvent
from worker.config import WorkerConfig
from worker.engines.transformers import TransformersEngine
from worker.errors import ConfigError, InvalidRequest, ModelLoadError
from worker.models.transformers_window import apply_attention_windows

PROMPT = tuple(20 + (7 * step) % 200 for step in range(40))


def opened(folder: Path, **options: Any) -> closing[TransformersEngine]:
    return closing(TransformersEngine(WorkerConfig(**{"model": str(folder), "device": "cpu", **options})))


def answer(engine: TransformersEngine, **sampling: Any) -> TokenEvent:
    async def read() -> TokenEvent:
        engine.submit(GenerateRequest("a", PROMPT, SamplingParams(**sampling)))
        merged = TokenEvent("a")
        async for event in engine.stream("a"):
            merged = merged.merged_with(event)
        return merged

    return asyncio.run(read())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_a_full_recomputation(family: str) -> None:
    with opened(tiny_folder(family)) as engine:
        event = answer(engine, max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.float32).eval()
    tokens = torch.tensor([[*PROMPT, *event.token_ids]])
    with torch.inference_mode():
        logprobs = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    for position, entry in enumerate(event.logprobs, start=len(PROMPT) - 1):
        assert int(logprobs[position].argmax()) == entry.token_id
        assert entry.logprob == pytest.approx(float(logprobs[position, entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == logprobs[position].topk(2).indices.tolist()


def test_windowed_layers_see_their_window_and_no_more() -> None:
    folder = tiny_folder("qwen3_5_moe", window=16)
    with opened(folder) as engine:
        event = answer(engine, max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([[*PROMPT, *event.token_ids]])
    with torch.inference_mode():
        stock = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    apply_attention_windows(model)
    with torch.inference_mode():
        windowed = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    places = range(len(PROMPT) - 1, len(PROMPT) + 19)
    got = torch.tensor([entry.logprob for entry in event.logprobs])
    for logprobs, alike in ((windowed, True), (stock, False)):
        expected = torch.stack([logprobs[p, t] for p, t in zip(places, event.token_ids, strict=True)])
        assert torch.allclose(got, expected, atol=1e-4) is alike


def test_random_weights_come_from_the_seed() -> None:
    def tokens(seed: int) -> tuple[int, ...]:
        with opened(tiny_folder("qwen3_moe"), load="random", seed=seed) as engine:
            return answer(engine, max_tokens=8, temperature=0.0, ignore_eos=True).token_ids

    assert tokens(1) == tokens(1) != tokens(2)


def test_requests_without_a_seed_differ() -> None:
    with opened(tiny_folder("qwen3_moe")) as engine:
        first = answer(engine, max_tokens=16, ignore_eos=True).token_ids
        assert first != answer(engine, max_tokens=16, ignore_eos=True).token_ids


def test_an_abort_takes_effect_before_the_next_token() -> None:
    with opened(tiny_folder("qwen3_moe")) as engine:
        inner: Any = engine
        forward, entered, release = inner._lm.forward, threading.Event(), threading.Event()

        def slow(*arguments: Any, **named: Any) -> Any:
            entered.set()
            assert release.wait(5)
            return forward(*arguments, **named)

        inner._lm.forward = slow
        engine.submit(GenerateRequest("a", PROMPT, SamplingParams(max_tokens=50)))
        assert entered.wait(5)
        engine.abort("a")
        release.set()

        async def read() -> list[TokenEvent]:
            return [event async for event in engine.stream("a")]

        (event,) = asyncio.run(read())
        assert (event.token_ids, event.finish_reason) == ((), FinishReason.ABORT)
        assert engine.snapshot().generated_tokens == 0


def test_options_it_cannot_honour_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        opened(
            tiny_folder("qwen3_moe"),
            experts="paged",
            kv_dtype="bf16",
            memory_mode="split",
            attention_backend="torch",
            host_tier_bytes=1,
            deterministic=True,
            device="tpu",
        )
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        "experts",
        "kv_dtype",
        "memory_mode",
        "attention_backend",
        "host_tier_bytes",
        "deterministic",
        "device",
    ]


def test_a_grammar_is_refused_by_field() -> None:
    with opened(tiny_folder("qwen3_moe")) as engine, pytest.raises(InvalidRequest) as caught:
        engine.submit(GenerateRequest("a", PROMPT, grammar=Grammar("json_object")))
    assert caught.value.field == "response_format"


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "abacus", "architectures": ["Abacus"]}')
    with pytest.raises(ModelLoadError, match="abacus"):
        opened(tmp_path)


def test_the_model_info_says_what_was_loaded() -> None:
    with opened(tiny_folder("gpt_oss"), served_name="tiny", max_model_len=100) as engine:
        info = engine.model
    assert (info.name, info.architecture, info.vocab_size) == ("tiny", "GptOssForCausalLM", 288)
    assert (info.max_model_len, info.eos_token_ids) == (100, (4, 2))
    assert (info.num_layers, info.num_experts, info.experts_per_token) == (4, 8, 2)
    assert (info.dtype, info.device) == ("float32", "cpu")
