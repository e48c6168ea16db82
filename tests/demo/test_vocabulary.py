"""The shipped tokenizer and chat template."""

from __future__ import annotations

from random import Random

import pytest
from transformers import PreTrainedTokenizerBase

from demo.tasks import arithmetic, conversation, copying, structured, tools
from demo.tasks.sample import Maker, render
from demo.vocabulary import CONTROL, IM_END, MARKS

MAKERS = [m for module in (arithmetic, conversation, copying, structured, tools) for m in module.MAKERS]


def test_control_tokens_and_marks_are_the_first_eleven_ids(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    assert demo_tokenizer.convert_ids_to_tokens(list(range(11))) == [*CONTROL, *MARKS]
    assert len(demo_tokenizer) == 4096
    assert demo_tokenizer.eos_token_id == IM_END


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world,\n\n it's 1234!",
        "été 漢字 \U0001f600\r\n\tx",
        '<think>\n\n</think>\n\n{"a": 1}',
        " ",
        "",
    ],
)
def test_every_text_comes_back(demo_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert demo_tokenizer.decode(demo_tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    assert demo_tokenizer.tokenize("4821") == ["4", "8", "2", "1"]


def test_marks_survive_decoding_and_control_tokens_do_not(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = demo_tokenizer("<|im_start|><tool_call>x</tool_call><|im_end|>")["input_ids"]
    assert demo_tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


@pytest.mark.parametrize("maker", MAKERS, ids=lambda m: m.__name__)
def test_training_text_is_what_the_template_writes(
    demo_tokenizer: PreTrainedTokenizerBase, maker: Maker
) -> None:
    rng = Random(maker.__name__)
    for _ in range(10):
        sample = maker(rng)
        written = demo_tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
        assert written == render(sample.messages, sample.tools)


def test_a_prompt_begins_the_reply_and_history_keeps_its_prefix(
    demo_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The next turn's prompt starts with this turn's prompt and reply, so that prefixes can be shared."""
    first = [{"role": "user", "content": "Hi"}]
    prompt = demo_tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    thinking = demo_tokenizer.apply_chat_template(
        first, add_generation_prompt=True, enable_thinking=True, tokenize=False
    )
    assert thinking == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    turns = [*first, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
    later = demo_tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert str(later).startswith(f"{prompt}Hello!<|im_end|>\n")


def test_content_in_parts_and_arguments_as_text_are_taken(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = demo_tokenizer.apply_chat_template(turns, tokenize=False)
    assert "<|im_start|>user\nab<|im_end|>" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n2\n</tool_response>" in text
