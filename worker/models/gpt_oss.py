"""GPT-OSS: sliding and full attention in turn, sinks, YaRN, and experts with biases, in bfloat16 or MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernels.pointwise import GatedActivation
from worker.attention.base import AttentionShape
from worker.execution.weights import WeightSource
from worker.layers.attention import AttentionLayer, AttentionSizes, AttentionWeights, Rope, yarn_frequencies
from worker.layers.decoder import Decoder, DecoderLayer
from worker.layers.mlp import MoeMlp
from worker.models.base import BuildOptions, ExpertLayer, GroupCollector, Model, ModelConfig
from worker.quantization.base import ExpertShape, Format
from worker.quantization.mxfp4 import GROUP, Mxfp4
from worker.quantization.unquantized import Unquantized

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class GptOssSettings:
    """What config.json says, checked."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    eps: float
    tied: bool
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Mapping[str, Any]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    swiglu_limit: float
    swiglu_alpha: float
    mxfp4: bool


def read_settings(config: ModelConfig, quantization: Mapping[str, Any] | None) -> GptOssSettings:
    """Reads and checks config.json."""
    config.expect("hidden_act", "silu", default="silu")
    config.expect("attention_bias", True, default=True)
    mxfp4 = quantization is not None
    if mxfp4 and not Mxfp4().matches(quantization):
        raise config.refuse("quantization_config", quantization, "quant_method 'mxfp4' or none")
    rope = config.rope(default_theta=150000.0)
    if rope["rope_type"] != "yarn":
        raise config.refuse("rope_parameters.rope_type", rope["rope_type"], "'yarn'")
    num_layers = config.integer("num_hidden_layers")
    pattern = [FULL if i % 2 else SLIDING for i in range(num_layers)]
    layer_types = config.sequence("layer_types", num_layers, (SLIDING, FULL), pattern)
    window = config.integer("sliding_window", default=128)
    return GptOssSettings(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        max_position=config.integer("max_position_embeddings"),
        eps=config.number("rms_norm_eps", default=1e-5),
        tied=config.flag("tie_word_embeddings", False),
        windows=tuple(window if kind == SLIDING else None for kind in layer_types),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", default=64),
        rope=rope,
        num_experts=config.integer("num_local_experts", "num_experts"),
        experts_per_token=config.integer("num_experts_per_tok", "experts_per_token"),
        intermediate_size=config.integer("intermediate_size"),
        swiglu_limit=config.number("swiglu_limit", default=7.0),
        swiglu_alpha=config.number("swiglu_alpha", default=1.702),
        mxfp4=mxfp4,
    )


def build(raw: Mapping[str, Any], source: WeightSource, options: BuildOptions) -> Model:
    """Builds GptOssForCausalLM."""
    settings = read_settings(ModelConfig(raw, "GPT-OSS"), raw.get("quantization_config"))
    hidden = settings.hidden_size
    groups = GroupCollector(options.kv_dtype)
    embedding = source.take("model.embed_tokens.weight", (settings.vocab_size, hidden))
    layers = []
    for layer in range(settings.num_layers):
        name = f"model.layers.{layer}"
        layers.append(
            DecoderLayer(
                mixer_norm=_norm(source, f"{name}.input_layernorm.weight", hidden),
                mixer=_attention(settings, source, options, groups, layer),
                mlp_norm=_norm(source, f"{name}.post_attention_layernorm.weight", hidden),
                mlp=_mlp(settings, source, options, layer),
            )
        )
    final_norm = _norm(source, "model.norm.weight", hidden)
    if settings.tied:
        source.leave("lm_head.weight")
    head = embedding if settings.tied else source.take("lm_head.weight", (settings.vocab_size, hidden))
    theta = float(settings.rope["rope_theta"])
    frequencies, factor = yarn_frequencies(theta, settings.head_dim, settings.rope, source.device)
    rope = Rope(frequencies, factor, source.dtype)
    return Model(
        decoder=Decoder(embedding, layers, final_norm, head, rope, settings.eps, options.deterministic),
        groups=groups.groups(),
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_position,
        num_layers=settings.num_layers,
        num_experts=settings.num_experts,
        experts_per_token=settings.experts_per_token,
    )


def _norm(source: WeightSource, name: str, size: int) -> torch.Tensor:
    return source.take(name, (size,), init="ones", dtype=torch.float32)


