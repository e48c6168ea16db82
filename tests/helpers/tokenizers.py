"""Small tokenizers for tests, and the program that writes the folder the fake engine has when no model is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve_app.text.tokenizer import byte_alphabet

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def byte_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """256 byte tokens (ids 0-255, in byte order), then the special tokens, then ``words`` as ordinary added tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer


def write_model_folder(
    folder: Path,
    *,
    script: dict[str, object] | None = None,
    tokenizer: Tokenizer | None = None,
    template: str = CHATML_TEMPLATE,
    max_model_len: int = 4096,
) -> Path:
    """A folder that the fake engine and the text layer can serve; answers the folder."""
    tokenizer = tokenizer or byte_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Fake"],
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": end,
        "max_position_embeddings": max_model_len,
    }
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config", config), ("tokenizer_config", settings), ("fake", script or {})):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    return folder


def scripted(text: str, **more: object) -> dict[str, object]:
    """A ``fake.json`` whose answer is ``text``, then the end token."""
    token_ids = list(text.encode())
    return {"output": "script", "token_ids": token_ids, "answer_tokens": len(token_ids), **more}


FAKE_ANSWER = "This answer is scripted: the fake engine has no model behind it."


def write_fake_model(folder: Path) -> Path:
    """The folder that ships as ``serve_app/text/fake_model``."""
    return write_model_folder(folder, script=scripted(FAKE_ANSWER, tokens_per_s=100.0))


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_TURNS = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif -%}
"""
JSON_TOOLS_TEMPLATE = (
    '{%- if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call>\n{"name": NAME}<|im_end|>\n{% endif -%}'
    + _TURNS
)
XML_TOOLS_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call>\n<function=NAME><|im_end|>\n{% endif -%}"
    + _TURNS
)
HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
)
HARMONY_TEMPLATE = """\
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
<|start|>{{ message.role }}{% if message.role == "assistant" %}<|channel|>final{% endif %}<|message|>
{{- message.content }}<|end|>
{%- endfor -%}
<|start|>assistant"""
