"""States carried over chunks by the kernel, and whole rows in chunks, against token by token."""

from __future__ import annotations

import pytest
import torch

from kernels._triton.delta_carry import carry_states
from kernels.recurrent import chunk_layout, chunked_problem, delta_rule_chunks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [70, 64, 130]


def views(pages: int, heads: int, d_k: int, d_v: int) -> torch.Tensor:
    """States with room around each page, as in the arena."""
    store = torch.randn(pages, heads * d_k * d_v + 64, device=DEVICE) / 4
    return torch.as_strided(store, (pages, heads, d_k, d_v), (store.stride(0), d_k * d_v, d_v, 1), 32)


def test_states_enter_chunks_and_come_to_lie_in_their_pages() -> None:
    torch.manual_seed(1)
    k_heads, heads, d_k, d_v = 1, 2, 32, 64
    layout = chunk_layout(LENGTHS, 4, DEVICE)
    tokens, chunks = sum(LENGTHS), len(layout.chunk_index)
    dtype = torch.float16
    key = (torch.randn(tokens, k_heads, d_k, device=DEVICE) / 6).to(dtype)
    written = torch.randn(tokens, heads, d_v, device=DEVICE).to(dtype)
    removed = (torch.randn(tokens, heads, d_k, device=DEVICE) / 6).to(dtype)
    sums = -torch.rand(tokens, heads, device=DEVICE)
    states = views(8, heads, d_k, d_v)
    page = torch.tensor([5, -1, 2, -1], device=DEVICE)
    start = torch.cat([layout.query_start, layout.query_start[-1:]])
    first = torch.cat([layout.first_chunk, layout.first_chunk[-1:]])
    expected = states.clone()
    entering, values = carry_states(key, written, removed, sums, states, page, start, first, chunks)
    for chunk, (row, number) in enumerate(layout.chunk_index.tolist()):
        if page[row] < 0:
            continue
        begin = int(start[row]) + number * 64
        part = slice(begin, min(begin + 64, int(start[row + 1])))
        for head in range(heads):
            state = expected[page[row], head]
            torch.testing.assert_close(entering[chunk, head].float(), state, atol=6e-3, rtol=2e-3)
            value = written[part, head].float() - removed[part, head].float() @ state
            torch.testing.assert_close(values[part, head].float(), value, atol=5e-3, rtol=5e-3)
            last = sums[part.stop - 1, head]
            fading = torch.exp2(last - sums[part, head]).unsqueeze(1)
            state.mul_(torch.exp2(last)).add_(key[part, 0].float().T @ (value * fading))
    torch.testing.assert_close(states, expected, atol=2e-2, rtol=2e-2)
    untouched = torch.tensor([0, 1, 3, 4, 6, 7], device=DEVICE)
    assert torch.equal(states[untouched], expected[untouched])


@pytest.mark.gpu
def test_rows_in_chunks_follow_the_rows_token_by_token() -> None:
    assert chunked_problem(DEVICE, torch.bfloat16) is None
    torch.manual_seed(2)
    k_heads, heads, dim = 2, 4, 128
    layout = chunk_layout(LENGTHS, 4, DEVICE)
    tokens = sum(LENGTHS)
    query, key = (
        torch.nn.functional.normalize(torch.randn(tokens, k_heads, dim, device=DEVICE), dim=-1) for _ in "qk"
    )
    query = query * dim**-0.5
    value = torch.randn(tokens, heads, dim, device=DEVICE)
    log_decay, beta = -torch.rand(tokens, heads, device=DEVICE), torch.rand(tokens, heads, device=DEVICE)
    states = views(8, heads, dim, dim)
    page = torch.tensor([5, 0, 2], device=DEVICE)
    exact = states.double()
    query, key, value = (x.to(torch.bfloat16).float() for x in (query, key, value))
    found = delta_rule_chunks(query, key, value, log_decay, beta, states, page, layout)
    share = heads // k_heads
    wanted = torch.empty(tokens, heads, dim, dtype=torch.float64, device=DEVICE)
    for row, number in enumerate(page.tolist()):
        for token in range(int(layout.query_start[row]), int(layout.query_start[row + 1])):
            q, k = (x[token].double().repeat_interleave(share, 0) for x in (query, key))
            state = exact[number] * log_decay[token].double().exp().view(-1, 1, 1)
            delta = (value[token].double() - torch.einsum("hkv,hk->hv", state, k)) * beta[token].double()[
                :, None
            ]
            state = state + k.unsqueeze(2) * delta.unsqueeze(1)
            exact[number] = state
            wanted[token] = torch.einsum("hkv,hk->hv", state, q)
    assert (found.double() - wanted).norm() < 1e-2 * wanted.norm()
    assert (states.double() - exact).norm() < 1e-2 * exact.norm()
