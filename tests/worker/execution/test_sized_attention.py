"""Decode steps compute attention by the backend of their size, steps with chunks by the other one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from worker.api import SamplingParams
from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionPlan, AttentionShape, PagedGeometry
from worker.attention.decode_choice import DecodeChoice, DecodeTimes
from worker.attention.decode_times import DecodeGroup
from worker.attention.sized import SizedAttention
from worker.config import WorkerConfig
from worker.execution import runner as runner_module
from worker.execution.runner import ModelRunner

SAMPLING = SamplingParams(max_tokens=64, temperature=0.0, logprobs=2)


class Watched:
    """A backend that keeps the rows of each plan."""

    capturable = True

    def __init__(self, name: str) -> None:
        self.name, self.rows = name, list[int]()
        self._backend: AttentionBackend = BACKENDS.load(name)()
        self.unusable_reason, self.run = self._backend.unusable_reason, self._backend.run

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        self.rows.append(len(geometry.kv_len))
        return self._backend.plan(geometry, shape)


def choice(names: Sequence[str]) -> DecodeChoice:
    times = [
        DecodeTimes(rows, 1 << 20, 1, dict.fromkeys(names, 1.0))
        for rows, _ in zip((1, 2, 4, 8, 16), names, strict=False)
    ]
    return DecodeChoice("torch", tuple(times), tuple(names))


def test_a_runner_hands_decode_steps_to_the_backend_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = Watched("rowwise"), Watched("torch")
    asked: list[tuple[dict[str, DecodeGroup], list[tuple[int, int]]]] = []

    def chosen(
        config: WorkerConfig, base: AttentionBackend, groups: Any, sizes: Any, device: torch.device
    ) -> AttentionBackend:
        asked.append((dict(groups), list(sizes)))
        choices = {group.shape: choice(("rowwise", "rowwise", "torch")) for group in groups.values()}
        return SizedAttention({"rowwise": few, "torch": many}, choices)

    monkeypatch.setattr(runner_module, "choose_decode_backend", chosen)
    folder = tiny_folder("gpt_oss", window=0)
    config = WorkerConfig(model=str(folder), device="cpu", page_tokens=16, max_running=16)
    answers = []
    for sized in (True, False):
        runner = ModelRunner(config)
        driver = PlanDriver(runner, arena_bytes=1 << 24)
        if sized:
            runner.graphs = runner._decode_graphs()
        requests = [
            driver.add(random.Random(n).choices(range(1, 90), k=n), SAMPLING) for n in (5, 20, 33, 40)
        ]
        driver.step({request: len(driver.rows[request].tokens) for request in requests})
        for count in (4, 2, 1, 4):
            driver.step(dict.fromkeys(requests[:count], 1))
        answers.append([driver.rows[request].tokens for request in requests])
    groups, sizes = asked[0]
    assert {name: (group.shape, group.num_layers, group.page_tokens) for name, group in groups.items()} == {
        spec.name: (runner._shapes[spec.name], len(spec.layers), spec.page_tokens)
        for spec in runner.page_specs
        if spec.name in runner._shapes
    }
    assert sizes == [(rows, runner.model_info.max_model_len) for rows in (1, 2, 4, 8, 16)]
    # Two groups each; the step with chunks has the backend of neither.
    assert (few.rows, many.rows) == ([2, 2, 1, 1], [4] * 4)
    assert answers[0] == answers[1]
