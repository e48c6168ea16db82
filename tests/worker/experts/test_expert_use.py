"""What paged engines say their requests used, against the router's own choices, counted by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memory.api import StepCommands
from tests.helpers.paging import ARENA_BYTES
from tests.helpers.tiny import tiny_folder
from worker.api import FinishReason, GenerateRequest, SamplingParams, TokenEvent, merged_events
from worker.config import WorkerConfig
from worker.engines.native import NativeEngine
from worker.execution.staging import HostUploads
from worker.experts.pager import ExpertPager
from worker.experts.use import ExpertUse
from worker.scheduling.step import IntArray, StartedRow, StepPlan, StepResult

LAYERS, EXPERTS = 4, 8


def settings(**options: Any) -> WorkerConfig:
    paged = {"experts": "paged", "arena_bytes": ARENA_BYTES, "num_threads": 1, "device": "cpu"}
    return WorkerConfig(**{"model": str(tiny_folder()), **paged, **options})


class Choices:
    """Counts of what each request's decode steps chose, from what layers are given and the plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_request: dict[int, IntArray] = {}
        self._layers: list[torch.Tensor] = []
        run = ExpertPager.run

        def watched(
            pager: ExpertPager, row: int, x: Any, weights: Any, experts: torch.Tensor, *more: Any
        ) -> Any:
            self._layers.append(experts.clone())
            return run(pager, row, x, weights, experts, *more)

        monkeypatch.setattr(ExpertPager, "run", watched)

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        layers, self._layers = self._layers, []
        if not plan.num_rows:
            return
        assert len(layers) == LAYERS
        for row in range(plan.num_decode_rows):
            empty = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
            counts = self.by_request.setdefault(int(plan.requests[row]), empty)
            for layer, experts in enumerate(layers):
                np.add.at(counts[layer], experts[row].numpy(), 1)


def bits_of(counts: IntArray) -> bytes:
    """By the definition: chosen, and at least half as often as the layer's experts on average."""
    leans = (counts > 0) & (counts >= counts.mean(1, keepdims=True) / 2)
    return np.packbits(leans.flatten(), bitorder="little").tobytes()


async def last_events(engine: NativeEngine, requests: Sequence[GenerateRequest]) -> list[TokenEvent]:
    async def one(request: GenerateRequest) -> TokenEvent:
        return merged_events([event async for event in engine.stream(request.request_id)])

    for request in requests:
        engine.submit(request)
    return list(await asyncio.gather(*map(one, requests)))


def asked(number: int, num_prompt: int, max_tokens: int) -> GenerateRequest:
    prompt = tuple((number * 31 + i * 7) % 230 + 20 for i in range(num_prompt))
    sampling = SamplingParams(temperature=0.9, seed=number, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(str(number), prompt, sampling)


def test_the_last_event_says_which_experts_the_answer_leaned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Choices(monkeypatch)
    # Two waves over fewer rows than requests: slots are used again, and chunks of prompts stand beside decode rows.
    requests = [asked(n, 8 + 7 * n, 4 + 5 * n) for n in range(6)]
    engine = NativeEngine(settings(max_running=4, max_step_tokens=16), audit=True, record=choices)
    with closing(engine):
        ended = asyncio.run(last_events(engine, requests[:5]))
        ended += asyncio.run(last_events(engine, requests[5:]))
    assert [event.used_expert_bits for event in ended] == [bits_of(choices.by_request[n]) for n in range(6)]
    assert len({event.used_expert_bits for event in ended}) > 3
    everything = LAYERS * EXPERTS
    assert any(int.from_bytes(e.used_expert_bits or b"", "little").bit_count() < everything for e in ended)


def test_what_ends_with_its_prompt_or_is_not_counted_says_nothing() -> None:
    for options, tokens in (({}, 1), ({"expert_use": False}, 4), ({"experts": "resident"}, 4)):
        with closing(NativeEngine(settings(**options))) as engine:
            (event,) = asyncio.run(last_events(engine, [asked(1, 12, tokens)]))
        assert event.finish_reason is FinishReason.LENGTH
        assert event.used_expert_bits is None


def a_plan(slots: Sequence[int], started: Sequence[int] = (), staged: bool = False) -> StepPlan:
    rows = np.array(slots, dtype=np.int64)
    ones = np.ones_like(rows)
    begun = tuple(StartedRow(slot, slot, SamplingParams(), 0, (1,), 1) for slot in started)
    return StepPlan(
        0, rows, rows, ones, ones, ones, ones > 0, len(rows), {}, StepCommands(0), begun, staged=staged
    )


def step(use: ExpertUse, plan: StepPlan, *layers: list[list[int]]) -> list[list[int]] | None:
    """Its decode rows' bits after a step whose layers chose so."""
    use.begin_step(plan, HostUploads())
    use.clear_started()
    for row, experts in enumerate(layers):
        use.take(row, torch.tensor(experts))
    found = use.count()
    return None if found is None else use.used_bits(found).tolist()


def test_padding_sets_no_bit_and_a_slot_begins_anew() -> None:
    use = ExpertUse(num_slots=3, num_layers=2, num_experts=8, experts_per_token=2, device=torch.device("cpu"))
    # One row of a step that is padded to three: what stands in the others, -1 or not, is nobody's.
    padded = [[0, 1], [-1, -1], [6, 7]]
    assert step(use, a_plan([2]), padded, padded) == [[0b11, 0b11]]
    assert step(use, a_plan([0, 1]), [[4, 5], [2, 3]], [[4, 5], [2, 3]]) == [[48, 48], [12, 12]]
    assert step(use, a_plan([2]), [[0, 2]], [[4, 5]]) == [[0b111, 0b110011]]
    assert step(use, a_plan([1, 2], started=[2]), [[2, 3], [6, 7]], [[2, 3], [6, 7]]) == [
        [12, 12],
        [192, 192],
    ]
    # A prefill pass begins its rows' slots and counts nothing.
    assert step(use, a_plan([1], started=[1], staged=True)) is None
    assert step(use, a_plan([1]), [[0, 1]], [[0, 1]]) == [[0b11, 0b11]]


def test_bits_of_an_odd_number_of_experts_follow_each_other_without_gaps() -> None:
    use = ExpertUse(
        num_slots=1, num_layers=2, num_experts=12, experts_per_token=2, device=torch.device("cpu")
    )
    assert step(use, a_plan([0]), [[0, 11]], [[0, 1]]) == [[0b00000001, 0b00111000, 0]]


def test_merged_events_keep_the_last_ones_bits() -> None:
    last = TokenEvent("r", (2,), 2, finish_reason=FinishReason.STOP, used_expert_bits=b"\x05")
    assert TokenEvent("r", (1,), 1).merged_with(last) == replace(last, token_ids=(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [1, 5])
def test_captured_steps_say_the_same_as_eager_ones(num_requests: int) -> None:
    found = []
    for replays in (True, False):
        engine = NativeEngine(settings(device="cuda", dtype="bfloat16", max_running=4, deterministic=True))
        with closing(engine):
            runner: Any = engine._runner
            assert runner.graphs is not None
            assert runner.mixed is not None
            runner.graphs.replaying = runner.mixed.replaying = replays
            ended = asyncio.run(last_events(engine, [asked(n, 20, 30) for n in range(num_requests)]))
            assert (runner.figures["graph.replayed_decode_steps"] > 0) is replays
        found.append([(event.token_ids, event.used_expert_bits) for event in ended])
    assert found[0] == found[1]
    assert all(bits for _, bits in found[0])
