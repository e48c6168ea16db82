"""Qwen3.5, dense and mixture of experts: Gated DeltaNet and gated softmax attention in turn.

Beyond the published models a configuration may name ``attention_window_sizes``: a window in tokens for some of its
softmax layers, null elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.pointwise import GatedActivation
from kernels.recurrent import chunked_problem
from worker.attention.base import AttentionShape
from worker.execution.weights import WeightSource
from worker.layers.attention import AttentionLayer, AttentionSizes, AttentionWeights, Rope, plain_frequencies
from worker.layers.decoder import Decoder, DecoderLayer, Mlp
from worker.layers.delta_net import DeltaNetLayer, DeltaNetSizes, DeltaNetWeights
from worker.layers.mlp import GatedMlp, MoeMlp, SharedExpert
from worker.models.base import BuildOptions, ExpertLayer, GroupCollector, Model, ModelConfig
from worker.models.expert_tensors import routed_experts
from worker.quantization.base import ExpertShape

log = logging.getLogger(__name__)

LINEAR, FULL = "linear_attention", "full_attention"
_FULL_EVERY = 4


@dataclass(frozen=True, slots=True)
class Qwen35Settings:
    """What config.json says, checked."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    eps: float
    tied: bool
    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    delta_net: DeltaNetSizes


def read_settings(config: ModelConfig) -> Qwen35Settings:
    """Reads a flat (text) configuration."""
    config.expect("hidden_act", "silu", default="silu")
    config.expect("attention_bias", False, default=False)
    config.expect("attn_output_gate", True, default=True)
    rope = config.rope(default_theta=1e7)
    if rope["rope_type"] != "default":
        raise config.refuse("rope_parameters.rope_type", rope["rope_type"], "'default'")
    num_layers = config.integer("num_hidden_layers")
    head_dim = config.integer("head_dim", default=256)
    every = config.integer("full_attention_interval", default=_FULL_EVERY)
    pattern = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    layer_types = config.sequence("layer_types", num_layers, (LINEAR, FULL), pattern)
    windows = config.windows("attention_window_sizes", num_layers)
    for i, window in enumerate(windows):
        if window is not None and layer_types[i] != FULL:
            raise config.refuse(
                f"attention_window_sizes[{i}]", window, f"null where layer_types has {LINEAR!r}"
            )
    return Qwen35Settings(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        max_position=config.integer("max_position_embeddings"),
        eps=config.number("rms_norm_eps", default=1e-6),
        tied=config.flag("tie_word_embeddings", False),
        layer_types=tuple(layer_types),
        windows=tuple(windows),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope_theta=float(rope["rope_theta"]),
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", 0.25))),
        delta_net=DeltaNetSizes(
            num_key_heads=config.integer("linear_num_key_heads"),
            num_value_heads=config.integer("linear_num_value_heads"),
            key_dim=config.integer("linear_key_head_dim"),
            value_dim=config.integer("linear_value_head_dim"),
            conv_width=config.integer("linear_conv_kernel_dim", default=4),
        ),
    )


def build_dense(raw: Mapping[str, Any], source: WeightSource, options: BuildOptions) -> Model:
    """Qwen3.5 with one gated MLP per layer."""
    config, settings = _open(raw, "Qwen3.5")
    inner = config.integer("intermediate_size")

    def mlp(prefix: str, layer: int) -> Mlp:
        return _gated_mlp(source, prefix, settings.hidden_size, inner, options.deterministic)

    return _build(settings, source, options, mlp)


