"""Decode steps over inputs that stay in place give what freshly built ones give; sizes and staging."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import random_prompt, run_mixed
from worker.config import WorkerConfig
from worker.execution.decode import DecodeSteps, batch_sizes, context_bounds
from worker.execution.graphs import DecodeGraphs
from worker.execution.runner import ModelRunner
from worker.execution.staging import HostUploads, put_fields


def open_driver(family: str, window: int, in_place: bool) -> PlanDriver:
    config = WorkerConfig(
        model=str(tiny_folder(family, window=window)), device="cpu", page_tokens=16, max_running=16
    )
    runner = ModelRunner(config)
    driver = PlanDriver(runner, arena_bytes=1 << 24)
    runner.arena.buffer.fill_(0xFF)
    if in_place:
        # A CPU's kernels know no padding: a size for every number of rows leaves none.
        runner.graphs = DecodeGraphs(
            DecodeSteps(
                runner._model.decoder,
                runner.arena,
                runner._shapes,
                runner._backend,
                runner._last_tokens,
                runner._model.vocab_size,
                runner.model_info.max_model_len,
            ),
            tuple(range(1, 17)),
            context_bounds(runner.model_info.max_model_len),
        )
    return driver


@pytest.mark.parametrize(("family", "window"), [("qwen3_5_moe", 48), ("gpt_oss", 0)])
def test_inputs_in_place_give_the_same_bits(family: str, window: int) -> None:
    prompts = [random_prompt(random.Random(n), n) for n in (1, 1, 15, 17, 64, 130)]
    drivers = [open_driver(family, window, in_place) for in_place in (False, True)]
    fresh, in_place = (run_mixed(driver, prompts, random.Random(2)) for driver in drivers)
    assert in_place == fresh
    graphs = drivers[1]._runner.graphs
    assert graphs is not None
    assert graphs.num_eager_steps > 0
    assert drivers[1]._runner.figures["graph.eager_decode_steps"] == graphs.num_eager_steps


def test_every_step_finds_a_size_and_a_bound() -> None:
    for most in (1, 2, 5, 64, 100, 1024, 3000):
        sizes = batch_sizes(most)
        assert sizes[-1] == most
        assert all(small < large for small, large in pairwise(sizes))
        assert len(sizes) <= 18
    for longest in (128, 4096, 8192, 40960, 262144, 1_000_000):
        bounds = context_bounds(longest)
        assert bounds[-1] == longest
        assert all(small < large for small, large in pairwise(bounds))
        assert len(bounds) <= 5


def test_a_layout_is_put_field_by_field() -> None:
    from kernels.recurrent import chunk_layout

    layout = chunk_layout([70, 3], 4, torch.device("cpu"))
    found = put_fields(layout, HostUploads())
    assert torch.equal(found.slot, layout.slot)
    assert found.active == layout.active
    assert layout.chunk_index.tolist() == [[0, 0], [0, 1], [1, 0]]
    with pytest.raises(TypeError, match="not a dataclass"):
        put_fields(np.zeros(3), HostUploads())
