"""Autoscaling through real Serve: from zero to three workers and back, and a policy that fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.drills.clients import Crowd
from benchmarks.drills.service import Service
from tests.helpers.eventually import eventually
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.conftest import DEPLOY_S

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
QUICK = {"cool_down_s": 1.0, "down_hold_s": 1.0, "zero_hold_s": 1.0, "retractions_high": 0.1}


def wait_for(service: Service, count: int) -> float:
    """Waits until so many workers are there; the seconds it took."""
    began = time.monotonic()
    eventually(
        lambda: service.pids("Worker"), lambda pids: len(pids) == count, within_s=DEPLOY_S, pause_s=0.1
    )
    return time.monotonic() - began


@pytest.mark.timeout(400)
def test_workers_follow_the_load_from_zero_to_three_and_back_and_no_stream_is_cut(
    serve_url: str, tmp_path: Path
) -> None:
    # An arena of 600 tokens, for requests of about 200: with more than two or three at once, some are sent back.
    script = scripted("w" * 50, tokens_per_s=50.0, bytes_per_token=1, arena_bytes=600)
    folder = write_model_folder(tmp_path / "m", script=script)
    options = {"engine": "fake", "model": str(folder), "max_running": 8, "worker_backlog": 8}
    scaling = {"replicas": 0, "min_replicas": 0, "max_replicas": 3, "scaling_interval_s": 0.5}
    more = {"scaling_rules": QUICK, "graceful_shutdown_timeout_s": 30.0, "health_check_period_s": 1.0}
    service = Service("scaled", serve_url, {**options, **scaling, **more})
    service.deploy()
    try:
        asyncio.run(_up_and_down(service))
    finally:
        service.delete()


def retractions(service: Service) -> int:
    """How often workers sent requests back."""
    return sum(state.num_retractions for state in service.snapshots())


async def _up_and_down(service: Service) -> None:
    assert not service.pids("Worker")
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        assert (await http.get("/ready")).status_code == 200
        first = await http.post("/v1/chat/completions", json=BODY)
    assert first.status_code == 200, first.text
    print(f"from zero: the first answer after {time.monotonic() - began:.1f} s")

    few = Crowd(service.url, num_clients=1, seed=1, longest=60)
    many = Crowd(service.url, num_clients=14, seed=2, longest=60)
    up_s = await asyncio.to_thread(wait_for, service, 3)
    # The load does cause retractions, and streams are still running when most of it ends.
    sent_back = await asyncio.to_thread(eventually, lambda: retractions(service))
    await asyncio.sleep(1.0)
    await many.stop()
    down_s = await asyncio.to_thread(wait_for, service, 1)
    await few.stop()
    zero_s = await asyncio.to_thread(wait_for, service, 0)
    print(
        f"1 -> 3 in {up_s:.1f} s ({sent_back} sent back), 3 -> 1 in {down_s:.1f} s, 1 -> 0 in {zero_s:.1f} s"
    )
    for crowd in (few, many):
        assert not crowd.tally.lost
        assert not crowd.tally.marred, "no stream is failed or cut"
        assert crowd.tally.outcomes["complete"] > 0


def test_a_policy_that_fails_leaves_the_application_running(serve_url: str, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted("Running."))
    # Pressure is measured against this bound: every look at a worker's metrics divides by zero.
    rules = {"scaling_rules": {"retractions_high": 0.0}, "max_replicas": 2, "scaling_interval_s": 0.2}
    options = {"engine": "fake", "model": str(folder), "graceful_shutdown_timeout_s": 2.0, **rules}
    service = Service("unscaled", serve_url, options)
    service.deploy()
    try:
        service.wait_until_whole(1, 1, DEPLOY_S)
        time.sleep(1.5)  # several looks
        assert httpx.post(service.url + "/v1/chat/completions", json=BODY, timeout=60).status_code == 200
        assert len(service.pids("Worker")) == 1
    finally:
        service.delete()  # which a controller whose policy raises never does
    assert not service.pids("Worker")
