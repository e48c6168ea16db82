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


def test_filters_keep_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20 if DEVICE == "cpu" else 4000
    keys = plain.noise_keys(torch.full((n,), 7, device=DEVICE), torch.arange(n, device=DEVICE))
    ones, none = torch.ones(n, device=DEVICE), torch.zeros(n, dtype=torch.int64, device=DEVICE)

    def kept(values: list[float], k: int = 0, p: float = 1.0, low: float = 0.0, few: int = n) -> set[int]:
        rows = torch.tensor(values, device=DEVICE).expand(few, -1).contiguous()
        filters = (ones[:few], none[:few] + k, ones[:few] * p, ones[:few] * low)
        return set(sampling.draw(rows, *filters, keys[:few]).tolist())

    assert kept([0.0, 3.0, 1.0, 1.0, 2.0, -1.0], k=3) == {1, 2, 3, 4}
    shares = torch.tensor([0.1, 0.5, 0.25, 0.15]).log().tolist()
    assert kept(shares, p=0.5) == {1}
    assert kept(shares, p=0.51) == {1, 2}
    assert kept(shares, p=0.76) == {1, 2, 3}
    assert kept(shares, p=1e-9) == {1}
    assert kept(shares, low=0.45) == {1, 2}
    assert kept(shares, low=1.0) == {1}
    assert kept(torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist(), k=2, p=0.55) == {0}
    # More than the best few: their order does not settle what is kept.
    monkeypatch.setattr(sampling, "_BEST", 2)
    assert kept(shares, k=3, p=0.6, low=0.1, few=6) == {1, 2}
    if DEVICE == "cuda":
        assert kept(shares, p=0.76) == {1, 2, 3}
        assert kept(shares, k=3) == {1, 2, 3}
    assert kept([-torch.inf, 1.0, -torch.inf], k=2, p=0.9) == {1}


def test_the_likeliest_token_is_the_lowest_of_equals() -> None:
    logits = torch.zeros(4, 151_936, device=DEVICE)
    logits[1, [150_000, 60, 6000]] = 1.0
    logits[2, 151_935] = 1.0
    logits[3] = -torch.inf
    logits[3, [5000, 4999]] = -3.0
    assert greedy(logits).tolist() == [0, 60, 151_935, 4999]
