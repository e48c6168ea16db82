"""Sampling rules per slot: what a row asks for is applied to it and to nobody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from kernels.sampling import gumbel_noise, noise_keys
from memory.api import StepCommands
from worker.api import SamplingParams
from worker.execution.sampler import SampledRows, Sampler
from worker.scheduling.step import StartedRow, StepPlan

VOCABULARY = 40
END = 3
GREEDY = SamplingParams(max_tokens=32, temperature=0.0)


def make_plan(
    slots: Sequence[int],
    num_computed: Sequence[int],
    samples: Sequence[bool] | None = None,
    masks: Mapping[int, np.ndarray] | None = None,
) -> StepPlan:
    rows = len(slots)
    return StepPlan(
        step=1,
        requests=np.arange(rows),
        slots=np.array(slots),
        query_len=np.ones(rows, dtype=np.int64),
        num_computed=np.array(num_computed),
        token_ids=np.zeros(rows, dtype=np.int64),
        samples=np.array([True] * rows if samples is None else samples),
        num_decode_rows=rows,
        groups={},
        commands=StepCommands(1),
        token_masks=masks or {},
    )


def make_sampler(*rows: tuple[int, SamplingParams, tuple[int, ...], int]) -> Sampler:
    """Rows are (slot, sampling, known tokens, how many of them are the prompt)."""
    sampler = Sampler(8, VOCABULARY, (END,), torch.device("cpu"))
    sampler.start(StartedRow(slot, slot, params, 11, known, n) for slot, params, known, n in rows)
    return sampler


def tokens(found: SampledRows) -> list[int]:
    return found.token_ids.tolist()


def ramp(*best: int) -> torch.Tensor:
    """Rows of logits that fall from 9 at ``best`` to lower ones at all other ids, in order of id."""
    logits = torch.linspace(1, 0, VOCABULARY).repeat(len(best), 1)
    logits[range(len(best)), list(best)] = 9.0
    return logits


def test_rules_touch_their_own_row_only() -> None:
    biased = SamplingParams(temperature=0.0, logit_bias=((7, 50.0), (99, 50.0)))
    sampler = make_sampler((0, GREEDY, (1,), 1), (5, biased, (1,), 1), (2, GREEDY, (1,), 1))
    logits = ramp(4, 4, 4)
    kept = logits.clone()
    assert tokens(sampler.sample(make_plan([0, 5, 2], [0, 0, 0]), logits)) == [4, 7, 4]
    assert torch.equal(logits, kept)


def test_a_slot_forgets_its_last_request() -> None:
    biased = SamplingParams(
        temperature=0.0, logit_bias=((7, 50.0),), frequency_penalty=2.0, min_tokens=5, max_tokens=9
    )
    sampler = make_sampler((0, biased, (1,), 1))
    sampler.start([StartedRow(0, 1, GREEDY, 1, (1,), 1)])
    assert tokens(sampler.sample(make_plan([0], [0]), ramp(END))) == [END]


def test_end_tokens_wait_for_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=2, stop_token_ids=(5,))
    sampler = make_sampler((0, params, (1, 1, 1), 3))
    logits = ramp(END)
    logits[0, 5] = 8.0
    for generated, expected in ((0, 0), (1, 0), (2, END)):
        assert tokens(sampler.sample(make_plan([0], [2 + generated]), logits)) == [expected]


def test_ignored_end_tokens_are_not_held_back() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=2, ignore_eos=True, stop_token_ids=(5,))
    sampler = make_sampler((0, params, (1,), 1))
    assert tokens(sampler.sample(make_plan([0], [0]), ramp(END))) == [END]
    assert tokens(sampler.sample(make_plan([0], [0]), ramp(5))) == [0]


def test_frequency_counts_what_was_drawn_and_what_was_known() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, frequency_penalty=2.0)
    # Token 4 is 9.0 ahead of 8.0 .. in steps of 2: prompt occurrences do not count, the one generated before does.
    sampler = make_sampler((3, params, (4, 4, 4, 4), 3))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [4, 6]] = torch.tensor([9.0, 4.5])
    drawn = [tokens(sampler.sample(make_plan([3], [3 + i]), logits))[0] for i in range(5)]
    assert drawn == [4, 4, 6, 4, 6]


def test_repetition_reaches_the_prompt_and_presence_does_not() -> None:
    repeated = SamplingParams(temperature=0.0, repetition_penalty=3.0)
    present = SamplingParams(temperature=0.0, presence_penalty=2.0)
    sampler = make_sampler((0, repeated, (4,), 1), (1, present, (4,), 1), (2, present, (1, 4), 1))
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 4], logits[:, 6] = 3.0, 2.0
    assert tokens(sampler.sample(make_plan([0, 1, 2], [0, 0, 1]), logits)) == [6, 4, 6]


def test_random_rows_use_seed_and_position_of_the_new_token() -> None:
    params = SamplingParams(temperature=1.0)
    sampler = make_sampler((0, GREEDY, (1,), 1), (1, params, (1,), 1))
    logits = torch.randn(2, VOCABULARY)
    noise = gumbel_noise(noise_keys(torch.tensor([11]), torch.tensor([17])), VOCABULARY)
    expected = [int(logits[0].argmax()), int((logits[1:] + noise).argmax())]
    assert tokens(sampler.sample(make_plan([0, 1], [16, 16]), logits)) == expected


def test_extreme_numbers_of_a_client_are_no_trouble() -> None:
    everything = SamplingParams(temperature=1.0, top_k=2**63)
    cold = SamplingParams(temperature=1e-300)
    sampler = make_sampler((0, everything, (1,), 1), (1, cold, (1,), 1))
    logits = torch.randn(2, VOCABULARY)
    noise = gumbel_noise(noise_keys(torch.tensor([11]), torch.tensor([17])), VOCABULARY)
    expected = [int((logits[:1] + noise).argmax()), int(logits[1].argmax())]
    assert tokens(sampler.sample(make_plan([0, 1], [16, 16]), logits)) == expected


def test_masks_bind_greedy_and_random_rows_and_leave_log_probabilities_raw() -> None:
    params = SamplingParams(temperature=1.0, logprobs=0)
    sampler = make_sampler(
        (0, SamplingParams(temperature=0.0, logprobs=1), (1,), 1), (1, params, (1,), 1), (2, GREEDY, (1,), 1)
    )
    only_33 = np.array([0, 1 << 1], dtype=np.int32)
    logits = ramp(4, 4, 4)
    plan = make_plan([0, 1, 2], [0, 0, 0], masks={0: only_33, 1: only_33})
    found = sampler.sample(plan, logits)
    assert tokens(found) == [33, 33, 4]
    raw = torch.log_softmax(logits[0], -1)
    assert found.logprobs[0].logprob == pytest.approx(raw[33].item())
    assert found.logprobs[0].top == ((4, pytest.approx(raw[4].item())),)
    assert found.logprobs[1].top == ()
    assert 2 not in found.logprobs


def test_only_rows_that_sample_are_drawn_and_masks_follow_plan_rows() -> None:
    sampler = make_sampler((0, GREEDY, (1,), 1), (1, GREEDY, (1,), 1), (2, GREEDY, (1,), 1))
    only_33 = np.array([0, 1 << 1], dtype=np.int32)
    plan = make_plan([0, 1, 2], [0, 0, 0], samples=[True, False, True], masks={2: only_33})
    assert tokens(sampler.sample(plan, ramp(4, 6))) == [4, 33]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=32, temperature=0.9, top_p=0.8, logprobs=2)]
)
def test_logits_as_the_model_computes_them_are_drawn_as_in_float32(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCABULARY).to(torch.bfloat16)
    logits[1, 5:9] = logits[1].max() + 1  # a tie
    plan = make_plan([0, 1, 2], [4, 4, 4])
    answers = [
        make_sampler(*((slot, params, (7, 8, 9, 10, 11), 5) for slot in range(3))).sample(plan, given)
        for given in (logits, logits.float())
    ]
    assert tokens(answers[0]) == tokens(answers[1])
    assert answers[0].logprobs == answers[1].logprobs
