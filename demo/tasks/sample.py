"""One generated dialogue, its text under the chat template, and which dialogues are kept for scoring only."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Message = dict[str, object]
HELD_OUT_SHARE = 8
"""One key in this many is never trained on."""


@dataclass(frozen=True)
class Sample:
    """A dialogue ending in the wanted answer.

    ``key`` is what makes it a new case (the numbers of a sum, the hidden fact): keys are split into trained and held
    out. ``answer`` is what a right reply must contain (empty: not scored by text).
    """

    kind: str
    key: str
    messages: list[Message]
    tools: list[dict[str, object]] | None = None
    answer: str = ""
    thinking: bool = False


Maker = Callable[[Random], Sample]


def held_out(key: str) -> bool:
    """Whether dialogues with this key are for scoring only."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def draw(maker: Maker, rng: Random, scoring: bool) -> Sample:
    """A sample on the wanted side of the split."""
    while True:
        sample = maker(rng)
        if held_out(sample.key) == scoring:
            return sample


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "") -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def calls(*pairs: tuple[str, dict[str, object]]) -> Message:
    """An assistant message that calls the named tools with these arguments."""
    listed = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in pairs]
    return {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": listed}


def render(messages: list[Message], tools: list[dict[str, object]] | None = None) -> str:
    """The dialogue as ``chat_template.jinja`` writes it, without a generation prompt (a test holds the two equal)."""
    parts: list[str] = []
    if tools:
        system = f"{messages[0]['content']}\n\n" if messages[0]["role"] == "system" else ""
        lines = "".join(json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in tools)
        parts.append(
            f"<|im_start|>system\n{system}# Tools\n<tools>\n{lines}</tools>\nTo call a tool, write:\n<tool_call>\n"
            '{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n'
        )
    for n, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system" and (n > 0 or not tools):
            parts.append(f"<|im_start|>system\n{content}<|im_end|>\n")
        elif role == "user":
            parts.append(f"<|im_start|>user\n{content}<|im_end|>\n")
        elif role == "assistant":
            parts.append(
                f"<|im_start|>assistant\n<think>\n{message.get('reasoning_content') or ''}\n</think>\n\n"
            )
            parts.append(str(content))
            listed = message.get("tool_calls") or []
            assert isinstance(listed, list)
            for i, call in enumerate(listed):
                body = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                gap = "\n" if content or i else ""
                name = call["function"]["name"]
                parts.append(f'{gap}<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>')
            parts.append("<|im_end|>\n")
        elif role == "tool":
            parts.append(f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n")
    return "".join(parts)
