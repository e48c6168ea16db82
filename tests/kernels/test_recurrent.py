"""Gated delta rule and convolution against the recurrence itself, token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kernels._reference.recurrent import solve_unit_lower
from kernels.recurrent import (
    causal_conv_rows,
    causal_conv_step,
    chunk_layout,
    delta_gates,
    delta_rule_chunks,
    delta_rule_step,
)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: outputs [t, v_heads, d_v] and the last state, by the definition."""
    query, key, value, log_decay, beta = (x.double() for x in (query, key, value, log_decay, beta))
    state = state.double().clone()
    share = value.shape[1] // key.shape[1]
    outputs = []
    for t in range(query.shape[0]):
        q, k = query[t].repeat_interleave(share, 0), key[t].repeat_interleave(share, 0)
        state = state * log_decay[t].exp()[:, None, None]
        delta = (value[t] - torch.einsum("hkv,hk->hv", state, k)) * beta[t][:, None]
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs), state


def inputs(
    num_tokens: int, k_heads: int, v_heads: int, d_k: int, d_v: int, decay: float
) -> list[torch.Tensor]:
    query = F.normalize(torch.randn(num_tokens, k_heads, d_k), dim=-1) * d_k**-0.5
    key = F.normalize(torch.randn(num_tokens, k_heads, d_k), dim=-1)
    value = torch.randn(num_tokens, v_heads, d_v)
    return [query, key, value, -decay * torch.rand(num_tokens, v_heads), torch.rand(num_tokens, v_heads)]


def state_pages(count: int, *shape: int) -> torch.Tensor:
    """NaN pages with more bytes than the rows need, as a strided view."""
    return torch.full((count, 2, *shape), math.nan)[:, 1]


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("decay", [0.01, 3.0, 40.0])
@pytest.mark.parametrize(
    ("k_heads", "v_heads", "d_k", "d_v"), [(2, 4, 16, 16), (1, 1, 8, 24), (3, 3, 64, 32)]
)
@pytest.mark.parametrize("lengths", [[2], [63, 64, 65], [1, 200, 3, 128], [130]])
def test_chunks_equal_the_recurrence(
    decay: float, k_heads: int, v_heads: int, d_k: int, d_v: int, lengths: list[int]
) -> None:
    torch.manual_seed(sum(lengths))
    tensors = inputs(sum(lengths), k_heads, v_heads, d_k, d_v, decay)
    pages = state_pages(len(lengths) + 3, v_heads, d_k, d_v)
    page = torch.randperm(len(lengths) + 3)[: len(lengths)]
    first = torch.randn(len(lengths), v_heads, d_k, d_v)
    pages[page] = first
    out = delta_rule_chunks(*tensors, pages, page, chunk_layout(lengths, 4, torch.device("cpu")))
    start = 0
    for row, length in enumerate(lengths):
        span = slice(start, start + length)
        expected, last = recurrence(*(x[span] for x in tensors), first[row])
        torch.testing.assert_close(out[span].double(), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(pages[page[row]].double(), last, rtol=1e-5, atol=2e-5)
        start += length
    untouched = [p for p in range(len(pages)) if p not in page.tolist()]
    assert pages[untouched].isnan().all()


@pytest.mark.usefixtures("twins")
def test_a_repeated_key_written_at_full_strength_stays_exact() -> None:
    # All keys alike and beta 1: the within-chunk system is at its worst, and powers of it would cancel.
    key = F.normalize(torch.randn(1, 1, 16), dim=-1).repeat(128, 1, 1)
    value, zeros = torch.randn(128, 1, 16), torch.zeros(128, 1)
    pages = torch.zeros(1, 1, 16, 16)
    page, layout = torch.tensor([0]), chunk_layout([128], 4, torch.device("cpu"))
    out = delta_rule_chunks(key.clone(), key, value, zeros, zeros + 1.0, pages, page, layout)
    torch.testing.assert_close(out, value, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("k_heads", "v_heads", "d_k", "d_v"), [(2, 4, 16, 16), (1, 1, 8, 24), (3, 3, 64, 32)]
)
def test_a_step_equals_the_recurrence(rows: int, k_heads: int, v_heads: int, d_k: int, d_v: int) -> None:
    query, key, value, log_decay, beta = inputs(rows, k_heads, v_heads, d_k, d_v, 3.0)
    pages = state_pages(rows + 2, v_heads, d_k, d_v)
    page = torch.randperm(rows + 2)[:rows]
    first = torch.randn(rows, v_heads, d_k, d_v)
    pages[page] = first
    out = delta_rule_step(query, key, value, log_decay.exp(), beta, pages, page)
    for row in range(rows):
        one = [x[row : row + 1] for x in (query, key, value, log_decay, beta)]
        expected, last = recurrence(*one, first[row])
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pages[page[row]].double(), last, rtol=1e-5, atol=1e-5)
    untouched = [p for p in range(len(pages)) if p not in page.tolist()]
    assert pages[untouched].isnan().all()


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [[1], [2], [7, 1, 3, 40]])
def test_convolution_of_rows_equals_a_padded_one(width: int, lengths: list[int]) -> None:
    channels = 12
    x, weight = torch.randn(sum(lengths), channels), torch.randn(width, channels)
    pages = state_pages(len(lengths) + 2, width - 1, channels)
    page = torch.randperm(len(lengths) + 2)[: len(lengths)]
    first = torch.randn(len(lengths), width - 1, channels)
    pages[page] = first
    out = causal_conv_rows(x, weight, pages, page, chunk_layout(lengths, width, x.device))
    start = 0
    for row, length in enumerate(lengths):
        columns = torch.cat([first[row], x[start : start + length]])
        mixed = F.conv1d(columns.t().unsqueeze(0), weight.t().unsqueeze(1), groups=channels)[0].t()
        torch.testing.assert_close(out[start : start + length], F.silu(mixed), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pages[page[row]], columns[-(width - 1) :], rtol=0, atol=0)
        start += length