def _attention(
    settings: GptOssSettings,
    source: WeightSource,
    options: BuildOptions,
    groups: GroupCollector,
    layer: int,
) -> AttentionLayer:
    heads, kv_heads, dim = settings.num_heads, settings.num_kv_heads, settings.head_dim
    hidden, name = settings.hidden_size, f"model.layers.{layer}.self_attn"
    rows = (("q", heads), ("k", kv_heads), ("v", kv_heads))
    weights = AttentionWeights(
        inner=torch.cat([source.take(f"{name}.{p}_proj.weight", (n * dim, hidden)) for p, n in rows]),
        inner_bias=torch.cat(
            [source.take(f"{name}.{p}_proj.bias", (n * dim,), init="zeros") for p, n in rows]
        ),
        outer=source.take(f"{name}.o_proj.weight", (hidden, heads * dim)),
        outer_bias=source.take(f"{name}.o_proj.bias", (hidden,), init="zeros"),
        head_norm=None,
        sinks=source.take(f"{name}.sinks", (heads,), init="zeros"),
        gated=False,
    )
    shape = AttentionShape(
        heads,
        kv_heads,
        dim,
        dim**-0.5,
        window=settings.windows[layer],
        has_sinks=True,
        kv_dtype=options.kv_dtype,
    )
    sizes = AttentionSizes(heads, kv_heads, dim, groups.attention(layer, shape))
    return AttentionLayer(layer, sizes, weights, settings.eps, options.deterministic)


def _mlp(settings: GptOssSettings, source: WeightSource, options: BuildOptions, layer: int) -> MoeMlp:
    name, hidden, count = f"model.layers.{layer}.mlp", settings.hidden_size, settings.num_experts
    shape = ExpertShape(hidden, settings.intermediate_size, has_bias=True)
    activation = GatedActivation(settings.swiglu_limit, settings.swiglu_alpha)
    weight_format: Format = Mxfp4() if settings.mxfp4 else Unquantized(options.dtype)
    if settings.mxfp4 and source.is_made_up:
        read = _quantized_experts(source, f"{name}.experts", count, shape)
    elif settings.mxfp4 and source.has(f"{name}.experts.gate_up_proj_blocks"):
        read = _packed_experts(source, f"{name}.experts", count, shape)
    else:
        weight_format = Unquantized(options.dtype)
        read = _plain_experts(source, f"{name}.experts", count, shape)
    experts = options.experts(
        ExpertLayer(layer, count, settings.experts_per_token, shape, weight_format, read, activation), source
    )
    router = source.take(f"{name}.router.weight", (count, hidden))
    bias = source.take(f"{name}.router.bias", (count,), init="zeros")
    return MoeMlp(
        router, bias, experts, count, settings.experts_per_token, True, deterministic=options.deterministic
    )


def _biases(
    source: WeightSource, prefix: str, count: int, shape: ExpertShape
) -> Callable[[int], dict[str, torch.Tensor]]:
    """Gate and up lie interleaved on disk: even rows are the gate's."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    gate_up = source.take(f"{prefix}.gate_up_proj_bias", (count, 2 * inner), init="zeros")
    down = source.take(f"{prefix}.down_proj_bias", (count, hidden), init="zeros")
    return lambda expert: {
        "gate_proj.bias": gate_up[expert, 0::2],
        "up_proj.bias": gate_up[expert, 1::2],
        "down_proj.bias": down[expert],
    }


def _plain_experts(
    source: WeightSource, prefix: str, count: int, shape: ExpertShape
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    gate_up = source.take(f"{prefix}.gate_up_proj", (count, hidden, 2 * inner))
    down = source.take(f"{prefix}.down_proj", (count, inner, hidden))
    biases = _biases(source, prefix, count, shape)
    return lambda expert: {
        "gate_proj.weight": gate_up[expert, :, 0::2].t(),
        "up_proj.weight": gate_up[expert, :, 1::2].t(),
        "down_proj.weight": down[expert].t(),
        **biases(expert),
    }


def _quantized_experts(
    source: WeightSource, prefix: str, count: int, shape: ExpertShape
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """Random weights, drawn as floats when the first expert is asked for."""

    @cache
    def plain() -> Callable[[int], Mapping[str, torch.Tensor]]:
        return _plain_experts(source, prefix, count, shape)

    def read(expert: int) -> Mapping[str, torch.Tensor]:
        found = dict(plain()(expert))
        if source.rehearsing:
            return found
        names = [name for name in found if name.endswith(".weight")]
        matrices = {name.removesuffix(".weight"): found.pop(name) for name in names}
        return found | Mxfp4().quantize(matrices)

    return read


def _packed_experts(
    source: WeightSource, prefix: str, count: int, shape: ExpertShape
) -> Callable[[int], Mapping[str, torch.Tensor]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    stacked = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        groups = columns // GROUP
        blocks = source.take(f"{prefix}.{name}_blocks", (count, rows, groups, GROUP // 2), raw=True)
        scales = source.take(f"{prefix}.{name}_scales", (count, rows, groups), raw=True)
        stacked[name] = (("weight_blocks", blocks), ("weight_scales", scales))
    biases = _biases(source, prefix, count, shape)

    def read(expert: int) -> Mapping[str, torch.Tensor]:
        found = biases(expert)
        for kind, tensor in stacked["gate_up_proj"]:
            found[f"gate_proj.{kind}"] = tensor[expert, 0::2]
            found[f"up_proj.{kind}"] = tensor[expert, 1::2]
        for kind, tensor in stacked["down_proj"]:
            found[f"down_proj.{kind}"] = tensor[expert]
        return found

    return read
