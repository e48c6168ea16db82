"""Reads a Hugging Face ``config.json`` into a :class:`ModelGeometry`.

Goes by keys and not by a list of model names: grouped-query and latent (MLA) attention, sliding windows, gated
DeltaNet and KDA layers, routed and shared experts in every placement that published configurations use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memory.api import PageKind
from worker.advise.formats import ExpertShape, checkpoint_format
from worker.advise.geometry import LayerGeometry, ModelGeometry
from worker.errors import ModelLoadError
from worker.model_folder import text_config

Config = Mapping[str, Any]
_LAYER_KINDS = {"linear_attention": PageKind.STATE, "sliding_attention": PageKind.WINDOW}
_WINDOWED_MODELS = ("mistral", "mixtral")
"""Families in which ``sliding_window`` alone turns windows on; others need layer types or use_sliding_window."""


def read_geometry(config: Config, name: str) -> ModelGeometry:
    """The geometry of a configuration; ModelLoadError names the key that is missing."""
    quantization = config.get("quantization_config") or text_config(config).get("quantization_config")
    config = text_config(config)
    try:
        kinds = _layer_kinds(config)
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", default=0)
        moe = _moe_layers(config) if experts else frozenset()
        layers = tuple(_layer(config, kind, layer in moe, experts) for layer, kind in enumerate(kinds))
        table = config["vocab_size"] * config["hidden_size"]
        return ModelGeometry(
            name=name,
            layers=layers,
            embedding_params=table,
            head_params=table,
            tied=bool(config.get("tie_word_embeddings", False)),
            final_params=config["hidden_size"],
            expert=_expert_shape(config) if moe else None,
            num_experts=experts if moe else 0,
            experts_per_token=_first(config, "num_experts_per_tok", "num_experts_per_token", "top_k")
            if moe
            else 0,
            max_model_len=int(config.get("max_position_embeddings") or config.get("model_max_length") or 0),
            checkpoint_format=checkpoint_format(quantization),
        )
    except KeyError as error:
        raise ModelLoadError(f"{name}: the configuration has no {error.args[0]}.") from error


def _first(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    if default is None:
        raise KeyError(" or ".join(names))
    return default


def _layer_kinds(config: Config) -> list[PageKind]:
    count = config["num_hidden_layers"]
    if config.get("layer_types"):
        kinds = [_LAYER_KINDS.get(kind, PageKind.FULL) for kind in config["layer_types"]]
    elif (config.get("linear_attn_config") or {}).get("kda_layers"):
        linear = set(config["linear_attn_config"]["kda_layers"])  # counted from 1
        kinds = [PageKind.STATE if layer + 1 in linear else PageKind.FULL for layer in range(count)]
    elif config.get("full_attention_interval"):
        interval = config["full_attention_interval"]
        kinds = [PageKind.STATE if (layer + 1) % interval else PageKind.FULL for layer in range(count)]
    elif config.get("model_type") == "gpt_oss":
        kinds = [PageKind.FULL if layer % 2 else PageKind.WINDOW for layer in range(count)]
    elif config.get("sliding_window") and config.get(
        "use_sliding_window", config.get("model_type") in _WINDOWED_MODELS
    ):
        kinds = [PageKind.WINDOW] * count
    else:
        kinds = [PageKind.FULL] * count
    if len(kinds) != count:
        raise ModelLoadError(f"layer_types names {len(kinds)} layers, num_hidden_layers {count}.")
    for layer, size in enumerate(config.get("attention_window_sizes") or []):
        if size is not None:
            kinds[layer] = PageKind.WINDOW
    return kinds


def _moe_layers(config: Config) -> frozenset[int]:
    count = config["num_hidden_layers"]
    if config.get("mlp_layer_types"):
        return frozenset(layer for layer, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse")
    step = config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or [])
    first = config.get("first_k_dense_replace") or 0
    return frozenset(layer for layer in range(first, count) if layer not in dense and (layer + 1) % step == 0)


def _expert_shape(config: Config) -> ExpertShape:
    return ExpertShape(
        hidden_size=config.get("moe_latent_size") or config["hidden_size"],
        intermediate_size=_first(config, "moe_intermediate_size", "intermediate_size"),
        has_bias=config.get("model_type") == "gpt_oss",
    )


def _layer(config: Config, kind: PageKind, is_moe: bool, num_experts: int) -> LayerGeometry:
    hidden = config["hidden_size"]
    matrices, others = _mlp_params(config, is_moe, num_experts)
    others += 2 * hidden  # the norms before attention and before the MLP
    if kind is PageKind.STATE:
        mixer = _delta_net if config.get("linear_num_key_heads") else _kda
        mixer_matrices, mixer_others, state_bytes = mixer(config)
        token_values = token_scales = index_values = 0
    else:
        attention = _latent_attention if config.get("kv_lora_rank") else _grouped_attention
        mixer_matrices, mixer_others, token_values = attention(config)
        # Latents have no form with scales.
        token_scales = 0 if config.get("kv_lora_rank") else 2 * _kv_heads(config)
        index_matrices, index_others, index_values = _index(config)
        mixer_matrices, mixer_others = mixer_matrices + index_matrices, mixer_others + index_others
        state_bytes = 0
    return LayerGeometry(
        kind=kind,
        matrix_params=matrices + mixer_matrices,
        other_params=others + mixer_others,
        num_experts=num_experts if is_moe else 0,
        token_values=token_values,
        token_scales=token_scales,
        index_values=index_values,
        window=_window(config) if kind is PageKind.WINDOW else 0,
        state_bytes=state_bytes,
    )


def _window(config: Config) -> int:
    sizes = [size for size in config.get("attention_window_sizes") or [] if size is not None]
    return int(sizes[0]) if sizes else int(config["sliding_window"])


def _mlp_params(config: Config, is_moe: bool, num_experts: int) -> tuple[int, int]:
    """(matrix weights, other weights) of a layer's MLP without its routed experts."""
    hidden = config["hidden_size"]
    if not is_moe:
        return 3 * hidden * config["intermediate_size"], 0
    router = hidden * num_experts
    if (
        config.get("model_type") == "gpt_oss"
        or config.get("scoring_func") == "sigmoid"
        or config.get("topk_method")
    ):
        router += num_experts  # a bias, of the logits or of the choice
    latent = config.get("moe_latent_size")
    matrices = 2 * hidden * latent if latent else 0
    router += latent or 0  # the norm of the latent
    if config.get("shared_expert_intermediate_size"):
        return matrices + 3 * hidden * config[
            "shared_expert_intermediate_size"
        ], router + hidden  # and its gate
    shared = _first(config, "n_shared_experts", "num_shared_experts", default=0)
    return matrices + 3 * hidden * shared * _first(config, "moe_intermediate_size", default=0), router


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _grouped_attention(config: Config) -> tuple[int, int, int]:
    """(matrix weights, other weights, cached numbers per token) of grouped-query attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = _kv_heads(config)
    head_dim = config.get("head_dim") or hidden // heads
    has_gate = bool(
        config.get("attn_output_gate", str(config.get("model_type")).startswith(("qwen3_5", "qwen3_next")))
    )
    queries = heads * head_dim * (2 if has_gate else 1)
    matrices = hidden * (queries + 2 * kv_heads * head_dim) + heads * head_dim * hidden
    others = 0
    if config.get("attention_bias") or config.get("model_type") == "gpt_oss":
        others += queries + 2 * kv_heads * head_dim + hidden
    if config.get("model_type") == "gpt_oss":
        others += heads  # sinks
    if str(config.get("model_type")).startswith("qwen3"):
        others += 2 * head_dim  # norms of queries and keys
    return matrices, others, 2 * kv_heads * head_dim


def _latent_attention(config: Config) -> tuple[int, int, int]:
    """(matrix weights, other weights, cached numbers per token) of multi-head latent attention: the cache holds the
    normed latent and the shared key part, not the heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    query_rank = config.get("q_lora_rank")
    queries = heads * (nope + rope)
    matrices = (hidden + queries) * query_rank if query_rank else hidden * queries
    matrices += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    if config.get("full_rank_output_gate"):
        matrices += hidden * heads * value
    return matrices, latent + (query_rank or 0), latent + rope


