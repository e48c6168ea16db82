"""Reads the public texts from the data folder and mixes generated dialogues in fixed proportions."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random

from demo.tasks import arithmetic, conversation, copying, retrieval, structured, tools
from demo.tasks.sample import Maker, Sample, assistant, draw, render, user

SHARES = {
    "retrieval": 0.34, "tools": 0.16, "json": 0.14, "arithmetic": 0.12, "copying": 0.08, "conversation": 0.09,
    "passage": 0.02, "reading": 0.03, "problems": 0.02,
}  # fmt: skip
"""Of the tokens of generated dialogues."""


def books(data: Path, name: str = "books_train") -> list[str]:
    """Texts of the books, each with its heading line "author | title"."""
    with lzma.open(data / f"{name}.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read()
    return [book for book in text.split("\x1e") if book.strip()]


@dataclass(frozen=True)
class Sources:
    """What dialogues are made of: books for filler, stories with questions, word problems."""

    filler: str
    stories: list[dict[str, object]]
    problems: list[dict[str, str]]


def load_sources(data: Path, books_text: str, split: str = "train") -> Sources:
    """Stories of ``split`` (train, val or test); problems of the training file, or of the test file."""
    with lzma.open(data / "fairytale_qa.jsonl.xz", "rt", encoding="utf-8") as lines:
        stories = [s for s in map(json.loads, lines) if s["split"] == split]
    file = "gsm8k_train" if split == "train" else "gsm8k_test"
    with lzma.open(data / f"{file}.jsonl.xz", "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    return Sources(books_text, stories, problems)


def filler(rng: Random, sources: Sources, chars: int) -> str:
    """A run of book text from the start of a sentence."""
    spot = rng.randrange(max(1, len(sources.filler) - 2 * chars - 2000))
    begin = re.search(r"[.!?]\s+(?=[A-Z\"])", sources.filler[spot : spot + 2000])
    spot += begin.end() if begin else 0
    return sources.filler[spot : spot + chars]


def reading(rng: Random, sources: Sources) -> Sample:
    """A section of a story and a question whose answer stands in it."""
    while True:
        story = rng.choice(sources.stories)
        sections, asked = story["sections"], story["qa"]
        assert isinstance(sections, list)
        assert isinstance(asked, list)
        pair = rng.choice(asked)
        answer = re.sub(r" ([.,!?;]|'s|n't)", r"\1", pair["a"].strip())
        holding = [text for text in sections if answer.lower().rstrip(".") in text.lower()]
        if holding:
            turns = [
                user(f"{holding[0][:6000]}\n\n{pair['q'].strip()}"),
                assistant(answer[:1].upper() + answer[1:]),
            ]
            return Sample("reading", f"{story['name']} {pair['q']}", turns, None, answer)


def problem(rng: Random, sources: Sources) -> Sample:
    row = rng.choice(sources.problems)
    worked, final = re.sub(r"<<[^>]*>>", "", row["answer"]).rsplit("#### ", 1)
    reply = assistant(f"The answer is {final.strip()}.", worked.strip())
    return Sample("problem", row["question"], [user(row["question"]), reply], None, final.strip(), True)


def long_text(rng: Random, sources: Sources) -> Sample:
    if rng.random() < 0.2:
        return retrieval.table(rng)
    tokens = int(exp(rng.uniform(log(60), log(3500))))
    text = filler(rng, sources, int(tokens * 4.2) + 400)
    if rng.random() < 0.4:
        before = rng.randint(10, 200)
        return retrieval.one_fact(rng, text, max(tokens - before, 40), before)
    return retrieval.long_text(rng, text, tokens)


def _weighted(rng: Random, makers: dict[Maker, float]) -> Sample:
    return draw(rng.choices(list(makers), list(makers.values()))[0], rng, scoring=False)


def dialogue(rng: Random, group: str, sources: Sources) -> Sample:
    """One training dialogue of a group named in SHARES."""
    generated = {
        "tools": tools.MAKERS,
        "json": structured.MAKERS,
        "arithmetic": arithmetic.MAKERS,
        "copying": copying.MAKERS,
        "conversation": conversation.MAKERS,
    }
    if group in generated:
        return _weighted(rng, generated[group])
    if group == "retrieval":
        return draw(lambda r: long_text(r, sources), rng, scoring=False)
    if group == "passage":
        return conversation.passage(rng, filler(rng, sources, 2000))
    return reading(rng, sources) if group == "reading" else problem(rng, sources)


def dialogues(rng: Random, sources: Sources) -> Iterator[tuple[str, Sample]]:
    """Endless training dialogues with their group; the shares are kept by counting characters."""
    written = dict.fromkeys(SHARES, 1.0)
    while True:
        total = sum(written.values())
        lag = {
            group: max(share - written[group] / total, 0.0) + 0.01 * share for group, share in SHARES.items()
        }
        group = rng.choices(list(lag), list(lag.values()))[0]
        sample = dialogue(rng, group, sources)
        written[group] += len(render(sample.messages, sample.tools))
        yield group, sample


def scored_makers(sources: Sources) -> dict[str, Maker]:
    """What makes dialogues of each scored kind."""
    return {
        "copy_in_window": copying.copy,
        "retrieval_1000": lambda rng: retrieval.one_fact(rng, filler(rng, sources, 6000), 1000),
        "retrieval_3000": lambda rng: retrieval.one_fact(rng, filler(rng, sources, 16000), 3000),
        "tool_calls": tools.one_call,
        "json": structured.from_schema,
        "two_digit_sums": arithmetic.two_digit_sum,
        "headroom": conversation.headroom,
        "memory": conversation.memory,
    }
