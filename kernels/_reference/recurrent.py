"""Gated delta rule and short causal convolution in plain torch.

Per value head, with state S [d_k, d_v], log decay g and write strength beta, token t does
``S *= exp(g); S += k (beta (v - S^T k))^T; o = S^T q``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK_TOKENS = 64
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where the tokens of several rows lie when each row is cut into chunks of :data:`CHUNK_TOKENS`.

    Chunks are stored by their number inside the row, then by row, longest row first: the j-th chunks of all rows
    that have one lie together and belong to a leading run of rows.

    Attributes:
        slot: [tokens] int64, place of each token in [num_chunks * CHUNK_TOKENS].
        order: [rows] int64, rows from the longest to the shortest.
        active: for each j, how many rows have a j-th chunk.
        query_len: tokens of each row, in row order.
        conv_slot: [tokens] int64, place of each token when every row is preceded by the convolution's old columns.
        state_slot: [rows, width - 1] int64, places of the old columns; the new ones lie ``query_len`` further.
        token_row: [tokens] int64, the row of each token.
        query_start: [rows + 1] int64, the first token of each row.
        chunk_index: [chunks, 2] int64, row and number inside the row of each chunk, row by row.
        first_chunk: [rows] int64, place of each row's first chunk in it.
    """

    slot: torch.Tensor
    order: torch.Tensor
    active: tuple[int, ...]
    query_len: torch.Tensor
    conv_slot: torch.Tensor
    state_slot: torch.Tensor
    token_row: torch.Tensor
    query_start: torch.Tensor
    chunk_index: torch.Tensor
    first_chunk: torch.Tensor


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """What a GPU's kernels read of a :class:`ChunkLayout`, padded to sizes that captured graphs were made for.

    Attributes:
        token_row: [padded tokens] int64, -1 for padding.
        query_start: [padded rows + 1] int64; rows behind the real ones are empty.
        chunk_index: [padded chunks, 2] int64; those behind the real ones lie past the end of row 0.
        first_chunk: [padded rows] int64.
    """

    token_row: torch.Tensor
    query_start: torch.Tensor
    chunk_index: torch.Tensor
    first_chunk: torch.Tensor


