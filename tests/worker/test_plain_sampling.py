"""The plain sampling rules against numbers worked out by hand and against transformers' own processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as reference

from worker.api import SamplingParams
from worker.engines.plain_sampling import (
    adjusted_logits,
    choose_token,
    kept_probabilities,
    position_generator,
    token_logprobs,
)

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.5])
NOBODY: frozenset[int] = frozenset()


def choose(logits: torch.Tensor = LOGITS, ends: frozenset[int] = NOBODY, seed: int = 0, **rules: Any) -> int:
    generated = rules.pop("generated", ())
    return choose_token(logits, SamplingParams(**rules), (0,), generated, ends, seed)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert choose(temperature=0.0) == 3
    assert choose(torch.tensor([1.0, 4.0, 4.0, 4.0]), temperature=0.0) == 1


@pytest.mark.parametrize("temperature", [1e-7, 1e-38, 1e-45])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert choose(temperature=temperature) == 3, (
        "a quotient that overflows would end the engine, not the request"
    )


def test_penalties_and_bias_in_numbers() -> None:
    rules = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((2, 10.0), (0, -1.0)),
    )
    adjusted = adjusted_logits(LOGITS, rules, prompt=(0, 1), generated=(3, 3, 1))
    # 0: 2/2 - 1 (bias). 1: -1*2 - 0.5 - 0.25. 2: 0.5 + 10. 3: 3/2 - 0.5 - 2*0.25. 4: untouched.
    assert adjusted.tolist() == [0.0, -2.75, 10.5, 0.5, 0.5]
    assert LOGITS.tolist() == [2.0, -1.0, 0.5, 3.0, 0.5], "the raw logits stay"


def test_end_tokens_wait_for_min_tokens() -> None:
    ends = frozenset({3})
    assert choose(ends=ends, temperature=0.0, min_tokens=2, max_tokens=8, generated=(4,)) == 0
    assert choose(ends=ends, temperature=0.0, min_tokens=2, max_tokens=8, generated=(4, 4)) == 3


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()

    def kept(**rules: Any) -> list[float]:
        return kept_probabilities(logits, SamplingParams(**rules)).tolist()

    assert kept(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert kept(top_p=0.7) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)
    assert kept(top_p=0.71) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert kept(top_p=1e-9) == [1, 0, 0, 0]
    assert kept(min_p=0.49) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert kept(top_k=2, top_p=0.5) == [1, 0, 0, 0], "top-p looks at what top-k left: 4/7 is enough"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("rules", "processor"),
    [
        ({"top_k": 7}, reference.TopKLogitsWarper(7)),
        ({"top_p": 0.8}, reference.TopPLogitsWarper(0.8)),
        ({"min_p": 0.2}, reference.MinPLogitsWarper(0.2)),
    ],
)
def test_filters_equal_transformers(rules: dict[str, Any], processor: Any, seed: int) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(seed)) * 3
    expected = processor(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(0)
    torch.testing.assert_close(kept_probabilities(logits, SamplingParams(**rules)), expected)


def test_the_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    processor = reference.RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([[3, 4, 3, 9]]), logits[None].clone())[0]
    torch.testing.assert_close(
        adjusted_logits(logits, SamplingParams(repetition_penalty=1.3), prompt=(3, 4), generated=(3, 9)),
        expected,
    )


def test_samples_follow_the_probabilities() -> None:
    expected = torch.softmax(LOGITS / 0.7, 0)
    drawn = torch.bincount(
        torch.tensor([choose(seed=seed, temperature=0.7) for seed in range(4000)]), minlength=5
    )
    chi_square = float(((drawn - 4000 * expected) ** 2 / (4000 * expected)).sum())
    assert (
        chi_square < 18.5
    )  # 4 degrees of freedom: exceeded once in 1,000 sets of seeds, and these are fixed


def test_noise_depends_on_seed_and_position() -> None:
    def draw(seed: int, position: int) -> float:
        return float(torch.rand(1, generator=position_generator(seed, position)))

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(seed, position) for seed in range(-2, 3) for position in range(5)}) == 25


def test_logprobs_are_of_the_raw_logits_best_first_and_lowest_id_first() -> None:
    entry = token_logprobs(LOGITS, 2, 4)
    exact = torch.log_softmax(LOGITS, 0).tolist()
    assert entry.logprob == pytest.approx(exact[2])
    assert [token for token, _ in entry.top] == [3, 0, 2, 4]
    assert [value for _, value in entry.top] == pytest.approx([exact[3], exact[0], exact[2], exact[4]])
