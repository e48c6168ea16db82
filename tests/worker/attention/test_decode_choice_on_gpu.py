"""The choice of attention for decode steps on a GPU: real times, and a model whose sizes have different backends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import random_prompt, run_mixed
from worker.attention import BACKENDS
from worker.attention.base import AttentionShape
from worker.attention.choice import choose_decode_backend
from worker.attention.decode_choice import DecodeTimes, choose_decode, measured_rows
from worker.attention.decode_times import DecodeGroup, measure_decode
from worker.attention.sized import SizedAttention
from worker.config import WorkerConfig
from worker.execution import runner as runner_module
from worker.execution.runner import ModelRunner

pytestmark = pytest.mark.gpu

GROUPS = {
    "qwen3": DecodeGroup(AttentionShape(32, 4, 128, 128**-0.5), 48, 64, "bfloat16"),
    "gpt_oss_window": DecodeGroup(
        AttentionShape(64, 8, 64, 0.125, window=128, has_sinks=True), 12, 32, "bfloat16"
    ),
}


def need_flash(shape: AttentionShape) -> None:
    reason = BACKENDS.load("flash")().unusable_reason(shape, torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"flash is not usable: {reason}")


@pytest.mark.parametrize("name", GROUPS)
def test_times_are_of_the_device_and_asked_once(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    group, device = GROUPS[name], torch.device("cuda", 0)
    need_flash(group.shape)
    sizes = tuple((rows, bound) for bound in (4096, 32768) for rows in measured_rows(64))
    before = torch.cuda.memory_reserved()  # by this process; others may be at work on the device
    started = time.perf_counter()
    names = ("flash", "triton", "triton_few")
    found = measure_decode(device, group, names, sizes)
    took = time.perf_counter() - started
    after = torch.cuda.memory_reserved()
    assert [(entry.rows, entry.bound) for entry in found] == list(sizes)
    # No faster than memory, with a margin for what stays in the cache; the window's 128 tokens are read in any context.
    window = group.shape.window
    for entry in found:
        read = entry.rows * min(entry.context, window or entry.context) * group.token_bytes * group.num_layers
        assert set(entry.seconds) == set(names)
        assert all(
            seconds > read / 8e12 and seconds > 1e-6 * group.num_layers for seconds in entry.seconds.values()
        )
    assert measure_decode(device, group, names, sizes) is found
    assert after - before < 256 << 20
    record_property(
        "figure", f"attention of {name} chosen in {took:.2f} s: {choose_decode(found, 'flash').line()}"
    )


def measure_in_turns(
    device: torch.device, group: DecodeGroup, names: tuple[str, ...], sizes: tuple[tuple[int, int], ...]
) -> tuple[DecodeTimes, ...]:
    """Each is ahead in turn, the last one first."""
    assert names == ("flash", "triton", "triton_few")
    order = {rows: number for number, rows in enumerate(sorted({rows for rows, _ in sizes}))}
    return tuple(
        DecodeTimes(
            rows,
            bound,
            bound // 4,
            {name: 1.0 + ((order[rows] + place) % 3 != 2) for place, name in enumerate(names)},
        )
        for rows, bound in sizes
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_sizes_with_different_backends_replay_the_bits_of_eager_steps(
    family: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(
        runner_module, "choose_decode_backend", partial(choose_decode_backend, measure=measure_in_turns)
    )
    folder = tiny_folder(family, window=0)
    prompts = [random_prompt(random.Random(n), n) for n in (1, 2, 15, 17, 64, 130, 300)]
    answers = []
    for replaying in (True, False):
        config = WorkerConfig(
            model=str(folder), device="cuda", dtype="bfloat16", page_tokens=16, max_running=16
        )
        runner = ModelRunner(config)
        for shape in runner._shapes.values():
            need_flash(shape)
        assert isinstance(runner._decode_backend, SizedAttention)
        longest = runner.model_info.max_model_len
        taken = [runner._decode_backend.names(rows, longest)[0] for rows in (1, 2, 4, 8, 16)]
        assert taken == ["triton_few", "triton", "flash", "triton_few", "triton"]
        driver = PlanDriver(runner, arena_bytes=1 << 24)
        runner.arena.buffer.fill_(0xFF)
        runner.capture_graphs()
        assert runner.graphs is not None
        assert runner.mixed is not None
        runner.graphs.replaying = runner.mixed.replaying = replaying
        answers.append(run_mixed(driver, prompts, random.Random(5)))
        assert (runner.graphs.num_replays > 5) == replaying
    assert answers[0] == answers[1]
    record_property(
        "figure", f"{family}: sizes of decode steps by {', '.join(taken)}, captured or eager, same bits"
    )
