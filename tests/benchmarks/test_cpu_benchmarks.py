"""The CPU benchmarks measure what they say, on a tiny model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.cpu_accuracy import answer_alone, answer_together, draw_lengths, judge
from benchmarks.cpu_engine import StepClock
from benchmarks.cpu_profile import PARTS, profile_decode
from benchmarks.cpu_reference import Timing, sample_prompts, time_reference
from benchmarks.cpu_serving import Duel, as_rows, open_engine
from tests.helpers.tiny import tiny_folder

FOLDER = tiny_folder("qwen3_5_moe", window=48)


def test_alone_and_together_agree_with_the_reference_through_the_engine() -> None:
    rng = random.Random(2)
    prompts = sample_prompts(FOLDER, [20, 200, *(rng.randrange(1, 90) for _ in range(15))], seed=3)
    together = answer_together(FOLDER, prompts, 6, rng)
    found = judge(FOLDER, prompts, together)
    assert (found.positions, found.mismatches) == (17 * 6, 0)
    assert found.max_logprob_diff < 1e-4
    assert judge(FOLDER, prompts[:2], answer_alone(FOLDER, prompts[:2], 6)).mismatches == 0


def test_a_wrong_token_is_counted() -> None:
    prompts = sample_prompts(FOLDER, [40], seed=1)
    answers = answer_alone(FOLDER, prompts, 4)
    wrong = (answers[0].token_ids[1] + 1) % 288
    answers[0].token_ids[1] = wrong
    answers[0].logprobs[1] = replace(answers[0].logprobs[1], token_id=wrong)
    found = judge(FOLDER, prompts, answers)
    assert found.mismatches >= 1
    assert found.max_logprob_diff > 1e-3


def test_lengths_reach_both_ends() -> None:
    lengths = draw_lengths(50, random.Random(0))
    assert (len(lengths), min(lengths), max(lengths)) == (50, 20, 1500)


def test_timings_count_prefill_and_decode_apart() -> None:
    prompts = sample_prompts(FOLDER, [30, 10, 50], seed=1)
    clock = StepClock()
    engine = open_engine(FOLDER, 1, clock)
    try:
        ours = clock.time(engine, prompts, 7)
    finally:
        engine.close()
    reference = time_reference(FOLDER, prompts, 7)
    assert (reference.prefill_tokens, reference.decode_tokens, len(reference.steps_s)) == (90, 18, 6)
    # The first row may have begun, and so decoded, before the last one came.
    assert (ours.prefill_tokens, ours.num_rows, len(ours.steps_s)) == (90, 3, 6)
    assert 12 <= ours.decode_tokens <= 18
    twice = Timing(1.0, 10, 2.0, 30, 3, (0.2, 0.1, 0.4)).joined(Timing(1.0, 10, 1.0, 30, 3, (0.3,)))
    assert (twice.prefill_rate, twice.decode_rate, twice.step_rate) == (10.0, 20.0, pytest.approx(15.0))
    duel = Duel("x_ratio", twice, Timing(4.0, 20, 6.0, 60, 3, (0.4,)))
    rows = as_rows([duel])
    assert [row["by"] for row in rows] == ["prefill", "quartile", "whole", "all"]
    assert [row["x_ratio"] for row in rows] == [2.0, 2.0, 2.0, 2.0]


def test_every_part_of_the_profile_is_found() -> None:
    shares = profile_decode(FOLDER, sample_prompts(FOLDER, [12] * 4, seed=1), 1)
    assert [share.name for share in shares[1:-1]] == [name for name, _, _ in PARTS]
    assert all(share.milliseconds > 0 for share in shares)
