"""Makes stock transformers models obey ``attention_window_sizes``, the configuration key for windowed layers.

Some architectures (Qwen3.5-MoE among them) know linear and full attention only, so a checkpoint with windowed layers
names them "full_attention" and adds one window size per layer (null: none). Stock loading is then exact up to the
window; ``apply_attention_windows`` makes it exact beyond.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)

FIRST_CACHED_VERSION = (5, 20)
"""Earlier releases size the cached mask by layer 0 (a linear layer here) and fail: they run without a cache."""


def window_of(config: Any) -> int | None:
    """The one window size in ``config.attention_window_sizes``; None when no layer has one.

    Raises ValueError for several sizes (one mask serves all windowed layers) or a list of the wrong length.
    """
    sizes = getattr(config, "attention_window_sizes", None)
    if not sizes or all(size is None for size in sizes):
        return None
    if len(sizes) != config.num_hidden_layers:
        raise ValueError(
            f"attention_window_sizes has {len(sizes)} entries for {config.num_hidden_layers} layers: give one per layer"
        )
    different = {size for size in sizes if size is not None}
    if len(different) > 1:
        raise ValueError(
            f"attention_window_sizes names {sorted(different)}: give every windowed layer the same size"
        )
    return int(different.pop())


def caching_works() -> bool:
    """Whether this release of transformers keeps caches right under the windows (else pass use_cache=False)."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return (major, minor) >= FIRST_CACHED_VERSION


def apply_attention_windows(model: transformers.PreTrainedModel) -> None:
    """Turns windows on in a loaded causal language model, in place; does nothing when its config has none.

    Layers keep their modules; the config's ``layer_types`` name the windowed ones, so that caches hold window - 1
    keys for them, and a hook hands the decoder one mask per kind of layer. Call it once, before the first forward.
    """
    config = model.config.get_text_config()
    window = window_of(config)
    if window is None:
        return
    config.layer_types = [
        kind if size is None else "sliding_attention"
        for kind, size in zip(config.layer_types, config.attention_window_sizes, strict=True)
    ]
    config.sliding_window = window
    if not caching_works():
        config.use_cache = False
    model.get_decoder().register_forward_pre_hook(_mask_by_kind, with_kwargs=True)


def _mask_by_kind(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replaces the 2-D attention mask by a mask for each kind of layer, as the decoder itself would build them."""
    if isinstance(kwargs.get("attention_mask"), dict):
        return args, kwargs
    kwargs = dict(kwargs)
    if args:
        kwargs["input_ids"] = args[0]
    config = module.config
    if kwargs.get("inputs_embeds") is None:
        embeds = module.get_input_embeddings()(kwargs["input_ids"])
    else:
        embeds = kwargs["inputs_embeds"]
    cache = kwargs.get("past_key_values")
    use_cache = kwargs.get("use_cache")
    if (config.use_cache if use_cache is None else use_cache) and cache is None:
        cache = transformers.DynamicCache(config=config)
        kwargs["past_key_values"] = cache
    seen = cache.get_seq_length() if cache is not None else 0
    positions = kwargs.get("position_ids")
    if positions is None:
        row = torch.arange(embeds.shape[1], device=embeds.device) + seen
        positions = row.view(1, 1, -1).expand(4, embeds.shape[0], -1)
        kwargs["position_ids"] = positions
    text_positions = positions[0] if positions.ndim == 3 else positions
    about = {
        "config": config,
        "inputs_embeds": embeds,
        "attention_mask": kwargs.get("attention_mask"),
        "past_key_values": cache,
        "position_ids": text_positions,
    }
    kwargs["attention_mask"] = {
        "full_attention": create_causal_mask(**about),
        "sliding_attention": create_sliding_window_causal_mask(**about),
        "linear_attention": create_recurrent_attention_mask(**about),
    }
    return (), kwargs
