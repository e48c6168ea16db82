"""Triton's in-place state updates and page copies against their plain-torch twins; padding rows touch nothing."""

from __future__ import annotations

import torch

from kernels._reference import recurrent as reference
from kernels._triton import pages, recurrent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = [3, -1, 7, 0, 11]


def page_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    page = torch.tensor(PAGE, device=DEVICE)
    return page, page >= 0


def test_a_delta_rule_step_changes_only_its_rows_states() -> None:
    torch.manual_seed(1)
    rows, k_heads, v_heads, d_k, d_v = len(PAGE), 2, 4, 16, 24
    query, key = (torch.randn(rows, k_heads, d_k, device=DEVICE) for _ in range(2))
    value = torch.randn(rows, v_heads, d_v, device=DEVICE)
    decay, beta = (torch.rand(rows, v_heads, device=DEVICE) for _ in range(2))
    # A view with room around each page, as in the arena.
    store = torch.randn(12, v_heads * d_k * d_v + 40, device=DEVICE)
    states = torch.as_strided(store, (12, v_heads, d_k, d_v), (store.stride(0), d_k * d_v, d_v, 1), 8)
    expected = states.clone()
    margin = store[:, :8].clone(), store[:, -32:].clone()
    page, real = page_numbers()
    out = recurrent.delta_rule_step(query, key, value, decay, beta, states, page)
    want = reference.delta_rule_step(
        query[real], key[real], value[real], decay[real], beta[real], expected, page[real]
    )
    torch.testing.assert_close(out[real], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(store[:, :8], margin[0])
    assert torch.equal(store[:, -32:], margin[1])


def test_a_convolution_step_shifts_its_columns() -> None:
    torch.manual_seed(2)
    channels, width = 300, 4
    x = torch.randn(len(PAGE), channels, device=DEVICE)
    weight = torch.randn(width, channels, device=DEVICE)
    states = torch.randn(12, width - 1, channels, device=DEVICE)
    expected = states.clone()
    page, real = page_numbers()
    out = recurrent.causal_conv_step(x, weight, states, page)
    want = reference.causal_conv_step(x[real], weight, expected, page[real])
    torch.testing.assert_close(out[real], want, atol=1e-5, rtol=1e-5)
    assert torch.equal(states, expected)


def test_pages_are_copied_whole_and_skipped_pairs_are_left() -> None:
    grid = torch.randint(0, 256, (9, 1152), dtype=torch.uint8, device=DEVICE)
    expected = grid.clone()
    expected[[5, 6]] = expected[[1, 2]]
    pages.copy_pages(
        grid, torch.tensor([1, 2, 3, -1], device=DEVICE), torch.tensor([5, 6, -1, 7], device=DEVICE)
    )
    assert torch.equal(grid, expected)


def test_rows_are_written_into_their_slots() -> None:
    torch.manual_seed(3)
    key, value = (torch.randn(3, 2, 20, device=DEVICE) for _ in range(2))
    store = torch.zeros(6, 2, 4, 2, 20, device=DEVICE)
    page, offset = torch.tensor([4, -1, 1], device=DEVICE), torch.tensor([3, 0, 2], device=DEVICE)
    pages.write_kv(key, value, store[:, 0], store[:, 1], page, offset)
    expected = torch.zeros_like(store)
    for token in (0, 2):
        expected[page[token], 0, offset[token]] = key[token]
        expected[page[token], 1, offset[token]] = value[token]
    assert torch.equal(store, expected)