@pytest.mark.usefixtures("twins")
def test_convolution_step_equals_a_row_of_one() -> None:
    x, weight, first = torch.randn(5, 12), torch.randn(4, 12), torch.randn(5, 3, 12)
    page = torch.tensor([6, 0, 3, 2, 5])
    ours, theirs = state_pages(7, 3, 12), state_pages(7, 3, 12)
    ours[page] = first
    theirs[page] = first
    step = causal_conv_step(x, weight, ours, page)
    rows = causal_conv_rows(x, weight, theirs, page, chunk_layout([1] * 5, 4, x.device))
    torch.testing.assert_close(step, rows, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[page], theirs[page])
    assert ours[[1, 4]].isnan().all()


@pytest.mark.parametrize("size", [16, 64])
def test_block_substitution_solves_unit_lower_systems(size: int) -> None:
    lower, right = torch.randn(5, size, size) * 0.3, torch.randn(5, size, 7)
    expected = torch.linalg.solve_triangular(
        lower.double().tril(-1) + torch.eye(size), right.double(), upper=False, unitriangular=True
    )
    # What lies on and above the diagonal is not part of the system.
    solved = solve_unit_lower(lower.clone(), right.clone())
    torch.testing.assert_close(solved.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_by_their_formulas(dtype: torch.dtype) -> None:
    strength = (torch.randn(5, 11).to(dtype) * 20)[:, 3:]
    bias, rate = torch.randn(4), -torch.rand(4) * 16
    log_decay, decay, beta = delta_gates(strength, bias, rate)
    wide = strength.double()
    expected = rate * (1 + (wide[:, 4:] + bias).exp()).log()
    torch.testing.assert_close(log_decay.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(decay, log_decay.exp(), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(beta.double(), wide[:, :4].sigmoid(), rtol=1e-5, atol=1e-7)
