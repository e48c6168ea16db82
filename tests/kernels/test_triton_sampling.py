"""Triton's sampling against its plain torch twin: the same keys, the same noise, the same tokens under every filter."""

from __future__ import annotations

import pytest
import torch

from kernels._reference import sampling as plain
from kernels._triton import sampling
from kernels.sampling import greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(6, 300), (2, 5000)] if DEVICE == "cpu" else [(6, 300), (64, 151_936), (3, 40_000)]


def test_keys_and_noise_are_the_twins() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 7], device=DEVICE)
    positions = torch.tensor([0, 5, 5, 100_000, 3, 2**33 + 1], device=DEVICE)
    keys = sampling.noise_keys(seeds, positions)
    assert torch.equal(keys, plain.noise_keys(seeds, positions))
    torch.testing.assert_close(
        sampling.gumbel_noise(keys, 3000), plain.gumbel_noise(keys, 3000), atol=3e-5, rtol=3e-5
    )


@pytest.mark.parametrize(("rows", "vocabulary"), SIZES)
@pytest.mark.parametrize("case", ["plain", "top_k", "top_p", "min_p", "all", "mixed"])
def test_tokens_are_the_twins(rows: int, vocabulary: int, case: str) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, vocabulary + 7).to(DEVICE)[:, :vocabulary] * 3
    temperature = torch.rand(rows, device=DEVICE) + 0.5
    on = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    if case == "mixed":
        on[::2] = False
    k = (
        torch.where(on, 20, 0)
        if case in ("top_k", "all", "mixed")
        else torch.zeros_like(on, dtype=torch.int64)
    )
    p = torch.where(on, 0.8, 1.0) if case in ("top_p", "all", "mixed") else torch.ones(rows, device=DEVICE)
    low = (
        torch.where(on, 0.05, 0.0) if case in ("min_p", "all", "mixed") else torch.zeros(rows, device=DEVICE)
    )
    keys = plain.noise_keys(torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE))
    found = sampling.draw(logits, temperature, k, p, low, keys)
    wanted = plain.draw(logits, temperature, k, p, low, keys)
    # Sums and logarithms are rounded otherwise: a token at a filter's very edge, or a tie in noise, may differ.
    assert (found != wanted).sum() <= (1 if rows > 6 else 0)


SHARES = [0.1, 0.5, 0.25, 0.15]
# Shares of tokens, top_k, top_p, min_p, and which tokens stay.
FILTERS = [
    (SHARES, 0, 1.0, 0.0, {0, 1, 2, 3}),
    (SHARES, 0, 0.5, 0.0, {1}),
    (SHARES, 0, 0.51, 0.0, {1, 2}),
    (SHARES, 0, 0.76, 0.0, {1, 2, 3}),
    (SHARES, 0, 1e-9, 0.0, {1}),
    (SHARES, 0, 1.0, 0.45, {1, 2}),
    (SHARES, 0, 1.0, 1.0, {1}),
    (SHARES, 3, 0.6, 0.1, {1, 2}),
    (SHARES, 3, 1.0, 0.0, {1, 2, 3}),
    ([0.4, 0.3, 0.2, 0.1], 2, 0.55, 0.0, {0}),
    ([0.2, 0.4, 0.2, 0.2], 2, 1.0, 0.0, {0, 1, 2, 3}),  # equals stay together
    ([0.1, 0.6, 0.2, 0.1], 3, 1.0, 0.0, {0, 1, 2, 3}),
    ([0.0, 1.0, 0.0, 0.0], 2, 0.9, 0.0, {1}),
]


@pytest.mark.parametrize("best", [512, 2])
def test_filters_keep_what_they_name(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    # With the best two alone their order does not settle what is kept: the row is searched.
    monkeypatch.setattr(sampling, "_BEST", best)
    cases = FILTERS if best > 2 or DEVICE == "cuda" else FILTERS[3:4] + FILTERS[7:9] + FILTERS[12:]
    logits = torch.tensor([shares for shares, *_ in cases], device=DEVICE).log()
    k, p, low = (torch.tensor([case[i] for case in cases], device=DEVICE) for i in (1, 2, 3))
    least = sampling.least_keys(logits, torch.ones(len(cases), device=DEVICE), k, p, low)
    bits = logits.view(torch.int32).long()
    keys = torch.where(bits < 0, -1 - bits, bits + (1 << 31))
    for row, case in enumerate(cases):
        kept = set((keys[row] >= least[row]).nonzero().flatten().tolist())
        assert kept == case[4], case


def test_the_likeliest_token_is_the_lowest_of_equals() -> None:
    logits = torch.zeros(4, 151_936, device=DEVICE)
    logits[1, [150_000, 60, 6000]] = 1.0
    logits[2, 151_935] = 1.0
    logits[3] = -torch.inf
    logits[3, [5000, 4999]] = -3.0
    assert greedy(logits).tolist() == [0, 60, 151_935, 4999]
