"""Makes the tokenizer: byte-level BPE with single digits, trained on the books and on generated dialogues."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ("<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Never shown to a reader."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that stay in decoded text, where reasoning and tool calls are parsed."""
PAD, BOS, END, IM_START, IM_END = range(5)
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer of exactly ``size`` ids; the eleven control tokens and marks come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, normalized=False, special=True) for t in CONTROL]
    marks = [AddedToken(t, normalized=False, special=False) for t in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special + marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_visible_marks(tokenizer)


def _with_visible_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer makes every token it is given special; marks must survive decoding with specials skipped."""
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(saved, ensure_ascii=False))


def save(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes tokenizer.json (compact: it counts towards the model's size), its config and the generation config."""
    saved = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False, separators=(",", ":")))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "bos_token": CONTROL[BOS],
        "eos_token": CONTROL[IM_END],
        "pad_token": CONTROL[PAD],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": [IM_END, END],
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
