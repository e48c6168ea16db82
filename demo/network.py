"""The demonstration model written for training: every expert as one wide product, whole batches, three losses.

Computes the same function as transformers' Qwen3_5MoeForCausalLM with the window of
``worker.models.transformers_window``; ``tests/demo`` holds the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from demo import delta_rule
from demo.architecture import LINEAR, WINDOW, Shape, leaves

Function = Callable[..., object]


@dataclass(frozen=True)
class Losses:
    """Sums and means of one batch: scalars, in nats; balance is 1 for even use of the experts."""

    main: Tensor
    mtp: Tensor
    balance: Tensor
    router_z: Tensor
    main_by_token: Tensor
    correct: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm over the last axis: the scale is 1 + weight; computed in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first ``cos.shape[-1]`` elements of each head; x is [B, T, heads, d]."""
    dim = cos.shape[-1]
    head, rest = x[..., :dim], x[..., dim:]
    low, high = head.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return torch.cat((head * cos[:, None] + turned * sin[:, None], rest), dim=-1)


def choose_experts(logits: Tensor, count: int) -> Tensor:
    """Mask [N, experts] of the ``count`` largest logits of each row, lower index first among equals."""
    left = logits.detach().float()
    chosen = torch.zeros_like(left, dtype=torch.bool)
    index = torch.arange(left.shape[-1], device=left.device)
    for _ in range(count):
        best = index == left.argmax(-1, keepdim=True)
        chosen = chosen | best
        left = left.masked_fill(best, float("-inf"))
    return chosen