def build_moe(raw: Mapping[str, Any], source: WeightSource, options: BuildOptions) -> Model:
    """Qwen3.5 with routed experts and a shared one in every layer."""
    config, settings = _open(raw, "Qwen3.5 MoE")
    config.expect("norm_topk_prob", True, default=True)
    num_experts = config.integer("num_experts", "num_local_experts")
    per_token = config.integer("num_experts_per_tok")
    shape = ExpertShape(settings.hidden_size, config.integer("moe_intermediate_size"))
    shared_size = config.integer("shared_expert_intermediate_size")

    def mlp(prefix: str, layer: int) -> Mlp:
        hidden = settings.hidden_size
        router = [
            source.take(f"{prefix}.gate.weight", (num_experts, hidden)),
            source.take(f"{prefix}.shared_expert_gate.weight", (1, hidden)),
            source.take(f"{prefix}.shared_expert.gate_proj.weight", (shared_size, hidden)),
            source.take(f"{prefix}.shared_expert.up_proj.weight", (shared_size, hidden)),
        ]
        shared_down = source.take(f"{prefix}.shared_expert.down_proj.weight", (hidden, shared_size))
        format, read = routed_experts(
            source, f"{prefix}.experts", num_experts, shape, options.format, options.dtype
        )
        experts = options.experts(
            ExpertLayer(layer, num_experts, per_token, shape, format, read, GatedActivation()), source
        )
        shared = SharedExpert(shared_size, shared_down)
        return MoeMlp(
            torch.cat(router), None, experts, num_experts, per_token, True, shared, options.deterministic
        )

    return _build(settings, source, options, mlp, num_experts, per_token)


def _open(raw: Mapping[str, Any], family: str) -> tuple[ModelConfig, Qwen35Settings]:
    outer = ModelConfig(raw, family)
    config = outer.part("text_config")
    settings = read_settings(config)
    return config, settings


def _build(
    settings: Qwen35Settings,
    source: WeightSource,
    options: BuildOptions,
    mlp: Callable[[str, int], Mlp],
    num_experts: int = 0,
    experts_per_token: int = 0,
) -> Model:
    prefix = "model.language_model" if source.has("model.language_model.embed_tokens.weight") else "model"
    # The vision tower is not served; the draft head (mtp.*) is read by the drafts that use it.
    source.leave("model.visual.", "mtp.")
    if not source.rehearsing and source.device.type == "cuda" and LINEAR in settings.layer_types:
        log.info("delta_net: %s", _how_prompts_are_computed(source, options))
    hidden = settings.hidden_size
    groups = GroupCollector(options.kv_dtype)
    embedding = source.take(f"{prefix}.embed_tokens.weight", (settings.vocab_size, hidden))
    layers = []
    for layer, layer_type in enumerate(settings.layer_types):
        name = f"{prefix}.layers.{layer}"
        build = _delta_net if layer_type == LINEAR else _attention
        layers.append(
            DecoderLayer(
                mixer_norm=_centred_norm(source, f"{name}.input_layernorm.weight", hidden),
                mixer=build(settings, source, options, groups, name, layer),
                mlp_norm=_centred_norm(source, f"{name}.post_attention_layernorm.weight", hidden),
                mlp=mlp(f"{name}.mlp", layer),
            )
        )
    final_norm = _centred_norm(source, f"{prefix}.norm.weight", hidden)
    if settings.tied:
        source.leave("lm_head.weight")
    head = embedding if settings.tied else source.take("lm_head.weight", (settings.vocab_size, hidden))
    frequencies = plain_frequencies(settings.rope_theta, settings.rotary_dim, source.device)
    rope = Rope(frequencies, 1.0, source.dtype)
    return Model(
        decoder=Decoder(embedding, layers, final_norm, head, rope, settings.eps, options.deterministic),
        groups=groups.groups(),
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_position,
        num_layers=settings.num_layers,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        conv_width=settings.delta_net.conv_width,
    )


def _how_prompts_are_computed(source: WeightSource, options: BuildOptions) -> str:
    problem = chunked_problem(source.device, source.dtype)
    if options.deterministic:
        problem = "deterministic=true"
    if problem is None:
        return "prompts are computed in chunks by fla-core"
    return f"prompts are computed token by token ({problem})"


