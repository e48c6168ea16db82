"""The tiny checkpoints: loadable by stock transformers, and their tokenizer loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from demo.tiny import FAMILIES, main, tiny_config
from tests.helpers.tiny import tiny_folder


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_loads_every_weight(family: str) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_folder(family), output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.generation_config.eos_token_id == [4, 2]
    with torch.inference_mode():
        logits = model.float()(torch.arange(20, 60)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.5, "flat logits would make every comparison hang on ties"


def test_the_seed_decides_the_weights() -> None:
    def first(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    assert first(tiny_folder("qwen3_moe")) != first(tiny_folder("qwen3_moe", seed=1))


@pytest.mark.parametrize("text", ["Hello, world!", "Grüße, 世界 🙂", "\x00\n\t  tabs", "<think>x</think>"])
def test_the_tokenizer_gives_back_every_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert max(ids) < 267


def test_the_chat_template_renders_turns_tools_and_thinking() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder())
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[{"name": "add"}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    plain = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, tokenize=False)
    assert plain == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_command_writes_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "m"), "--family", "qwen3_5_moe", "--window", "16"])
    assert str(tmp_path / "m") in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["attention_window_sizes"] == [None, None, 16, None]
    assert "sliding_attention" not in config["layer_types"]


def test_families_and_windows_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="none of"):
        tiny_config("llama")
    with pytest.raises(ValueError, match="no sliding layers"):
        tiny_config("qwen3_moe", window=8)
