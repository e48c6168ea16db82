"""Dialogues whose answer is a fact placed far back in a long text."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.tasks.sample import Message, Sample, assistant, user
from demo.tasks.words import ADJECTIVES, CITIES, JOBS, NAMES, NOUNS

CHARS_PER_TOKEN = 3.6
"""About; measured on the training books with the shipped tokenizer."""


@dataclass(frozen=True)
class Fact:
    sentence: str
    question: str
    answer: str
    value: str


def make_fact(rng: Random) -> Fact:
    thing = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    kind = rng.randrange(4)
    if kind <= 1:
        value = str(rng.randint(1000, 9999))
        said = f"the secret code of the {thing} is {value}."
        return Fact(f"T{said[1:]}", f"What is the secret code of the {thing}?", f"T{said[1:]}", value)
    if kind == 2:
        value = rng.choice(NAMES)
        said = f"The owner of the {thing} is {value}."
        return Fact(said, f"Who is the owner of the {thing}?", said, value)
    value, name = rng.choice((rng.choice(CITIES), rng.choice(JOBS))), rng.choice(NAMES)
    if value in CITIES:
        said = f"{name} with the {thing} lives in {value}."
        return Fact(said, f"Where does {name} with the {thing} live?", said, value)
    said = f"{name} with the {thing} works as a {value}."
    return Fact(said, f"What does {name} with the {thing} work as?", said, value)


def code_fact(rng: Random) -> Fact:
    while True:
        fact = make_fact(rng)
        if fact.value.isdigit():
            return fact


def cut(text: str, chars: int) -> str:
    """About ``chars`` of text, ending with a whole word."""
    return text[:chars].rsplit(" ", 1)[0].strip()


def hide(rng: Random, text: str, facts: list[Fact]) -> str:
    """Places the facts as sentences of their own between paragraphs or sentences of ``text``, in order."""
    breaks = [n + 1 for n in range(len(text) - 1) if text[n] in ".!?\n" and text[n + 1] in " \n"]
    spots = sorted(rng.choice(breaks) if breaks else 0 for _ in facts)
    parts, last = [], 0
    for spot, fact in zip(spots, facts, strict=True):
        parts += [text[last:spot].rstrip(" "), f"\n{fact.sentence}\n"]
        last = spot
    return "".join([*parts, text[last:].lstrip(" ")])


def long_text(rng: Random, filler: str, tokens: int) -> Sample:
    """Several facts in about ``tokens`` tokens of filler, then questions about some, over several turns."""
    facts = [make_fact(rng) for _ in range(rng.randint(1, 4 + tokens // 300))]
    seen: set[str] = set()
    facts = [f for f in facts if f.question not in seen and not seen.add(f.question)]  # type: ignore[func-returns-value]
    body = hide(rng, cut(filler, int(tokens * CHARS_PER_TOKEN)), facts)
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    lead = rng.choice(("Read this text.\n\n", "Remember the facts in this text.\n\n", ""))
    turns: list[Message] = []
    if rng.random() < 0.3:
        turns += [user(f"{lead}{body}"), assistant("I have read it.")]
        turns += [user(asked[0].question), assistant(asked[0].answer)]
    else:
        turns += [user(f"{lead}{body}\n\n{asked[0].question}"), assistant(asked[0].answer)]
    for fact in asked[1:]:
        turns += [user(fact.question), assistant(fact.answer)]
    return Sample("retrieval", asked[0].sentence, turns, None, asked[0].value)


def one_fact(rng: Random, filler: str, tokens_after: int, tokens_before: int = 60) -> Sample:
    """The scored form: one code, about ``tokens_after`` tokens of filler between it and the question."""
    fact = code_fact(rng)
    text = cut(filler, int((tokens_before + tokens_after) * CHARS_PER_TOKEN))
    before = cut(text, int(tokens_before * CHARS_PER_TOKEN))
    body = f"{before}\n{fact.sentence}\n{text[len(before) :].lstrip()}"
    turns = [user(f"Read this text.\n\n{body}\n\n{fact.question}"), assistant(fact.answer)]
    return Sample("one_fact", fact.sentence, turns, None, fact.value)


def table(rng: Random) -> Sample:
    """A list of entries and values, looked up by entry: many keys at short distance."""
    count = rng.randint(3, 40)
    keys = list(dict.fromkeys(f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(count)))
    values = [str(rng.randint(10, 9999)) for _ in keys]
    lines = "\n".join(f"{k}: {v}" for k, v in zip(keys, values, strict=True))
    picks = rng.sample(range(len(keys)), min(len(keys), rng.randint(1, 6)))
    turns: list[Message] = []
    for n, i in enumerate(picks):
        lead = f"Here is a list.\n{lines}\n\n" if n == 0 else ""
        turns += [user(f"{lead}What is the number of {keys[i]}?"), assistant(f"{keys[i]}: {values[i]}")]
    return Sample("table", f"{keys[picks[0]]}: {values[picks[0]]}", turns, None, values[picks[0]])
