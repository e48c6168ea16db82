"""Figures of the arena ride in snapshots: flat, as the report has them, and only what there is."""

from __future__ import annotations

from contextlib import closing

from tests.helpers.eventually import eventually
from tests.worker.test_native_engine import answers, greedy, on_fake_runner
from worker.engines.figures import arena_figures


def test_a_snapshot_carries_what_the_arenas_report_says() -> None:
    with closing(on_fake_runner(60_000, max_step_tokens=64, host_tier_bytes=20_000)) as engine:
        assert engine.snapshot().extra["prefix.nodes"] == 0
        for turn in range(3):
            answers(
                engine,
                [
                    greedy(f"{turn}.{n}", tuple((9 * turn + 10 * n + i) % 250 for i in range(100)))
                    for n in range(8)
                ],
            )
        report = engine.arena_report()
        extra = eventually(
            lambda: engine.snapshot().extra,
            lambda extra: extra.items() >= arena_figures(engine.arena_report()).items(),
        )
        assert report["tree"]["nodes"] > 0
        assert extra["prefix.nodes"] == report["tree"]["nodes"]
        assert extra["prefix.held_bytes"] == sum(report["tree"]["held_bytes"].values()) > 0
        assert extra["host_tier.stored_bytes"] == report["host_tier"]["stored_bytes"] > 0
        assert extra["arena.moves_between"] == report["moves"]["num_between"]
        assert all(isinstance(value, float) for value in extra.values())


def test_what_an_engine_does_not_have_is_not_told() -> None:
    with closing(on_fake_runner(60_000, prefix_cache=False)) as engine:
        extra = engine.snapshot().extra
    assert "arena.moves_beside" in extra
    assert not [key for key in extra if key.startswith(("prefix.", "host_tier."))]
