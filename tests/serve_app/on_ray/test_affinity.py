"""Four real replicas of the demo model with paged experts: requests land where placement says, and come back."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from benchmarks.drills.clients import new_client
from benchmarks.drills.service import Service
from benchmarks.replica_affinity import DOMAINS, REPLICAS, Run, converse, options_of, trace
from tests.serve_app.conftest import DEPLOY_S

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CONVERSATIONS = 2


@pytest.mark.slow
def test_conversations_land_where_placement_says_and_return_to_their_prefixes(serve_url: str) -> None:
    service = Service("affine", serve_url, options_of("by_use"))
    service.deploy()
    try:
        service.wait_until_whole(REPLICAS, 1, DEPLOY_S)
        cached = asyncio.run(_converse(service.url))
        arrivals = service.arrivals()
        states = service.snapshots()
        experts = httpx.get(service.url + "/experts").json()["data"]
    finally:
        service.delete()
    assert all(arrival.num_astray == 0 for arrival in arrivals), "each is the one that was named"
    run = Run()
    trace(run, {arrival.replica: arrival.affinity_keys for arrival in arrivals})
    assert run.num_requests == 2 * CONVERSATIONS * len(DOMAINS)
    assert run.returned == run.later_turns == CONVERSATIONS * len(DOMAINS)
    assert sum(state.cached_tokens for state in states) == cached
    # Not all of them in one place; where tenants gather once the caches are warm is for the benchmark to say.
    assert len([arrival for arrival in arrivals if arrival.affinity_keys]) >= 2
    assert sum(state.expert_bytes_paged for state in states) > 0
    assert len(experts) == REPLICAS
    assert sum(entry["experts"]["places"] > 0 for entry in experts) >= 2


async def _converse(url: str) -> int:
    async with new_client(url) as http:
        cached = 0
        for number in range(CONVERSATIONS):
            for domain in DOMAINS:
                cached += await converse(http, domain, number, turns=2)
        return cached
