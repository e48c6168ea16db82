"""Chat formats: what an answer means, and that no way of splitting its text changes that."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.text.chat_formats import CHAT_FORMATS, make_chat_format
from serve_app.text.chat_formats.base import ChatDelta, Tool, ToolDelta
from worker.errors import ConfigError

NUM_SPLITS = 10_000
WEATHER = Tool(
    "get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
)
NOW = Tool("now", {"type": "object", "properties": {}})
THINKING = "<|im_start|>assistant\n<think>\n"
PLAIN = "<|im_start|>assistant\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Case:
    """An answer in some format and what it says."""

    format: str
    prompt: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    tools: tuple[Tool, ...] = (WEATHER, NOW)


PARIS = ("get_weather", {"city": 'Paris {"}"]', "days": 2})
JSON_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris {\\"}\\"]", "days": 2}}\n</tool_call>'
)
XML_CALL = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nParis {"}"]\n</parameter>\n'
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
CASES = [
    Case("plain", PLAIN, "Just <b>text</b>, 漢字.\n", "Just <b>text</b>, 漢字.\n"),
    Case("plain", PLAIN, "<think>\nHm.\n\nYes.\n</think>\n\nSo.", "So.", "Hm.\n\nYes."),
    Case("plain", THINKING, "Hm.\n</think>\n\nSo </think> it is.", "So </think> it is.", "Hm."),
    Case("plain", THINKING, "Cut off in though", "", "Cut off in though"),
    Case("plain", CLOSED, "No thought.", "No thought."),
    Case("plain", PLAIN, "a < b <thin", "a < b <thin"),
    Case("chatml_json", PLAIN, JSON_CALL, calls=(PARIS,)),
    Case("chatml_json", PLAIN, f"Let me see.\n\n{JSON_CALL}", "Let me see.", calls=(PARIS,)),
    Case("chatml_json", THINKING, f"A call.\n</think>\n\n{JSON_CALL}", "", "A call.", (PARIS,)),
    Case(
        "chatml_json",
        CLOSED,
        f'{JSON_CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        calls=(PARIS, ("now", {})),
    ),
    Case(
        "chatml_json",
        PLAIN,
        '<tool_call>{"arguments": {"days": 1}, "name": "now"}</tool_call>',
        calls=(("now", {"days": 1}),),
    ),
    Case("chatml_json", PLAIN, '<tool_call>{"name": "now"}</tool_call>', calls=(("now", {}),)),
    Case(
        "chatml_json",
        PLAIN,
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=(("now", {"a": 1}),),
    ),
    Case(
        "chatml_json",
        PLAIN,
        "<tool_call>\nnonsense\n</tool_call> end",
        "<tool_call>\nnonsense\n</tool_call> end",
    ),
    Case("chatml_json", PLAIN, "text <tool_call", "text <tool_call"),
    Case("chatml_json", PLAIN, JSON_CALL, JSON_CALL, tools=()),
    Case("qwen3_xml", PLAIN, XML_CALL, calls=(PARIS,)),
    Case("qwen3_xml", THINKING, f"Hm\n</think>\n\nI look.\n\n{XML_CALL}", "I look.", "Hm", (PARIS,)),
    Case(
        "qwen3_xml",
        PLAIN,
        f"{XML_CALL}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=(PARIS, ("now", {})),
    ),
    Case(
        "qwen3_xml",
        PLAIN,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nline 1\nline < 2\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=(("get_weather", {"city": "line 1\nline < 2"}),),
    ),
    Case(
        "qwen3_xml",
        PLAIN,
        '<tool_call>\n<function=other>\n<parameter=a>\n[1, {"b": null}]\n</parameter>\n<parameter=c>\nno json'
        "\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=(("other", {"a": [1, {"b": None}], "c": "no json"}),),
    ),
    Case(
        "qwen3_xml",
        PLAIN,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n75001\n</parameter>\n</function>\n</tool_call>",
        calls=(("get_weather", {"city": "75001"}),),
    ),
    Case("qwen3_xml", PLAIN, "<tool_call>\nfunction\n</tool_call>", "<tool_call>\nfunction\n</tool_call>"),
    Case("harmony", "<|start|>assistant", "<|channel|>final<|message|>Hello.", "Hello."),
    Case(
        "harmony",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>User greets.<|end|><|start|>assistant<|channel|>final<|message|>Hi!<|return|>",
        "Hi!",
        "User greets.",
    ),
    Case(
        "harmony",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Look up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris {\\"}\\"]", "days": 2}<|call|>',
        "",
        "Look up.",
        (PARIS,),
    ),
    Case(
        "harmony",
        "<|start|>assistant",
        " to=functions.now<|channel|>commentary json<|message|>{}",
        calls=(("now", {}),),
    ),
    Case(
        "harmony", "<|start|>assistant", "<|channel|>commentary<|message|>I will look.<|end|>", "I will look."
    ),
    Case("harmony", "<|start|>assistant", "no marks at all", "no marks at all"),
]


def parse(case: Case, pieces: Sequence[str]) -> ChatDelta:
    parser = make_chat_format(case.format, "").parser(case.prompt, case.tools)
    total = ChatDelta()
    for piece in pieces:
        total += parser.push(piece)
    return total + parser.finish()


def meaning(delta: ChatDelta) -> tuple[str, str, tuple[tuple[str | None, Any], ...]]:
    return delta.content, delta.reasoning, tuple((t.name, json.loads(t.arguments)) for t in delta.tools)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}-{case.text[:30]!r}")
def test_an_answer_means_what_it_says(case: Case) -> None:
    assert meaning(parse(case, [case.text])) == (case.content, case.reasoning, case.calls)


def test_no_split_changes_an_answer() -> None:
    chance = random.Random(11)
    for index in range(NUM_SPLITS):
        case = CASES[index % len(CASES)]
        num_cuts = chance.choice([1, 2, 3, 8, len(case.text)])
        cuts = sorted(chance.randrange(len(case.text) + 1) for _ in range(num_cuts))
        pieces = [case.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(case.text)], strict=True)]
        assert parse(case, pieces) == parse(case, [case.text]), pieces


def test_any_cut_of_an_answer_is_read_without_an_error() -> None:
    for case in CASES:
        for end in range(len(case.text)):
            parse(case, list(case.text[:end]))


def test_arguments_of_a_call_are_given_on_while_they_come() -> None:
    parser = make_chat_format("chatml_json", "").parser(PLAIN, [WEATHER])
    deltas = [
        parser.push(piece)
        for piece in ('<tool_call>\n{"name": "get_weather"', ', "arguments": {"ci', 'ty": "P')
    ]
    assert deltas == [
        ChatDelta(),
        ChatDelta(tools=(ToolDelta(0, "get_weather", '{"ci'),)),
        ChatDelta(tools=(ToolDelta(0, None, 'ty": "P'),)),
    ]


def test_text_is_given_on_as_soon_as_it_cannot_be_a_mark() -> None:
    parser = make_chat_format("chatml_json", "").parser(PLAIN, [WEATHER])
    assert parser.push("a <tool").content == "a"
    assert parser.push("box").content == " <toolbox"


def test_the_format_is_found_from_the_template() -> None:
    assert make_chat_format("auto", "... <|channel|> ...").name == "harmony"
    assert make_chat_format("auto", "<tool_call>\n<function=").name == "qwen3_xml"
    assert make_chat_format("auto", '<tool_call>\n{"name"').name == "chatml_json"
    assert make_chat_format("auto", "{{ messages }}").name == "plain"
    with pytest.raises(ConfigError, match=r"chat_format='other'.*harmony"):
        make_chat_format("other", "")
    assert {case.format for case in CASES} == set(CHAT_FORMATS), "every registered format has cases"
