"""A request's way through the Router: queue and its bound, vetoes, lost workers, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from serve_app.policies.coalescing import CoalescingConfig
from tests.helpers.eventually import ends, some_turns, soon
from tests.helpers.tokenizers import scripted, write_model_folder
from tests.serve_app.in_process import Cluster, served, sse_chunks

USER = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
ANSWER = "0123456789" * 4


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Answers 40 tokens at 100 per second."""
    return write_model_folder(tmp_path / "slow", script=scripted(ANSWER, tokens_per_s=100.0))


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """Answers at once."""
    return write_model_folder(tmp_path / "quick", script=scripted(ANSWER))


async def ask(cluster: Cluster, **more: Any) -> Any:
    return await cluster.client.post(CHAT, json={"messages": USER, **more})


def test_past_the_queues_bound_the_answer_is_429_with_retry_after(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        answers = await asyncio.gather(*(ask(cluster) for _ in range(12)))
        codes = sorted(answer.status_code for answer in answers)
        # Two run, four wait, the rest is refused at once.
        assert codes == [200] * 6 + [429] * 6
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"

    served(slow, use, max_running=2, max_queue=4)


def test_the_queue_is_served_in_order(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        done: list[int] = []

        async def one(index: int) -> None:
            await asyncio.sleep(index * 0.02)
            await ask(cluster, max_tokens=10)
            done.append(index)

        await asyncio.gather(*(one(index) for index in range(6)))
        assert done == sorted(done)

    served(slow, use, max_running=1, max_queue=10)


def test_a_request_that_waits_too_long_is_refused(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        first = asyncio.create_task(ask(cluster, ignore_eos=True, max_tokens=3000))
        await soon(lambda: cluster.dispatcher.num_open)
        assert (await ends(ask(cluster))).status_code == 429
        first.cancel()

    served(slow, use, max_running=1, queue_timeout_s=0.2)


def test_a_veto_sends_the_request_elsewhere(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        for replica in cluster.replicas.values():
            replica.vetoes = 1
        assert (await ask(cluster)).status_code == 429  # both refused
        cluster.replicas["replica0"].vetoes = 5
        answers = [await ask(cluster) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert cluster.dispatcher.counts.retries.get("refused", 0) >= 1

    served(quick, use, num_replicas=2)


def test_the_veto_of_an_only_worker_is_a_429_with_its_retry_after(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        cluster.replicas["replica0"].vetoes = 1
        refused = await ask(cluster)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "2"
        assert (await ask(cluster)).status_code == 200

    served(quick, use)


@pytest.mark.parametrize("how", ["lost", "gone", "silent"])
def test_a_worker_that_fails_before_the_first_token_costs_only_a_retry(quick: Path, how: str) -> None:
    async def use(cluster: Cluster) -> None:
        setattr(cluster.replicas["replica0"], how, True)
        answers = await asyncio.gather(*(ask(cluster) for _ in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {ANSWER}
        assert cluster.dispatcher.counts.retries["gone" if how == "gone" else "lost"] >= 1
        setattr(cluster.replicas["replica0"], how, False)

    served(quick, use, num_replicas=2, accept_timeout_s=0.3)


def test_a_replica_that_is_taken_away_is_not_asked_again_at_once(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        gone = cluster.replicas["replica0"]
        gone.gone = True
        for _ in range(10):
            assert (await ask(cluster)).status_code == 200
        assert gone.num_calls <= 1

    served(quick, use, num_replicas=2)


def test_a_worker_that_is_too_new_to_be_routed_to_costs_no_request(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        new = cluster.replicas["replica0"]
        new.gone = True
        asked = [asyncio.create_task(ask(cluster)) for _ in range(6)]
        await asyncio.sleep(0.3)
        new.gone = False
        assert [(await task).status_code for task in asked] == [200] * 6
        assert new.num_calls < 6 + 6, "it is not asked again and again"

    served(slow, use, max_running=6)


def test_a_request_that_nobody_is_left_for_blocks_no_other(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        first = [asyncio.create_task(ask(cluster, ignore_eos=True, max_tokens=3000)) for _ in range(2)]
        await soon(lambda: [r.engine.snapshot().num_running for r in cluster.replicas.values()] == [1, 1])
        full, vetoing = cluster.replicas["replica0"], cluster.replicas["replica1"]
        # Both are full; one gets free and refuses, then the other one vanishes.
        vetoing.engine.abort(next(iter(vetoing.engine._desk.requests)))
        vetoing.vetoes = 1
        stuck = asyncio.create_task(ask(cluster))
        await soon(lambda: not vetoing.vetoes)
        await some_turns()
        assert not stuck.done(), "it waits for the full one"
        cluster.reporting.discard("replica0")
        cluster.dispatcher._forget("replica0")
        assert (await ends(ask(cluster, max_tokens=2))).status_code == 200
        assert (await stuck).status_code == 503
        full.lost = True
        await asyncio.gather(*first)

    served(slow, use, num_replicas=2, max_running=1)


def test_the_loss_of_an_only_worker_is_a_503(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        cluster.replicas["replica0"].lost = True
        response = await ask(cluster)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"

    served(quick, use)


def test_a_worker_lost_in_mid_stream_ends_it_with_an_error_event(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        async def kill() -> None:
            await cluster.flowing(5)
            cluster.replicas["replica0"].lost = True

        endless = ask(cluster, stream=True, ignore_eos=True, max_tokens=3000)
        response, _ = await asyncio.gather(endless, kill())
        *chunks, end = sse_chunks(response.text)
        assert end == "[DONE]"
        assert json.loads(chunks[-1])["error"]["code"] == "worker_failed"

    served(slow, use)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(slow: Path) -> None:
    async def use(cluster: Cluster) -> None:
        async def one(index: int) -> int:
            leaves = index % 3 == 0
            endless = {"ignore_eos": True, "max_tokens": 3000} if leaves else {}
            asked = asyncio.create_task(ask(cluster, stream=index % 2 == 0, n=1 + index % 2, **endless))
            if leaves:
                await asyncio.sleep(0.011 * index)
                asked.cancel()
                return 0
            return int((await asked).status_code)

        codes = await asyncio.gather(*(one(index) for index in range(32)))
        assert codes.count(0) == 11
        assert codes.count(200) == 21

    served(slow, use, max_running=16, max_queue=200, num_replicas=2)


def test_a_crowd_that_leaves_at_random_moments_leaves_nothing_behind(slow: Path) -> None:
    moments = random.Random(5)

    async def use(cluster: Cluster) -> None:
        async def one() -> None:
            shape = {"stream": moments.random() < 0.5, "n": moments.choice([1, 1, 2, 3])}
            asked = asyncio.create_task(ask(cluster, ignore_eos=True, max_tokens=3000, **shape))
            await asyncio.sleep(0.5 * moments.random() ** 2)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

        await asyncio.gather(*(one() for _ in range(100)))

    served(slow, use, max_running=16, max_queue=1000, num_replicas=2)


def test_one_failing_choice_ends_the_others(quick: Path) -> None:
    async def use(cluster: Cluster) -> None:
        # Five choices, room for two and one in the queue: the request fails as a whole.
        assert (await ask(cluster, n=5)).status_code == 429

    served(quick, use, max_running=2, max_queue=1)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_for_which_there_is_no_room_at_once_follow_one_another(quick: Path, stream: bool) -> None:
    async def use(cluster: Cluster) -> None:
        # Two requests of twenty choices each, two of which fit: none may keep its place from the others.
        answers = await asyncio.gather(*(ask(cluster, n=20, stream=stream) for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]
        for answer in answers:
            bodies = [json.loads(c) for c in sse_chunks(answer.text)[:-1]] if stream else [answer.json()]
            ended = [c["index"] for body in bodies for c in body["choices"] if c["finish_reason"] == "stop"]
            assert sorted(ended) == list(range(20))

    served(quick, use, max_running=2, queue_timeout_s=5.0)


def test_later_tokens_come_gathered_the_first_at_once(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", script=scripted("x" * 200, tokens_per_s=500.0))

    async def texts_of(cluster: Cluster) -> list[str]:
        response = await ask(cluster, stream=True)
        chunks = [json.loads(chunk) for chunk in sse_chunks(response.text)[:-1]]
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == "x" * 200
        # 200 tokens in 0.4 s, gathered for 50 ms: about eight messages, and far from one a token.
        assert len(texts) <= 20
        return texts

    async def use(cluster: Cluster) -> None:
        # One token, or a few where the machine is busy; gathered for 50 ms they would be 25. What stands still for
        # longer sends more at once.
        for _ in range(5):
            texts = await texts_of(cluster)
            if 1 <= len(texts[0]) < 20 and len(texts) >= 2:
                return
        raise AssertionError("the first token never came at once")

    served(folder, use, coalescing=CoalescingConfig(messages_per_s=20.0, reserve=0.0, max_interval_s=0.05))


def test_placement_learns_what_requests_used_and_not_what_was_resident(tmp_path: Path) -> None:
    simulated = {"num_layers": 2, "num_experts": 64, "experts_per_token": 2, "resident_experts": 64}
    folder = write_model_folder(tmp_path / "experts", script={"output": "echo", **simulated})

    async def use(cluster: Cluster) -> None:
        for _ in range(3):
            for user, prompt in (("anna", "aaaa"), ("ben", "bbbb")):
                body = {"prompt": prompt, "max_tokens": 4, "user": user}
                answer = await cluster.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
        experts, simulation = (
            cluster.dispatcher._placement.experts,
            cluster.replicas["replica0"].engine._experts,
        )
        bits = {user: simulation.as_bytes(simulation.cells(ord(user[0]))) for user in ("anna", "ben")}
        keys = [key for key in experts._profiles if "anna" in key or "ben" in key]
        assert len(keys) == 2
        for key in keys:
            profile = experts.profile([key])
            assert profile is not None
            own, other = ("anna", "ben") if "anna" in key else ("ben", "anna")
            assert experts.expected_misses(profile, bits[own]) == 0
            assert experts.expected_misses(profile, bits[other]) > 0

    served(folder, use)
