"""Makes a tiny checkpoint with random weights and a byte-level tokenizer: real in form, free of any sense.

``python -m demo.tiny FOLDER --family qwen3_5_moe`` writes what a served model folder holds (config.json,
model.safetensors, tokenizer.json, chat_template.jinja, generation_config.json), readable by stock transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("qwen3_5_moe", "qwen3_5", "qwen3_moe", "gpt_oss")
SPECIAL_TOKENS = (
    "<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
PAD_ID, BOS_ID, END_OF_TEXT_ID, IM_END_ID = 0, 1, 2, 4
VOCAB_SIZE = 288
"""Above the 11 + 256 tokens of the tokenizer, as in real checkpoints: ids without text exist and must do no harm."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    # Larger than usual: with 0.02 all tokens would be nearly alike and every comparison would hang on ties.
    "initializer_range": 0.15,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": IM_END_ID,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    # Half of head_dim is rotated; the position sections must sum to half of what is rotated.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def tiny_config(family: str, window: int = 0) -> PretrainedConfig:
    """The configuration of a tiny model of ``family``. ``window`` makes one full-attention layer of a qwen3_5 family
    a sliding one with that window, and sets gpt_oss's (16 unless given). ValueError for what does not exist."""
    import transformers

    if family == "qwen3_moe":
        if window:
            raise ValueError("qwen3_moe has no sliding layers: leave the window out")
        rope = {"rope_type": "default", "rope_theta": 1e6}
        return transformers.Qwen3MoeConfig(
            **_COMMON,
            **_EXPERTS,
            num_hidden_layers=3,
            intermediate_size=96,
            norm_topk_prob=True,
            rope_parameters=rope,
        )
    if family == "gpt_oss":
        return transformers.GptOssConfig(
            **_COMMON,
            num_hidden_layers=4,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=window or 16,
        )
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is none of {', '.join(FAMILIES)}")
    layers: dict[str, Any] = {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    }
    if window:
        layers["layer_types"] = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
        layers["attention_window_sizes"] = [None, None, window, None]
    if family == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**_COMMON, **_HYBRID, **layers, intermediate_size=96)
    return transformers.Qwen3_5MoeTextConfig(
        **_COMMON, **_HYBRID, **_EXPERTS, **layers, shared_expert_intermediate_size=32
    )


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json (11 special tokens, then the 256 bytes, no merges) and its configuration."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As in Qwen's tokenizers the marks of reasoning and tool calls are single tokens but not special ones: decoding
    # keeps them.
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in SPECIAL_TOKENS[: IM_END_ID + 1]]
    )
    tokenizer.add_tokens([AddedToken(token, special=False) for token in SPECIAL_TOKENS[IM_END_ID + 1 :]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_tiny(folder: Path, family: str = "qwen3_5_moe", seed: int = 0, window: int = 0) -> Path:
    """Writes a tiny checkpoint of ``family`` with weights drawn from ``seed`` (bfloat16) and answers the folder."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, window)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=PAD_ID
    )
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m demo.tiny", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--window", type=int, default=0, help="tokens that the sliding layer sees; 0: no such layer"
    )
    options = parser.parse_args(arguments)
    folder = make_tiny(options.folder, options.family, options.seed, options.window)
    print(f"{options.family} with random weights written to {folder}")


if __name__ == "__main__":
    main()