def moe(x: Tensor, w: dict[str, Tensor], count: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the routed and the shared experts to x of [N, H]; also returns the balance and z losses of the router.

    Every expert runs on every token and unchosen ones are multiplied by zero: at this width that is eight times the
    arithmetic but no sorting, no uneven shapes and two large products instead of sixty-four small ones.
    """
    h = rms_norm(x, w["post_attention_layernorm.weight"], eps)
    logits = functional.linear(h, w["mlp.gate.weight"]).float()
    chosen = choose_experts(logits, count)
    probs = logits.softmax(-1)
    kept = probs * chosen
    weights = (kept / kept.sum(-1, keepdim=True)).to(x.dtype)
    experts, width = weights.shape[-1], w["mlp.experts.down_proj"].shape[-1]
    both = functional.linear(h, w["mlp.experts.gate_up_proj"].flatten(0, 1)).view(-1, experts, 2, width)
    act = functional.silu(both[:, :, 0]) * both[:, :, 1] * weights[:, :, None]
    down = w["mlp.experts.down_proj"].transpose(1, 2).reshape(experts * width, -1)
    routed = torch.mm(act.reshape(-1, experts * width), down)
    inner = functional.silu(functional.linear(h, w["mlp.shared_expert.gate_proj.weight"]))
    inner = inner * functional.linear(h, w["mlp.shared_expert.up_proj.weight"])
    shared = functional.linear(inner, w["mlp.shared_expert.down_proj.weight"])
    shared = shared * functional.linear(h, w["mlp.shared_expert_gate.weight"]).sigmoid()
    share = chosen.float().mean(0) * (experts / count)
    balance = (share * probs.mean(0)).sum()
    return x + routed + shared, balance, logits.logsumexp(-1).square().mean()


def linear_inputs(x: Tensor, w: dict[str, Tensor], shape: Shape) -> tuple[Tensor, ...]:
    """Norm, projections, causal convolution and gates of a linear layer, cut into chunks; x is [B, T, H]."""
    h = rms_norm(x, w["input_layernorm.weight"], shape.eps)
    batch, length, _ = x.shape
    mixed = functional.linear(h, w["linear_attn.in_proj_qkv.weight"])
    taps = w["linear_attn.conv1d.weight"][:, 0]
    padded = functional.pad(mixed, (0, 0, shape.conv_kernel - 1, 0))
    mixed = functional.silu(sum(padded[:, i : i + length] * taps[:, i] for i in range(shape.conv_kernel)))
    k_dim = shape.linear_k_heads * shape.linear_dim
    q, k, v = mixed.split([k_dim, k_dim, shape.value_dim], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, shape.linear_dim)) for y in (q, k, v))
    beta = functional.linear(h, w["linear_attn.in_proj_b.weight"]).sigmoid()
    a = functional.linear(h, w["linear_attn.in_proj_a.weight"]).float()
    g = -w["linear_attn.A_log"].float().exp() * functional.softplus(a + w["linear_attn.dt_bias"].float())
    z = functional.linear(h, w["linear_attn.in_proj_z.weight"]).view(batch, length, -1, shape.linear_dim)
    return (z, *delta_rule.prepare_chunks(q, k, v, g, beta))


def linear_outputs(
    x: Tensor, z: Tensor, parts: tuple[Tensor, ...], w: dict[str, Tensor], shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads the chunks, norms, gates and projects them, then runs the experts; x is [B, T, H]."""
    y = delta_rule.read_chunks(*parts, x.shape[0]).to(x.dtype).float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + shape.eps)
    y = w["linear_attn.norm.weight"] * y.to(x.dtype)
    y = (y * functional.silu(z.float())).to(x.dtype)
    x = x + functional.linear(y.flatten(2), w["linear_attn.out_proj.weight"])
    out, balance, z_loss = moe(x.flatten(0, 1), w, shape.experts_per_token, shape.eps)
    return out.view_as(x), balance, z_loss


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention over the last ``window`` tokens, by blocks of that size; [B, heads, T, d] each, T a multiple."""
    _, _, length, dim = q.shape
    blocks = length // window

    def doubled(y: Tensor) -> Tensor:
        y = y.unflatten(2, (blocks, window))
        before = functional.pad(y, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        return torch.cat((before, y), dim=3)

    row = torch.arange(window, device=q.device)[:, None]
    col = torch.arange(2 * window, device=q.device)
    seen = (col > row) & (col <= row + window)
    seen = seen & ((col >= window) | (torch.arange(blocks, device=q.device) > 0)[:, None, None])
    scores = torch.matmul(q.unflatten(2, (blocks, window)), doubled(k).transpose(-1, -2)) * dim**-0.5
    probs = scores.float().masked_fill(~seen, float("-inf")).softmax(-1).to(q.dtype)
    return torch.matmul(probs, doubled(v)).flatten(2, 3)


def softmax_layer(
    x: Tensor, cos: Tensor, sin: Tensor, w: dict[str, Tensor], shape: Shape, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer with gated softmax attention, full or windowed; x is [B, T, H], cos and sin [T, rotary_dim]."""
    h = rms_norm(x, w["input_layernorm.weight"], shape.eps)
    q, gate = (
        functional.linear(h, w["self_attn.q_proj.weight"]).unflatten(-1, (shape.heads, -1)).chunk(2, dim=-1)
    )
    k = functional.linear(h, w["self_attn.k_proj.weight"]).unflatten(-1, (shape.kv_heads, -1))
    v = functional.linear(h, w["self_attn.v_proj.weight"]).unflatten(-1, (shape.kv_heads, -1))
    q = rotate(rms_norm(q, w["self_attn.q_norm.weight"], shape.eps), cos, sin)
    k = rotate(rms_norm(k, w["self_attn.k_norm.weight"], shape.eps), cos, sin)
    repeat = shape.heads // shape.kv_heads
    k, v = (y.repeat_interleave(repeat, dim=2).transpose(1, 2) for y in (k, v))
    q = q.transpose(1, 2)
    if window is None:
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mixed = windowed(q, k, v, window)
    mixed = mixed.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid()
    x = x + functional.linear(mixed, w["self_attn.o_proj.weight"])
    out, balance, z_loss = moe(x.flatten(0, 1), w, shape.experts_per_token, shape.eps)
    return out.view_as(x), balance, z_loss


