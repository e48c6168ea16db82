"""Triton's in-place state updates and page copies against their plain-torch twins; padding rows touch nothing."""

from __future__ import annotations

import pytest
import torch

from kernels._reference import recurrent as reference
from kernels._triton import pages, recurrent
from kernels.recurrent import ChunkLayout, chunk_layout

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


def test_zeroing_skips_padding() -> None:
    grid = torch.randint(1, 256, (5, 1152), dtype=torch.uint8, device=DEVICE)
    expected = grid.clone()
    expected[[1, 4]] = 0
    pages.zero_pages(grid, torch.tensor([4, -1, 1], device=DEVICE))
    assert torch.equal(grid, expected)


def test_moved_pages_may_follow_one_another() -> None:
    grid = torch.randint(0, 256, (4, 256), dtype=torch.uint8, device=DEVICE)
    expected = grid[[2, 0, 1, 3]]
    pages.copy_pages(grid, torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([1, 2, 0], device=DEVICE))
    assert torch.equal(grid, expected)


def test_gates_of_the_delta_rule() -> None:
    torch.manual_seed(4)
    strength = torch.randn(5, 2 * 6 + 3, device=DEVICE)[:, 1:13] * 12
    bias, rate = torch.randn(6, device=DEVICE), -torch.rand(6, device=DEVICE)
    for found, wanted in zip(
        recurrent.delta_gates(strength, bias, rate), reference.delta_gates(strength, bias, rate), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def rows_of(lengths: list[int]) -> tuple[torch.Tensor, ChunkLayout]:
    return torch.arange(len(lengths), device=DEVICE) * 2 + 1, chunk_layout(lengths, 4, torch.device(DEVICE))


def test_long_rows_follow_the_twin_and_single_steps_bit_for_bit() -> None:
    torch.manual_seed(5)
    lengths, k_heads, v_heads, d_k, d_v = [5, 1, 3], 1, 2, 16, 40
    page, layout = rows_of(lengths)
    tokens = sum(lengths)
    query, key = (torch.randn(tokens, k_heads, d_k, device=DEVICE) / 4 for _ in range(2))
    value = torch.randn(tokens, v_heads, d_v, device=DEVICE)
    log_decay = -torch.rand(tokens, v_heads, device=DEVICE)
    decay, beta = log_decay.exp(), torch.rand(tokens, v_heads, device=DEVICE)
    states = torch.randn(7, v_heads, d_k, d_v, device=DEVICE)
    twin, stepped = states.clone(), states.clone()
    out = recurrent.delta_rule_rows(query, key, value, decay, beta, states, page, layout.query_start)
    want = reference.delta_rule_chunks(query, key, value, log_decay, beta, twin, page, layout)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, twin, atol=2e-5, rtol=2e-5)
    for place in range(max(lengths)):
        rows = [row for row, length in enumerate(lengths) if place < length]
        now = layout.query_start[rows] + place
        said = recurrent.delta_rule_step(
            query[now], key[now], value[now], decay[now], beta[now], stepped, page[rows]
        )
        assert torch.equal(said, out[now])
    assert torch.equal(stepped, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolved_rows_follow_the_twin_and_single_steps_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    lengths, channels = [5, 1, 2], 260
    page, layout = rows_of(lengths)
    x = torch.randn(sum(lengths), channels + 20).to(DEVICE, dtype)[:, :channels]
    weight = torch.randn(4, channels).to(DEVICE, dtype)
    states = torch.randn(9, 3, channels).to(DEVICE, dtype)
    twin, stepped = states.clone(), states.clone()
    out = recurrent.causal_conv_rows(x, weight, states, page, layout.token_row, layout.query_start)
    want = reference.causal_conv_rows(x, weight, twin, page, layout)
    close = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(out, want, atol=close, rtol=close)
    assert torch.equal(states, twin)
    for place in range(max(lengths)):
        rows = [row for row, length in enumerate(lengths) if place < length]
        now = layout.query_start[rows] + place
        assert torch.equal(recurrent.causal_conv_step(x[now], weight, stepped, page[rows]), out[now])
    assert torch.equal(stepped, states)