def _centred_norm(source: WeightSource, name: str, size: int) -> torch.Tensor:
    return 1.0 + source.take(name, (size,), init="zeros", dtype=torch.float32)


def _gated_mlp(source: WeightSource, prefix: str, hidden: int, inner: int, deterministic: bool) -> GatedMlp:
    gate = source.take(f"{prefix}.gate_proj.weight", (inner, hidden))
    up = source.take(f"{prefix}.up_proj.weight", (inner, hidden))
    down = source.take(f"{prefix}.down_proj.weight", (hidden, inner))
    return GatedMlp(torch.cat([gate, up]), down, deterministic)


def _attention(
    settings: Qwen35Settings,
    source: WeightSource,
    options: BuildOptions,
    groups: GroupCollector,
    prefix: str,
    layer: int,
) -> AttentionLayer:
    heads, kv_heads, dim, hidden = (
        settings.num_heads,
        settings.num_kv_heads,
        settings.head_dim,
        settings.hidden_size,
    )
    name = f"{prefix}.self_attn"
    # q_proj has, head by head, the query's rows and then the gate's.
    query_gate = source.take(f"{name}.q_proj.weight", (heads * 2 * dim, hidden)).view(heads, 2, dim, hidden)
    key = source.take(f"{name}.k_proj.weight", (kv_heads * dim, hidden))
    value = source.take(f"{name}.v_proj.weight", (kv_heads * dim, hidden))
    query, gate = query_gate[:, 0].reshape(-1, hidden), query_gate[:, 1].reshape(-1, hidden)
    norms = [
        _centred_norm(source, f"{name}.q_norm.weight", dim).expand(heads, dim),
        _centred_norm(source, f"{name}.k_norm.weight", dim).expand(kv_heads, dim),
    ]
    shape = AttentionShape(
        heads, kv_heads, dim, dim**-0.5, window=settings.windows[layer], kv_dtype=options.kv_dtype
    )
    weights = AttentionWeights(
        inner=torch.cat([query, key, value, gate]),
        inner_bias=None,
        outer=source.take(f"{name}.o_proj.weight", (hidden, heads * dim)),
        outer_bias=None,
        head_norm=torch.cat(norms),
        sinks=None,
        gated=True,
    )
    sizes = AttentionSizes(heads, kv_heads, dim, groups.attention(layer, shape))
    return AttentionLayer(layer, sizes, weights, settings.eps, options.deterministic)


def _delta_net(
    settings: Qwen35Settings,
    source: WeightSource,
    options: BuildOptions,
    groups: GroupCollector,
    prefix: str,
    layer: int,
) -> DeltaNetLayer:
    sizes, hidden, name = settings.delta_net, settings.hidden_size, f"{prefix}.linear_attn"
    heads, values = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
    inner = [
        source.take(f"{name}.in_proj_qkv.weight", (sizes.conv_channels, hidden)),
        source.take(f"{name}.in_proj_z.weight", (values, hidden)),
        source.take(f"{name}.in_proj_b.weight", (heads, hidden)),
        source.take(f"{name}.in_proj_a.weight", (heads, hidden)),
    ]
    conv = source.take(f"{name}.conv1d.weight", (sizes.conv_channels, 1, sizes.conv_width))
    decay = source.take(f"{name}.A_log", (heads,), init="log_decay", dtype=torch.float32)
    weights = DeltaNetWeights(
        inner=torch.cat(inner),
        conv=conv.squeeze(1).t().contiguous(),
        decay_rate=-decay.exp(),
        decay_bias=source.take(f"{name}.dt_bias", (heads,), init="ones", dtype=torch.float32),
        norm=source.take(f"{name}.norm.weight", (sizes.value_dim,), init="ones", dtype=torch.float32),
        outer=source.take(f"{name}.out_proj.weight", (hidden, values)),
    )
    groups.state(sizes.rows(layer, options.dtype))
    return DeltaNetLayer(layer, sizes, weights, settings.eps, options.deterministic)