def score(hidden: Tensor, norm: Tensor, table: Tensor, targets: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Final norm and tied head: (normed hidden, loss by token in fp32, squared log-partition, argmax equals target)."""
    normed = rms_norm(hidden, norm, eps)
    logits = torch.mm(normed.flatten(0, -2), table.t()).float()
    partition = logits.logsumexp(-1)
    picked = logits.gather(1, targets.reshape(-1, 1)).squeeze(1)
    return normed, (partition - picked), partition.square().mean(), picked >= logits.max(-1).values


def mtp_input(normed: Tensor, embedded: Tensor, w: dict[str, Tensor], eps: float) -> Tensor:
    """What enters the multi-token-prediction layer: fc of the next token's embedding beside the normed hidden."""
    left = rms_norm(embedded, w["mtp.pre_fc_norm_embedding.weight"], eps)
    right = rms_norm(normed, w["mtp.pre_fc_norm_hidden.weight"], eps)
    return functional.linear(torch.cat((left, right), dim=-1), w["mtp.fc.weight"])


class Network:
    """Runs the model over rows of tokens with given leaf tensors.

    ``wrap`` compiles one function (identity by default); ``length`` fixes T, a multiple of the window.
    """

    def __init__(
        self, shape: Shape, length: int, device: str, wrap: Callable[[Function], Function] | None = None
    ):
        if length % shape.window:
            raise ValueError(f"rows of {length} tokens: choose a multiple of the window {shape.window}")
        self.shape = shape
        wrap = wrap or (lambda f: f)
        self._linear_inputs, self._solve = wrap(linear_inputs), wrap(delta_rule.solve_chunks)
        self._linear_outputs, self._softmax_layer = wrap(linear_outputs), wrap(softmax_layer)
        self._score, self._mtp_input = wrap(score), wrap(mtp_input)
        self._leaves = leaves(shape)
        steps = torch.arange(0, shape.rotary_dim, 2, device=device).float() / shape.rotary_dim
        angles = torch.arange(length, device=device).float()[:, None] * shape.rope_theta**-steps
        self._angles = torch.cat((angles, angles), dim=-1)

    def _layer_weights(self, params: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The leaves by layer: unbound once, so that their gradients are stacked once."""
        by_layer: list[dict[str, Tensor]] = [{} for _ in range(self.shape.num_layers + 1)]
        for leaf in self._leaves:
            if leaf.layers:
                for n, part in zip(leaf.layers, params[leaf.name].unbind(0), strict=True):
                    by_layer[n][leaf.name] = part
        return by_layer

    def _linear_layer(self, x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        even = delta_rule.EvenGradient.apply
        z, q, k, v, g, beta, lower = map(even, self._linear_inputs(x, w, self.shape))
        inverse = delta_rule.UnitLowerInverse.apply(lower)
        values, keys, transition, update = map(even, self._solve(even(inverse), k, v, g, beta))
        states = even(delta_rule.StateScan.apply(transition, update))
        return self._linear_outputs(x, z, (q, k, g, values, keys, states), w, self.shape)

    def hidden(
        self, params: dict[str, Tensor], ids: Tensor, weights: list[dict[str, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states [B, T, H] before the final norm, and each layer's (balance, z) losses; ids is [B, T]."""
        x = functional.embedding(ids, params["model.embed_tokens.weight"])
        cos, sin = self._angles.cos().to(x.dtype), self._angles.sin().to(x.dtype)
        weights, routers = weights or self._layer_weights(params), []
        for kind, w in zip(self.shape.kinds, weights, strict=False):
            if kind == LINEAR:
                x, balance, z = self._linear_layer(x, w)
            else:
                window = self.shape.window if kind == WINDOW else None
                x, balance, z = self._softmax_layer(x, cos, sin, w, self.shape, window)
            routers.append((balance, z))
        return x, routers

    def losses(self, params: dict[str, Tensor], rows: Tensor, weights: Tensor) -> Losses:
        """Losses of rows [B, T + 2]: the model predicts columns 1..T, the draft layer columns 2..T+1.

        ``weights`` [B, T + 2] says how much each column counts as a target.
        """
        ids, nexts, afters = rows[:, :-2], rows[:, 1:-1], rows[:, 2:]
        shape, table = self.shape, params["model.embed_tokens.weight"]
        by_layer = self._layer_weights(params)
        x, routers = self.hidden(params, ids, by_layer)
        normed, by_token, z_out, correct = self._score(
            x, params["model.norm.weight"], table, nexts, shape.eps
        )
        draft = self._mtp_input(normed, functional.embedding(nexts, table), params, shape.eps)
        cos, sin = self._angles.cos().to(x.dtype), self._angles.sin().to(x.dtype)
        draft, *router = self._softmax_layer(draft, cos, sin, by_layer[-1], shape, None)
        routers.append((router[0], router[1]))
        _, drafted, _, _ = self._score(draft, params["mtp.norm.weight"], table, afters, shape.eps)
        main_weights, mtp_weights = weights[:, 1:-1].flatten(), weights[:, 2:].flatten()
        return Losses(
            main=(by_token * main_weights).sum() / main_weights.sum(),
            mtp=(drafted * mtp_weights).sum() / mtp_weights.sum(),
            balance=torch.stack([b for b, _ in routers]).mean(),
            router_z=torch.stack([z for _, z in routers]).mean() + 0.1 * z_out,
            main_by_token=by_token.detach(),
            correct=correct,
        )
