"""Qwen3 mixture of experts: softmax attention with normed heads, routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.pointwise import GatedActivation
from worker.attention.base import AttentionShape
from worker.execution.weights import WeightSource
from worker.layers.attention import AttentionLayer, AttentionSizes, AttentionWeights, Rope, plain_frequencies
from worker.layers.decoder import Decoder, DecoderLayer
from worker.layers.mlp import MoeMlp
from worker.models.base import BuildOptions, ExpertLayer, GroupCollector, Model, ModelConfig
from worker.models.expert_tensors import routed_experts
from worker.quantization.base import ExpertShape


def build(raw: Mapping[str, Any], source: WeightSource, options: BuildOptions) -> Model:
    """Builds Qwen3MoeForCausalLM."""
    config = ModelConfig(raw, "Qwen3 MoE")
    rope = _check(config)
    hidden, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers, eps = config.integer("num_hidden_layers"), config.number("rms_norm_eps", default=1e-6)
    num_experts = config.integer("num_experts", "num_local_experts")
    per_token = config.integer("num_experts_per_tok")
    head_dim = config.integer("head_dim", default=hidden // config.integer("num_attention_heads"))
    groups = GroupCollector(options.kv_dtype)
    embedding = source.take("model.embed_tokens.weight", (vocab_size, hidden))
    layers = []
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        layers.append(
            DecoderLayer(
                mixer_norm=_norm(source, f"{name}.input_layernorm.weight", hidden),
                mixer=_attention(config, source, options, groups, layer, head_dim, eps),
                mlp_norm=_norm(source, f"{name}.post_attention_layernorm.weight", hidden),
                mlp=_mlp(config, source, options, layer, num_experts, per_token),
            )
        )
    final_norm = _norm(source, "model.norm.weight", hidden)
    tied = config.flag("tie_word_embeddings", False)
    if tied:
        source.leave("lm_head.weight")
    head = embedding if tied else source.take("lm_head.weight", (vocab_size, hidden))
    frequencies = plain_frequencies(float(rope["rope_theta"]), head_dim, source.device)
    return Model(
        decoder=Decoder(
            embedding,
            layers,
            final_norm,
            head,
            Rope(frequencies, 1.0, source.dtype),
            eps,
            options.deterministic,
        ),
        groups=groups.groups(),
        vocab_size=vocab_size,
        max_model_len=config.integer("max_position_embeddings"),
        num_layers=num_layers,
        num_experts=num_experts,
        experts_per_token=per_token,
    )


def _check(config: ModelConfig) -> Mapping[str, Any]:
    """Refuses what is not implemented; answers the rotary parameters."""
    config.expect("hidden_act", "silu", default="silu")
    config.expect("attention_bias", False, default=False)
    config.expect("use_sliding_window", False, default=False)
    config.expect("decoder_sparse_step", 1, default=1)
    config.expect("mlp_only_layers", [], default=[])
    rope = config.rope(default_theta=1e6)
    if rope["rope_type"] != "default":
        raise config.refuse("rope_parameters.rope_type", rope["rope_type"], "'default'")
    return rope


def _norm(source: WeightSource, name: str, size: int) -> torch.Tensor:
    return source.take(name, (size,), init="ones", dtype=torch.float32)


def _attention(
    config: ModelConfig,
    source: WeightSource,
    options: BuildOptions,
    groups: GroupCollector,
    layer: int,
    dim: int,
    eps: float,
) -> AttentionLayer:
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    hidden, name = config.integer("hidden_size"), f"model.layers.{layer}.self_attn"
    inner = [
        source.take(f"{name}.q_proj.weight", (heads * dim, hidden)),
        source.take(f"{name}.k_proj.weight", (kv_heads * dim, hidden)),
        source.take(f"{name}.v_proj.weight", (kv_heads * dim, hidden)),
    ]
    norms = [
        _norm(source, f"{name}.q_norm.weight", dim).expand(heads, dim),
        _norm(source, f"{name}.k_norm.weight", dim).expand(kv_heads, dim),
    ]
    weights = AttentionWeights(
        inner=torch.cat(inner),
        inner_bias=None,
        outer=source.take(f"{name}.o_proj.weight", (hidden, heads * dim)),
        outer_bias=None,
        head_norm=torch.cat(norms),
        sinks=None,
        gated=False,
    )
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, kv_dtype=options.kv_dtype)
    sizes = AttentionSizes(heads, kv_heads, dim, groups.attention(layer, shape))
    return AttentionLayer(layer, sizes, weights, eps, options.deterministic)


def _mlp(
    config: ModelConfig,
    source: WeightSource,
    options: BuildOptions,
    layer: int,
    num_experts: int,
    per_token: int,
) -> MoeMlp:
    hidden, name = config.integer("hidden_size"), f"model.layers.{layer}.mlp"
    shape = ExpertShape(hidden, config.integer("moe_intermediate_size"))
    router = source.take(f"{name}.gate.weight", (num_experts, hidden))
    format, read = routed_experts(
        source, f"{name}.experts", num_experts, shape, options.format, options.dtype
    )
    experts = options.experts(
        ExpertLayer(layer, num_experts, per_token, shape, format, read, GatedActivation()), source
    )
    renormalise = config.flag("norm_topk_prob", False)
    return MoeMlp(
        router, None, experts, num_experts, per_token, renormalise, deterministic=options.deterministic
    )
