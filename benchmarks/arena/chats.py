"""Chats of two turns with a model's own template: how much of the second turn is computed, how much of it is new."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.tasks.retrieval import hide, make_fact
from serve_app.text.chat_formats import AUTO, make_chat_format
from serve_app.text.chat_template import ChatTemplate
from serve_app.text.output import read_output
from serve_app.text.tokenizer import load_text_model
from worker.api import Engine, GenerateRequest, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SHORTEST_CHARS, LONGEST_CHARS = 600, 4000
"""Of the text that a turn of the user brings along."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """Tokens of a second turn's prompt: all, those not in the first turn's prompt and answer, those computed."""

    num_prompt: int
    num_new: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat: what the first turn brought, and the second turn ``as_given``, with the reasoning handed back, and
    ``without`` it, as clients do that drop it."""

    num_first_prompt: int
    num_answer: int
    num_reasoning_chars: int
    as_given: SecondTurn
    without: SecondTurn


class Chats:
    """Talks to an engine as the service does: template, tokenizer, and the chat format's parser."""

    def __init__(self, folder: Path, engine: Engine, max_tokens: int) -> None:
        self._engine = engine
        self._text = load_text_model(folder)
        self._template = ChatTemplate(self._text.chat_template, self._text.names)
        self._format = make_chat_format(AUTO, self._text.chat_template)
        self._max_tokens = max_tokens
        self._count = 0

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation's text, with the assistant's reasoning opened."""
        return self._template.render(self._format.messages(messages), None, {"enable_thinking": True})

    async def ask(self, prompt: str) -> tuple[list[int], list[int], str, int]:
        """Token ids of prompt and answer, the answer's text, and how many of the prompt's tokens were cached."""
        self._count += 1
        ids = self._text.encode(prompt)
        request = GenerateRequest(
            f"chat{self._count}", tuple(ids), SamplingParams(max_tokens=self._max_tokens, temperature=0.0)
        )
        self._engine.submit(request)
        answer: list[int] = []
        text, cached = "", 0
        events = self._engine.stream(request.request_id)
        keep = self._format.keep_special(self._text)
        async for piece in read_output(events, self._text, (), keep):  # type: ignore[arg-type]
            answer += piece.token_ids
            text += piece.text
            cached = piece.num_cached
        return ids, answer, text, cached

    async def chat(self, first: str, second: str) -> Chat:
        """Both turns, the second one twice."""
        opening = [{"role": "user", "content": first}]
        prompt = self.prompt(opening)
        ids, answer, text, _ = await self.ask(prompt)
        parser = self._format.parser(prompt, ())
        said = parser.push(text) + parser.finish()
        known = [*ids, *answer]

        async def go_on(reply: Message) -> SecondTurn:
            again, _, _, cached = await self.ask(
                self.prompt([*opening, reply, {"role": "user", "content": second}])
            )
            num_shared = next(
                (n for n, (a, b) in enumerate(zip(known, again, strict=False)) if a != b), len(known)
            )
            return SecondTurn(len(again), len(again) - num_shared, len(again) - cached)

        reply = {"role": "assistant", "content": said.content}
        return Chat(
            num_first_prompt=len(ids),
            num_answer=len(answer),
            num_reasoning_chars=len(said.reasoning),
            as_given=await go_on({**reply, "reasoning_content": said.reasoning}),
            without=await go_on(reply),
        )


def draw_turns(count: int, seed: int) -> list[tuple[str, str]]:
    """For each chat the user's two messages: a piece of this repository's licence in which a fact is hidden,
    and a question about the fact, as the demo model was taught to answer."""
    text = (ROOT / "LICENSE").read_text()
    dice = random.Random(seed)

    def message() -> str:
        length = dice.randrange(SHORTEST_CHARS, LONGEST_CHARS)
        start = dice.randrange(len(text) - length)
        fact = make_fact(dice)
        return f"Read this text.\n\n{hide(dice, text[start : start + length], [fact])}\n\n{fact.question}"

    return [(message(), message()) for _ in range(count)]


def run_chats(folder: Path, engine: Engine, turns: Sequence[tuple[str, str]], max_tokens: int) -> list[Chat]:
    """The chats one after the other."""
    chats = Chats(folder, engine, max_tokens)

    async def all_of_them() -> list[Chat]:
        return [await chats.chat(first, second) for first, second in turns]

    return asyncio.run(all_of_them())


def computed_share(turns: Sequence[SecondTurn]) -> float:
    """Tokens computed over tokens new, over all chats."""
    return sum(turn.num_computed for turn in turns) / sum(turn.num_new for turn in turns)
