"""Faults under load on real Ray: a round of all of them in about a minute; and, for ``make soak``, ten minutes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.drills.faults import FAULTS
from benchmarks.drills.service import Service
from benchmarks.fault_soak import REPLICAS, ROUTERS, WHOLE_S, options_of, soak

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_round_of_all_faults_loses_and_leaves_nothing(serve_url: str, tmp_path: Path) -> None:
    service = Service("soak", serve_url, options_of("fake", tmp_path))
    service.deploy()
    try:
        service.wait_until_whole(REPLICAS, ROUTERS, WHOLE_S)
        outcome = asyncio.run(soak(service, seconds=0.0, every_s=0.0))
    finally:
        service.delete()
    assert outcome.problems() == []
    assert set(outcome.faults) == set(FAULTS)
    assert outcome.outcomes["complete"] > 100
    assert outcome.leaked_pages == outcome.leaked_requests == 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_minutes_of_faults_on_both_transports_lose_and_leave_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.fault_soak", "--minutes", "10", "--json", str(report)]
    # Five minutes each, and what deploying, the last fault and settling take on a busy machine.
    done = subprocess.run(command, cwd=ROOT, check=False, timeout=1700)
    assert report.is_file(), "it did not come to its end: see above"
    found = json.loads(report.read_text())
    assert found["problems"] == []
    assert done.returncode == 0
    assert found["figures"]["lost"] == found["figures"]["leaked_pages"] == 0
