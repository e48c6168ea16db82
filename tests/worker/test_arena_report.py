"""What an engine says of its arena: every byte of it, after each kind of event."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from typing import Any

import pytest

from tests.worker.test_native_engine import answers, greedy, on_fake_runner
from worker.errors import ConfigError


def check_bytes(report: dict[str, Any]) -> None:
    """Bands are in order, their pages add up, and bands and gap make up the arena."""
    assert json.loads(json.dumps(report)) == report, "not what JSON can carry"
    cursor = covered = 0
    for band in report["bands"]:
        if not band["pages"]:
            continue
        assert cursor <= band["low_byte"]
        assert band["high_byte"] - band["low_byte"] == band["pages"] * band["page_bytes"]
        assert band["bound"] + band["holes"] + band["pending"] + band["copying"] == band["pages"]
        cursor = band["high_byte"]
        covered += band["pages"] * band["page_bytes"]
    gaps = sum(high - low for low, high in report["gap"]["spans"])
    rings = sum(high - low for low, high in report["gap"]["rings"])
    assert covered + gaps + rings == report["arena_bytes"]


def is_in_use(report: dict[str, Any]) -> bool:
    """Whether requests held pages when it was made."""
    return any(band["pending"] or band["bound"] > band["cached_only"] for band in report["bands"])


@pytest.mark.parametrize("mode", ["arena", "split"])
def test_a_report_accounts_for_every_byte_while_requests_come_and_go(mode: str) -> None:
    with closing(
        on_fake_runner(60_000, memory_mode=mode, max_step_tokens=64, host_tier_bytes=20_000)
    ) as engine:
        check_bytes(engine.arena_report())
        found: list[dict[str, Any]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.001):
                found.append(engine.arena_report())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            # A busy machine may give the watcher no turn while requests run.
            for turn in range(200):
                if turn >= 5 and any(map(is_in_use, found)):
                    break
                requests = [
                    greedy(f"{turn}.{n}", tuple((7 * turn + 10 * n + i) % 250 for i in range(100)))
                    for n in range(12)
                ]
                answers(engine, requests)
        finally:
            done.set()
            watcher.join()
        last = engine.arena_report()
        snapshot = engine.snapshot()
    for report in [*found, last]:
        check_bytes(report)
    assert last["mode"] == mode
    assert last["headroom"]["available_bytes"] == snapshot.headroom.available_bytes
    assert (
        sum(band["bound"] for band in last["bands"]) == sum(band["cached_only"] for band in last["bands"]) > 0
    )
    assert last["tree"]["nodes"] > 0
    assert last["tree"]["evicted_bytes"] > 0
    assert last["host_tier"]["stored_bytes"] >= last["host_tier"]["used_bytes"] > 0
    assert any(map(is_in_use, found))


def test_a_host_tier_that_holds_no_page_stops_the_start() -> None:
    with pytest.raises(
        ConfigError, match="host_tier_bytes=500 does not hold one page: those of 'state' take 512 bytes"
    ):
        on_fake_runner(60_000, host_tier_bytes=500)
    with closing(on_fake_runner(60_000, host_tier_bytes=512)) as engine:
        assert engine.arena_report()["host_tier"]["budget_bytes"] == 512
