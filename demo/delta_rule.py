"""Computes the gated delta rule over whole sequences, differentiably, in chunks of batched matrix products.

Per head, with state S of [d_k, d_v]: S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T and
o_t = S_t^T q_t (Yang et al., "Gated Delta Networks", 2024). Within a chunk the updates are solved at once through the
inverse of a unit lower triangular matrix; between chunks the state follows S' = M S + N, a short loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
Compiler = Callable[[Callable[..., object]], Callable[..., object]]


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A of [..., n, n], n a power of two, by doubling diagonal blocks.

    Doubling is exact algebra and its intermediate values are those of true inverses of sub-blocks; a product of
    powers of A would be shorter but overflows the mantissa when keys repeat.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, lower: Tensor) -> Tensor:
        n = lower.shape[-1]
        flat = lower.reshape(-1, n, n)
        blocks = torch.ones(flat.shape[0], n, 1, 1, dtype=flat.dtype, device=flat.device)
        size = 1
        while size < n:
            pairs = n // (2 * size)
            tiles = flat.view(-1, pairs, 2, size, pairs, 2, size)
            corner = tiles[:, :, 1, :, :, 0, :].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
            upper_left, lower_right = blocks[:, 0::2], blocks[:, 1::2]
            if size == 1:
                coupling = -corner
            else:
                coupling = -torch.matmul(torch.matmul(lower_right, corner), upper_left)
            joined = torch.zeros(
                flat.shape[0], pairs, 2 * size, 2 * size, dtype=flat.dtype, device=flat.device
            )
            joined[..., :size, :size] = upper_left
            joined[..., size:, size:] = lower_right
            joined[..., size:, :size] = coupling
            blocks, size = joined, 2 * size
        inverse = blocks.reshape(lower.shape)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -torch.matmul(torch.matmul(transposed, grad), transposed)


class EvenGradient(torch.autograd.Function):
    """Identity whose gradient is made contiguous: compiled backward passes are built for contiguous ones."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return grad.contiguous()


class StateScan(torch.autograd.Function):
    """States before each chunk, from S_0 = 0 and S_{c+1} = M_c S_c + N_c; inputs and output [batch, chunks, d, d]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, transition: Tensor, update: Tensor) -> Tensor:
        states = torch.empty_like(update)
        states[:, 0] = 0
        for c in range(update.shape[1] - 1):
            torch.baddbmm(update[:, c], transition[:, c], states[:, c], out=states[:, c + 1])
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        back = transition.transpose(-1, -2)
        carried = torch.empty_like(states)
        carried[:, -1] = 0
        for c in range(states.shape[1] - 1, 0, -1):
            torch.baddbmm(grad[:, c], back[:, c], carried[:, c], out=carried[:, c - 1])
        return torch.matmul(carried, states.transpose(-1, -2)), carried


def prepare_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Normalises, scales and cuts inputs of [B, T, heads, d] (q, k with fewer heads) and [B, T, heads] into chunks.

    Returns (q, k, v, g, beta, lower): the first three [B * heads, chunks, 64, d] in fp32, g summed inside its
    chunk and beta [B * heads, chunks, 64], lower the strictly lower triangular coupling [..., 64, 64].
    """
    batch, length, heads, _ = v.shape
    chunks = length // CHUNK
    repeat = heads // q.shape[2]

    def cut(x: Tensor) -> Tensor:
        tail = x.shape[3:]
        x = x.float().view(batch, chunks, CHUNK, heads, *tail)
        return x.transpose(1, 3).transpose(2, 3).reshape(batch * heads, chunks, CHUNK, *tail)

    def normalised(x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    q = cut((normalised(q) * q.shape[-1] ** -0.5).repeat_interleave(repeat, dim=2))
    k = cut(normalised(k).repeat_interleave(repeat, dim=2))
    v, g, beta = cut(v), cut(g).cumsum(-1), cut(beta)
    strict = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~strict, float("-inf")).exp()
    lower = torch.matmul(k * beta[..., None], k.transpose(-1, -2)) * decay
    return q, k, v, g, beta, lower


def solve_chunks(inverse: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Per chunk: the values U and keys W of its solved updates, and M, N of the state's step across it."""
    values = torch.matmul(inverse, v * beta[..., None])
    keys = torch.matmul(inverse, k * (beta * g.exp())[..., None])
    last = g[..., -1:]
    decayed = (k * (last - g).exp()[..., None]).transpose(-1, -2)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    transition = last.exp()[..., None] * eye - torch.matmul(decayed, keys)
    return values, keys, transition, torch.matmul(decayed, values)


def read_chunks(
    q: Tensor, k: Tensor, g: Tensor, values: Tensor, keys: Tensor, states: Tensor, batch: int
) -> Tensor:
    """Outputs [B, T, heads, d_v] in fp32 from the states before each chunk and the chunk's own updates."""
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    scores = torch.matmul(q, k.transpose(-1, -2)) * decay
    fresh = values - torch.matmul(keys, states)
    out = torch.matmul(q * g.exp()[..., None], states) + torch.matmul(scores, fresh)
    rows, chunks, _, dim = out.shape
    out = out.view(batch, rows // batch, chunks * CHUNK, dim)
    return out.transpose(1, 2).contiguous()


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from an empty state.

    q, k: [B, T, k_heads, d]; v: [B, T, v_heads, d]; g (log decay, <= 0) and beta: [B, T, v_heads]. Any T: the tail is
    padded. Returns [B, T, v_heads, d] in fp32.
    """
    batch, length = v.shape[:2]
    pad = -length % CHUNK
    if pad:
        q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (functional.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    q, k, v, g, beta, lower = prepare_chunks(q, k, v, g, beta)
    inverse = UnitLowerInverse.apply(lower)
    values, keys, transition, update = solve_chunks(inverse, k, v, g, beta)
    states = StateScan.apply(transition, update)
    return read_chunks(q, k, g, values, keys, states, batch)[:, :length]
