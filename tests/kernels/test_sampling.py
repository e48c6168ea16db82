"""Sampling: noise that is a pure hash, filters by value, penalties by their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.sampling import allow_only, draw, greedy, gumbel_noise, noise_keys, penalise

NOISE_KEYS = [
    [1317927411, 2429548704],
    [3377115043, 1229209470],
    [354287229, 1940550388],
    [1443153306, 1271306957],
]
NOISE = [
    [3.856755, -1.239164, -0.114253, 1.036957, -0.257118],
    [0.547438, -1.333876, 0.662878, -1.755153, -0.082613],
    [-0.502722, -0.097943, 2.704695, -0.612922, -0.105199],
    [-1.261108, 3.839202, 2.281630, 0.974705, 0.773740],
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def drawn(
    logits: torch.Tensor, n: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """``n`` draws at positions 0.. from one row of logits."""
    keys = noise_keys(ints(*[7] * n), torch.arange(n))
    ones = torch.ones(n)
    return draw(logits.expand(n, -1), ones, ints(*[top_k] * n), ones * top_p, ones * min_p, keys)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 33, 4096])
def test_greedy_takes_the_first_of_the_largest(num_tokens: int) -> None:
    logits = torch.randint(-3, 3, (40, num_tokens + 2)).float()[:, 1:-1]
    best = logits.max(-1, keepdim=True).values
    expected = [row.index(True) for row in (logits == best).tolist()]
    assert greedy(logits).tolist() == expected
    logits[:, : num_tokens // 2] = -torch.inf
    assert greedy(logits).min() >= num_tokens // 2
    assert greedy(torch.full((2, num_tokens), -torch.inf)).tolist() == [0, 0]


def test_noise_is_the_same_for_all_time() -> None:
    # Recorded once; a change would change every seeded answer.
    keys = noise_keys(ints(0, 1, -1, 2**63 - 1), ints(0, 5, 5, 100000))
    assert keys.tolist() == NOISE_KEYS
    noise = gumbel_noise(keys, 5)
    torch.testing.assert_close(noise, torch.tensor(NOISE), rtol=1e-5, atol=1e-5)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_other_rows() -> None:
    keys = noise_keys(ints(3, 4), ints(9, 9))
    assert torch.equal(gumbel_noise(keys, 100)[:, :60], gumbel_noise(keys, 60))
    assert torch.equal(gumbel_noise(keys[1:], 60), gumbel_noise(keys, 60)[1:])


def test_noise_is_gumbel_and_differs_by_seed_and_position() -> None:
    noise = gumbel_noise(noise_keys(ints(*range(40)), ints(*[3] * 40)), 5000)
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.std().item() - math.pi / 6**0.5) < 0.01
    seeds = gumbel_noise(noise_keys(ints(1, 2, 1 << 32), ints(3, 3, 3)), 5000)
    positions = gumbel_noise(noise_keys(ints(1, 1), ints(3, 4)), 5000)
    for pair in (seeds[:2], seeds[1:], positions):
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.05


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    share = torch.bincount(drawn(logits, 40000), minlength=5) / 40000
    torch.testing.assert_close(share, torch.softmax(logits, 0), rtol=0, atol=0.01)


def test_temperature_divides_logits() -> None:
    n, logits = 20000, torch.tensor([1.0, 0.0, 0.5])
    keys = noise_keys(ints(*[7] * n), torch.arange(n))
    rows, ones = logits.expand(n, -1), torch.ones(n)
    tokens = draw(rows, ones * 0.25, ints(*[0] * n), ones, ones * 0, keys)
    share = torch.bincount(tokens, minlength=3) / n
    torch.testing.assert_close(share, torch.softmax(logits / 0.25, 0), rtol=0, atol=0.015)
    assert torch.equal(rows[0], logits)


def test_top_k_keeps_the_k_best_and_their_equals() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, -1.0])
    assert set(drawn(logits, 500, top_k=2).tolist()) == {1, 4}
    assert set(drawn(logits, 2000, top_k=3).tolist()) == {1, 2, 3, 4}
    assert set(drawn(logits, 4000, top_k=99).tolist()) == {0, 1, 2, 3, 4, 5}


def test_top_p_keeps_the_likeliest_up_to_the_one_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert set(drawn(logits, 2000, top_p=0.5).tolist()) == {1}
    assert set(drawn(logits, 2000, top_p=0.51).tolist()) == {1, 2}
    assert set(drawn(logits, 2000, top_p=0.76).tolist()) == {1, 2, 3}
    assert set(drawn(logits, 2000, top_p=1e-9).tolist()) == {1}


def test_min_p_keeps_a_share_of_the_best() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert set(drawn(logits, 2000, min_p=0.45).tolist()) == {1, 2}
    assert set(drawn(logits, 2000, min_p=1.0).tolist()) == {1}


def test_filters_act_on_what_the_earlier_ones_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two that top-k leaves the best one has 4/7: enough for 0.55, though 0.4 of all would not be.
    assert set(drawn(logits, 2000, top_k=2, top_p=0.55).tolist()) == {0}


def test_rows_with_and_without_filters_mix() -> None:
    logits = torch.randn(3, 50)
    keys = noise_keys(ints(1, 2, 3), ints(4, 5, 6))
    ones = torch.ones(3)
    mixed = draw(logits, ones, ints(0, 1, 0), torch.tensor([1.0, 1.0, 1e-9]), ones * 0, keys)
    assert mixed[1] == logits[1].argmax()
    assert mixed[2] == logits[2].argmax()
    assert mixed[0] == (logits[0] + gumbel_noise(keys[:1], 50)[0]).argmax()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 6144)
    logits[1, [700, 60, 6000]] = 1.0
    logits[2, 6143] = 1.0
    assert greedy(logits).tolist() == [0, 60, 6143]


def test_penalties_by_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5, 3.0]])
    seen = torch.tensor([[True, True, False, False, False, False]])
    counts = torch.tensor([[0, 0, 3, 1, 0, 0]], dtype=torch.int32)
    out = penalise(
        logits.clone(), seen, counts, torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([2.0])
    )
    expected = [1.0, -4.0, 0.5 - 0.75 - 0.5, -2.0 - 0.25 - 0.5, 0.5, 3.0]
    torch.testing.assert_close(out, torch.tensor([expected]))


@pytest.mark.parametrize("vocabulary", [31, 32, 70])
def test_masks_leave_what_their_bits_allow(vocabulary: int) -> None:
    allowed = torch.rand(2, vocabulary) > 0.5
    words = torch.zeros(2, -(-vocabulary // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << (token % 32)
    masks = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    logits = torch.randn(2, vocabulary)
    out = allow_only(logits.clone(), masks)
    assert torch.equal(out.isfinite(), allowed)
    assert torch.equal(out[allowed], logits[allowed])