def delta_gates(
    strength: torch.Tensor, decay_bias: torch.Tensor, decay_rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the face."""
    write, decay = strength.float().chunk(2, 1)
    log_decay = F.softplus(decay + decay_bias).mul_(decay_rate)
    return log_decay, log_decay.exp(), torch.sigmoid(write)


def delta_rule_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
) -> torch.Tensor:
    """One token per row; see the face."""
    state = state_pages.index_select(0, page)
    rows, k_heads, d_k = key.shape
    v_heads, d_v = value.shape[1:]
    share = v_heads // k_heads
    pair = torch.stack([key, query], 2).unsqueeze(2)  # [rows, k_heads, 1, 2, d_k]
    read = torch.matmul(pair, state.view(rows, k_heads, share, d_k, d_v)).view(rows, v_heads, 2, d_v)
    decay, beta = decay.unsqueeze(-1), beta.unsqueeze(-1)
    # S_new^T q = decay S^T q + (k . q) delta: both reads come from the old state, in one pass over it.
    delta = torch.addcmul(value, read[:, :, 0], decay, value=-1.0).mul_(beta)
    overlap = (key * query).sum(-1, keepdim=True)
    if share > 1:
        overlap, key = overlap.repeat_interleave(share, 1), key.repeat_interleave(share, 1)
    out = (read[:, :, 1] * decay).addcmul_(overlap, delta)
    state.mul_(decay.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), delta.unsqueeze(-2))
    state_pages.index_copy_(0, page, state)
    return out


def delta_rule_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state_pages: torch.Tensor,
    page: torch.Tensor,
    layout: ChunkLayout,
) -> torch.Tensor:
    """Chunked form over several rows; see the face."""
    share = value.shape[1] // key.shape[1]
    if share > 1:
        query, key = query.repeat_interleave(share, 1), key.repeat_interleave(share, 1)
    num_chunks = sum(layout.active)
    query, key, value = (_to_chunks(x, layout, num_chunks) for x in (query, key, value))
    log_decay, beta = (_to_chunks(x.unsqueeze(-1), layout, num_chunks) for x in (log_decay, beta))
    # Sums of strong decays run into the hundreds, and only their differences count: float32 would lose 1e-5 of them.
    total = log_decay.double().cumsum(-2)  # [chunks, heads, 64, 1]
    # Differences above the diagonal are positive and would overflow: they are cut before exp, and dropped after it.
    ratio = _exp_of_negative((total - total.transpose(-1, -2)).float()).tril_()
    grown = _exp_of_negative(total.float())
    key_beta = key * beta
    # (I + A) [U | W] = [beta v | beta exp(total) k], A strictly lower: the within-chunk corrections at once.
    lower = torch.matmul(key_beta, key.transpose(-1, -2)).mul_(ratio)
    right = torch.cat([value * beta, key_beta * grown], -1)
    solved = solve_unit_lower(lower.flatten(0, 1), right.flatten(0, 1)).view_as(right)
    written, removed = solved.split([value.shape[-1], key.shape[-1]], -1)
    inner = torch.matmul(query, key.transpose(-1, -2)).mul_(ratio)
    query = query * grown
    key = key * _exp_of_negative((total[..., -1:, :] - total).float())
    running_page = page.index_select(0, layout.order)
    running = state_pages.index_select(0, running_page)
    out = _over_chunks(query, key, written, removed, inner, grown[..., -1:, :], running, layout.active)
    state_pages.index_copy_(0, running_page, running)
    flat = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
    return flat.index_select(0, layout.slot)


def _exp_of_negative(x: torch.Tensor) -> torch.Tensor:
    """exp in place, for x <= 0. Below -80 it stays at 2e-35: denormals and -inf are ten times slower on a CPU."""
    return x.clamp_(-80.0, 0.0).exp_()


def solve_unit_lower(lower: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solves ``(I + strictly lower part of lower) x = right`` for [n, size, size] and [n, size, m], in place of
    ``right``; size is a multiple of 16.

    By forward substitution over blocks of 16 rows, whose own inverses come from substitution with all blocks side by
    side in the last dim: many small systems at once are slow in LAPACK, and powers of ``lower`` would cancel.
    """
    count, size, _ = lower.shape
    blocks = size // _BLOCK
    square = lower.view(count, blocks, _BLOCK, blocks, _BLOCK).diagonal(dim1=1, dim2=3)
    inverse = _invert_unit_lower(square.permute(1, 2, 0, 3).reshape(_BLOCK, _BLOCK, -1))
    inverse = inverse.view(_BLOCK, _BLOCK, count, blocks).permute(3, 2, 0, 1).contiguous()
    for block in range(blocks):
        start, stop = block * _BLOCK, (block + 1) * _BLOCK
        rows = right[:, start:stop]
        if block:
            rows = torch.baddbmm(rows, lower[:, start:stop, :start], right[:, :start], alpha=-1.0)
        right[:, start:stop] = torch.bmm(inverse[block], rows)
    return right


def _invert_unit_lower(lower: torch.Tensor) -> torch.Tensor:
    """Inverses of ``I + strictly lower part`` for [16, 16, n]."""
    inverse = torch.eye(_BLOCK, device=lower.device).unsqueeze(-1).repeat(1, 1, lower.shape[2])
    for row in range(1, _BLOCK):
        inverse[row, :row] = (lower[row, :row].unsqueeze(1) * inverse[:row, :row]).sum(0).neg_()
    return inverse


def _to_chunks(x: torch.Tensor, layout: ChunkLayout, num_chunks: int) -> torch.Tensor:
    """[tokens, heads, d] to [chunks, heads, 64, d]; slots without a token are zero and change nothing."""
    padded = x.new_zeros(num_chunks * CHUNK_TOKENS, *x.shape[1:], dtype=torch.float32)
    padded.index_copy_(0, layout.slot, x.float())
    return padded.view(num_chunks, CHUNK_TOKENS, *x.shape[1:]).transpose(1, 2).contiguous()


def _over_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    written: torch.Tensor,
    removed: torch.Tensor,
    inner: torch.Tensor,
    decay: torch.Tensor,
    running: torch.Tensor,
    active_rows: tuple[int, ...],
) -> torch.Tensor:
    """Carries ``running`` [rows, heads, d_k, d_v] from chunk to chunk in place; rows advance together."""
    out = torch.empty_like(written)
    start = 0
    for active in active_rows:
        now = slice(start, start + active)
        held = running[:active]
        fresh = written[now] - torch.matmul(removed[now], held)
        out[now] = torch.matmul(query[now], held) + torch.matmul(inner[now], fresh)
        held.mul_(decay[now]).add_(torch.matmul(key[now].transpose(-1, -2), fresh))
        start += active
    return out


def causal_conv_step(
    x: torch.Tensor, weight: torch.Tensor, state_pages: torch.Tensor, page: torch.Tensor
) -> torch.Tensor:
    """One token per row; see the face."""
    columns = torch.cat([state_pages.index_select(0, page), x.unsqueeze(1)], 1)
    state_pages.index_copy_(0, page, columns[:, 1:])
    return F.silu((columns * weight).sum(1))


def causal_conv_rows(
    x: torch.Tensor, weight: torch.Tensor, state_pages: torch.Tensor, page: torch.Tensor, layout: ChunkLayout
) -> torch.Tensor:
    """Several tokens per row; see the face."""
    width = weight.shape[0]
    columns = x.new_empty(x.shape[0] + layout.state_slot.numel(), x.shape[1])
    columns.index_copy_(0, layout.conv_slot, x)
    columns.index_copy_(0, layout.state_slot.flatten(), state_pages.index_select(0, page).flatten(0, 1))
    last = columns.shape[0] - width + 1
    mixed = columns[:last] * weight[0]
    for tap in range(1, width):
        mixed.addcmul_(columns[tap : tap + last], weight[tap])
    newest = (layout.state_slot + layout.query_len.unsqueeze(1)).flatten()
    state_pages.index_copy_(0, page, columns.index_select(0, newest).view(-1, width - 1, x.shape[1]))
    return F.silu(mixed.index_select(0, layout.conv_slot - (width - 1)))