def _index(config: Config) -> tuple[int, int, int]:
    """(matrix weights, other weights, cached numbers per token) of DeepSeek's sparse-attention indexer."""
    if not config.get("index_n_heads"):
        return 0, 0, 0
    heads, head_dim = config["index_n_heads"], config["index_head_dim"]
    matrices = config["q_lora_rank"] * heads * head_dim + config["hidden_size"] * (head_dim + heads)
    return matrices, 2 * head_dim, head_dim


def _delta_net(config: Config) -> tuple[int, int, int]:
    """(matrix weights, other weights, state bytes per request) of a gated DeltaNet layer.

    State: value heads x d_k x d_v in float32; convolution: (kernel - 1) columns of q, k and v in bf16.
    """
    hidden = config["hidden_size"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = value_heads * value_dim
    kernel = config["linear_conv_kernel_dim"]
    channels = 2 * keys + values
    matrices = hidden * (channels + values + 2 * value_heads) + values * hidden
    others = channels * kernel + 2 * value_heads + value_dim
    state = 4 * value_heads * config["linear_key_head_dim"] * value_dim
    return matrices, others, state + 2 * channels * (kernel - 1)


def _kda(config: Config) -> tuple[int, int, int]:
    """(matrix weights, other weights, state bytes per request) of a Kimi delta-attention layer, states as above."""
    hidden = config["hidden_size"]
    linear = config.get("linear_attn_config") or {}
    heads = linear.get("num_heads") or config["linear_num_heads"]
    head_dim = linear.get("head_dim") or config["linear_head_dim"]
    kernel = linear.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"]
    width = heads * head_dim
    low_rank = head_dim * (hidden + width)
    gate = hidden * width if config.get("full_rank_output_gate") else low_rank
    matrices = 4 * hidden * width + low_rank + gate + hidden * heads  # q, k, v, out; decay; gate; beta
    others = 3 * width * kernel + width + heads + head_dim
    return matrices, others, 4 * heads * head_dim * head_dim + 2 * 3 * width * (kernel - 1)
