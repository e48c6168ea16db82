"""What every engine must do, whatever is inside: each test runs on each entry of ``tests.helpers.engines.ENGINES``, on
one engine that it leaves as it found it."""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest

from tests.helpers.asking import ENDLESS, PROMPT, answer, ask, events_of
from tests.helpers.engines import EngineKind
from tests.helpers.eventually import eventually, soon
from worker.api import Engine, FinishReason, GenerateRequest, TokenEvent
from worker.errors import InvalidRequest, PromptTooLong


@pytest.fixture(scope="module")
def shared(kind: EngineKind) -> Iterator[Engine]:
    """One engine for all tests that leave it as they found it."""
    with kind.opened() as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The shared engine; the test must leave nothing in it."""
    yield shared
    eventually(lambda: (shared.snapshot().num_running, shared.snapshot().num_waiting) == (0, 0))
    shared.check_health()


def test_an_answer_has_max_tokens_tokens_and_a_timeline(engine: Engine) -> None:
    started = time.time()
    whole = answer(engine, ask("a", max_tokens=7, ignore_eos=True))
    assert (len(whole.token_ids), whole.num_generated) == (7, 7)
    assert (whole.finish_reason, whole.stop_token_id, whole.error) == (FinishReason.LENGTH, None, "")
    assert all(0 <= token < engine.model.vocab_size for token in whole.token_ids)
    line = whole.timeline
    assert line is not None
    stamps = [line.queued_s, line.scheduled_s, line.first_token_s, line.finished_s]
    assert stamps == sorted(stamps)
    assert started - 0.1 <= stamps[0]
    assert stamps[-1] <= time.time() + 0.1
    assert (line.num_prompt_tokens, line.num_generated_tokens, line.num_retractions) == (len(PROMPT), 7, 0)


def test_the_first_event_has_a_timeline_as_far_as_it_goes(engine: Engine) -> None:
    async def first_event() -> TokenEvent:
        engine.submit(GenerateRequest("a", PROMPT, ENDLESS))
        async with aclosing(engine.stream("a")) as events:  # type: ignore[type-var]
            return await anext(events)

    first = asyncio.run(first_event())
    assert first.finish_reason is None
    line = first.timeline
    assert line is not None
    assert line.num_prompt_tokens == len(PROMPT)
    assert 0 < line.queued_s <= line.scheduled_s <= line.first_token_s
    assert line.finished_s == 0
    assert first.merged_with(TokenEvent("a", (7,), 99)).timeline is line


def test_every_event_counts_the_tokens_so_far(engine: Engine) -> None:
    seen = 0
    for event in asyncio.run(events_of(engine, ask("a", max_tokens=9, ignore_eos=True))):
        seen += len(event.token_ids)
        assert (event.request_id, event.num_generated) == ("a", seen)
    assert seen == 9


def test_greedy_answers_repeat(engine: Engine) -> None:
    first = answer(engine, ask("a", max_tokens=12, ignore_eos=True))
    assert first.token_ids == answer(engine, ask("b", max_tokens=12, ignore_eos=True)).token_ids
    other = answer(engine, ask("c", prompt=PROMPT[::-1], max_tokens=12, ignore_eos=True))
    assert first.token_ids != other.token_ids


def test_a_seed_decides_a_sampled_answer(engine: Engine) -> None:
    def sampled(request_id: str, seed: int) -> tuple[int, ...]:
        request = ask(request_id, max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)
        return answer(engine, request).token_ids

    assert sampled("a", 11) == sampled("b", 11)
    assert sampled("c", 11) != sampled("d", 12)


def test_a_stop_token_ends_the_answer_and_is_named(engine: Engine) -> None:
    free = answer(engine, ask("a", max_tokens=12, ignore_eos=True)).token_ids
    stop = free[5]
    stopped = answer(engine, ask("b", max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
    assert stopped.token_ids == free[: free.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_token_id) == (FinishReason.STOP, stop)
    assert stopped.num_generated == len(stopped.token_ids)


def test_the_models_end_tokens_end_the_answer(engine: Engine) -> None:
    for end in engine.model.eos_token_ids:
        ended = answer(engine, ask("a", max_tokens=8, logit_bias=((end, 100.0),)))
        assert (ended.token_ids, ended.finish_reason, ended.stop_token_id) == ((end,), FinishReason.STOP, end)


def test_ignore_eos_goes_on_to_max_tokens(engine: Engine) -> None:
    end = engine.model.eos_token_ids[0]
    whole = answer(engine, ask("a", max_tokens=5, logit_bias=((end, 100.0),), ignore_eos=True))
    assert (whole.token_ids, whole.finish_reason) == ((end,) * 5, FinishReason.LENGTH)


def test_end_tokens_are_impossible_before_min_tokens(engine: Engine) -> None:
    end = engine.model.eos_token_ids[0]
    whole = answer(engine, ask("a", max_tokens=8, min_tokens=3, logit_bias=((end, 100.0),)))
    assert len(whole.token_ids) == 4
    assert not set(whole.token_ids[:3]) & set(engine.model.eos_token_ids)
    assert (whole.token_ids[3], whole.finish_reason) == (end, FinishReason.STOP)


def test_logit_bias_forbids_a_token(engine: Engine) -> None:
    free = answer(engine, ask("a", max_tokens=6, ignore_eos=True)).token_ids
    banned = answer(
        engine, ask("b", max_tokens=6, ignore_eos=True, logit_bias=((free[0], -100.0),))
    ).token_ids
    assert free[0] not in banned


def test_logprobs_come_one_per_token_best_first(engine: Engine) -> None:
    whole = answer(engine, ask("a", max_tokens=6, ignore_eos=True, logprobs=3))
    assert [entry.token_id for entry in whole.logprobs] == list(whole.token_ids)
    for entry in whole.logprobs:
        values = [value for _, value in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0.0
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy: the token is the likeliest


def test_logprobs_zero_gives_the_token_alone_and_none_gives_nothing(engine: Engine) -> None:
    alone = answer(engine, ask("a", max_tokens=4, ignore_eos=True, logprobs=0))
    assert [entry.top for entry in alone.logprobs] == [()] * 4
    assert answer(engine, ask("b", max_tokens=4, ignore_eos=True)).logprobs == ()


def test_a_slow_reader_gets_merged_events(engine: Engine) -> None:
    async def read_late() -> tuple[TokenEvent, list[TokenEvent]]:
        finished = engine.snapshot().num_finished
        engine.submit(ask("a", max_tokens=24, ignore_eos=True))
        stream = engine.stream("a")
        first = await anext(stream)
        await soon(lambda: engine.snapshot().num_finished > finished)
        return first, [event async for event in stream]

    first, rest = asyncio.run(read_late())
    assert len(rest) == 1 or first.num_generated + len(rest[0].token_ids) < 24, (
        "one event waits, not one per token"
    )
    assert len(first.token_ids) + sum(len(event.token_ids) for event in rest) == 24
    assert rest[-1].finish_reason is FinishReason.LENGTH


def test_an_aborted_request_ends_with_abort(engine: Engine) -> None:
    async def abort_running() -> TokenEvent:
        engine.submit(GenerateRequest("a", PROMPT, ENDLESS))
        async for event in engine.stream("a"):
            if event.finish_reason is None:
                engine.abort("a")
        return event

    aborted = engine.snapshot().num_aborted
    last = asyncio.run(abort_running())
    assert last.finish_reason is FinishReason.ABORT
    assert last.num_generated < ENDLESS.max_tokens
    assert last.timeline is not None
    assert last.timeline.num_generated_tokens == last.num_generated
    assert engine.snapshot().num_aborted == aborted + 1


def test_aborting_an_unknown_or_finished_request_is_ignored(engine: Engine) -> None:
    answer(engine, ask("a", max_tokens=2))
    before = engine.snapshot()
    engine.abort("a")
    engine.abort("nobody")
    assert engine.snapshot().num_aborted == before.num_aborted


def test_a_reader_that_closes_early_aborts_its_request(engine: Engine) -> None:
    async def leave() -> None:
        engine.submit(GenerateRequest("a", PROMPT, ENDLESS))
        async with aclosing(engine.stream("a")) as stream:  # type: ignore[type-var]
            await anext(stream)
        await soon(lambda: engine.snapshot().num_running == 0)

    aborted = engine.snapshot().num_aborted
    asyncio.run(leave())
    assert engine.snapshot().num_aborted == aborted + 1


def test_a_reader_that_leaves_before_the_first_event_aborts_its_request(engine: Engine) -> None:
    async def leave() -> None:
        engine.submit(GenerateRequest("a", PROMPT, ENDLESS))
        await engine.stream("a").aclose()  # type: ignore[attr-defined]
        await soon(lambda: engine.snapshot().num_running + engine.snapshot().num_waiting == 0)

    aborted = engine.snapshot().num_aborted
    asyncio.run(leave())
    assert engine.snapshot().num_aborted == aborted + 1


def test_a_cancelled_or_forgotten_reader_aborts_its_request(engine: Engine) -> None:
    async def leave() -> None:
        aborted = engine.snapshot().num_aborted
        engine.submit(GenerateRequest("a", PROMPT, ENDLESS))

        async def read_all() -> None:
            async for _ in engine.stream("a"):
                pass

        task = asyncio.create_task(read_all())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await soon(lambda: engine.snapshot().num_aborted == aborted + 1)
        engine.submit(GenerateRequest("b", PROMPT, ENDLESS))
        stream = engine.stream("b")
        await anext(stream)
        del stream, task
        gc.collect()
        await soon(lambda: engine.snapshot().num_aborted == aborted + 2)

    asyncio.run(leave())


def test_an_id_is_refused_while_it_lives_and_free_afterwards(engine: Engine) -> None:
    async def twice() -> None:
        engine.submit(GenerateRequest("a", PROMPT, ENDLESS))
        with pytest.raises(InvalidRequest, match="a"):
            engine.submit(ask("a"))
        engine.abort("a")
        assert [event async for event in engine.stream("a")][-1].finish_reason is FinishReason.ABORT

    asyncio.run(twice())
    assert answer(engine, ask("a", max_tokens=3, ignore_eos=True)).num_generated == 3


def test_streaming_an_unknown_id_raises_key_error(engine: Engine) -> None:
    async def read() -> None:
        await anext(engine.stream("nobody"))

    with pytest.raises(KeyError):
        asyncio.run(read())


def test_a_request_beyond_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    limit = engine.model.max_model_len
    submitted = engine.snapshot().num_submitted
    with pytest.raises(PromptTooLong) as caught:
        engine.submit(ask("a", prompt=(20,) * (limit - 3), max_tokens=4))
    assert (caught.value.num_tokens, caught.value.max_tokens) == (limit + 1, limit)
    assert engine.snapshot().num_submitted == submitted


def test_token_ids_outside_the_vocabulary_are_refused_by_field(engine: Engine) -> None:
    vocab_size = engine.model.vocab_size
    for bad in (vocab_size, -1):
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(ask("a", prompt=(20, bad)))
        assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(ask("a", logit_bias=((vocab_size, 1.0),)))
    assert caught.value.field == "logit_bias"
    with pytest.raises(InvalidRequest, match="not in the vocabulary") as caught:
        engine.submit(ask("a", max_tokens=4, min_tokens=2, stop_token_ids=(2**31 - 1,)))
    assert caught.value.field == "stop_token_ids"


def test_snapshots_count_and_travel(engine: Engine) -> None:
    before = engine.snapshot()
    answer(engine, ask("a", max_tokens=5, ignore_eos=True))
    answer(engine, ask("b", max_tokens=6, ignore_eos=True))
    after = engine.snapshot()
    assert after.sequence > before.sequence
    assert after.num_steps > before.num_steps
    assert after.num_submitted - before.num_submitted == 2
    assert after.num_finished - before.num_finished == 2
    assert after.prompt_tokens - before.prompt_tokens == 2 * len(PROMPT)
    assert after.generated_tokens - before.generated_tokens == 11
    assert (after.num_running, after.num_waiting, after.waiting_tokens) == (0, 0, 0)
    assert abs(after.time_s - time.time()) < 30.0
    assert pickle.loads(pickle.dumps(after)) == after
    assert pickle.loads(pickle.dumps(engine.model)) == engine.model


def test_a_hundred_requests_at_once_get_their_own_answers(engine: Engine) -> None:
    prompts = [
        tuple(30 + (number * 7 + step) % 200 for step in range(5 + number % 9)) for number in range(100)
    ]
    with ThreadPoolExecutor(4) as threads:  # submit may be called from any thread
        list(
            threads.map(
                lambda n: engine.submit(ask(f"r{n}", prompts[n], max_tokens=4, ignore_eos=True)), range(100)
            )
        )

    async def read(request_id: str) -> tuple[int, ...]:
        return tuple([token async for event in engine.stream(request_id) for token in event.token_ids])

    async def read_all() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(read(f"r{number}") for number in range(100)))

    answers = asyncio.run(read_all())
    assert {len(tokens) for tokens in answers} == {4}
    for number in (0, 37, 99):
        assert (
            answer(engine, ask("alone", prompts[number], max_tokens=4, ignore_eos=True)).token_ids
            == answers[number]
        )
