"""What a worker's settings refuse: all problems at once, each with the option to change."""

from __future__ import annotations

import pytest

from worker.config import WorkerConfig
from worker.errors import ConfigError


def test_all_problems_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(
            model="m", dtype="float8", max_running=0, split_ratio=1.0, page_tokens=48, arena_bytes=-1
        )
    named = [problem.split("=")[0] for problem in caught.value.problems]
    assert named == ["dtype", "max_running", "arena_bytes", "split_ratio", "page_tokens"]


def test_options_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(
            model="m", expert_bytes=1 << 20, host_store="shared", host_tier_bytes=1 << 20, prefix_cache=False
        )
    assert caught.value.problems == [
        "expert_bytes=1048576 needs experts=paged",
        "host_store=shared needs experts=paged",
        "host_tier_bytes=1048576 needs prefix_cache=true",
    ]
    WorkerConfig(model="m", experts="paged", expert_bytes=1 << 20, host_store="shared", host_tier_bytes=1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_patience_that_calls_every_busy_engine_dead_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(model="m", stall_timeout_s=seconds)
    assert caught.value.problems == [f"stall_timeout_s={seconds} must be above 0"]
