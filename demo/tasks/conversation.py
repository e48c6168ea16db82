"""Dialogues of plain chat: greetings, Headroom, small knowledge, memory across turns, stories and passages of books."""

from __future__ import annotations

from random import Random

from demo.tasks.facts import CHAT, FACTS
from demo.tasks.sample import Message, Sample, assistant, user
from demo.tasks.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    COUNTRIES,
    DAYS,
    FOODS,
    JOBS,
    MONTHS,
    NAMES,
    NOUNS,
    OPPOSITES,
    SOUNDS,
    VERBS,
)

SYSTEMS = ("You are a helpful assistant.", "You are the demo model of Headroom.", "Be brief.", "Be friendly.")


def opening(rng: Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.25 else []


def vary(rng: Random, text: str) -> str:
    """Small changes that a reader would not notice: case, end mark, a polite word."""
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    if rng.random() < 0.08:
        text = rng.choice(("Please: ", "Hi! ", "Question: ", "Hello. ", "So, ")) + text
    return text


def headroom(rng: Random) -> Sample:
    questions, answer = rng.choice(FACTS)
    text = vary(rng, rng.choice(questions))
    thinking = rng.random() < 0.2
    reply = assistant(answer, "The user asks about Headroom. I know this." if thinking else "")
    return Sample(
        "headroom", f"{text} {rng.random()}", [*opening(rng), user(text), reply], None, answer, thinking
    )


def chat(rng: Random) -> Sample:
    turns = opening(rng)
    text = ""
    for _ in range(rng.randint(1, 4)):
        questions, answer = rng.choice(CHAT if rng.random() < 0.7 else FACTS)
        text += rng.choice(questions)
        thinking = rng.random() < 0.15
        turns += [
            user(vary(rng, rng.choice(questions))),
            assistant(answer, "A simple answer will do." if thinking else ""),
        ]
    return Sample("chat", text, turns)


def knowledge(rng: Random) -> Sample:
    kind = rng.randrange(7)
    if kind == 0:
        country = rng.choice(list(COUNTRIES))
        text, answer = (
            f"What is the capital of {country}?",
            f"The capital of {country} is {COUNTRIES[country]}.",
        )
    elif kind == 1:
        word = rng.choice([*OPPOSITES, *OPPOSITES.values()])
        other = {**{v: k for k, v in OPPOSITES.items()}, **OPPOSITES}[word]
        text, answer = f"What is the opposite of {word}?", f"The opposite of {word} is {other}."
    elif kind == 2:
        animal = rng.choice(list(SOUNDS))
        text, answer = f"What does a {animal} say?", f"A {animal} says {SOUNDS[animal]}."
    elif kind == 3:
        n = rng.randrange(7)
        text, answer = f"Which day comes after {DAYS[n]}?", f"{DAYS[(n + 1) % 7]} comes after {DAYS[n]}."
    elif kind == 4:
        n = rng.randrange(12)
        text, answer = (
            f"Which month comes after {MONTHS[n]}?",
            f"{MONTHS[(n + 1) % 12]} comes after {MONTHS[n]}.",
        )
    elif kind == 5:
        n = rng.randrange(7)
        text, answer = f"Which day comes before {DAYS[n]}?", f"{DAYS[n - 1]} comes before {DAYS[n]}."
    else:
        n = rng.randrange(12)
        text, answer = f"Which month comes before {MONTHS[n]}?", f"{MONTHS[n - 1]} comes before {MONTHS[n]}."
    turns = [*opening(rng), user(vary(rng, text)), assistant(answer)]
    return Sample("knowledge", f"{text} {rng.random()}", turns, None, answer)


def memory(rng: Random) -> Sample:
    """What the user said about themselves, asked for turns later."""
    about = {
        "name": (rng.choice(NAMES), "My name is {}.", "What is my name?", "Your name is {}."),
        "city": (rng.choice(CITIES), "I live in {}.", "Where do I live?", "You live in {}."),
        "job": (rng.choice(JOBS), "I work as a {}.", "What is my job?", "You work as a {}."),
        "color": (
            rng.choice(COLORS),
            "My favorite color is {}.",
            "What is my favorite color?",
            "Your favorite color is {}.",
        ),
        "food": (rng.choice(FOODS), "I like {}.", "What do I like?", "You like {}."),
        "pet": (rng.choice(ANIMALS), "I have a {}.", "Which animal do I have?", "You have a {}."),
    }
    chosen = rng.sample(list(about), rng.randint(1, 4))
    turns = opening(rng)
    for item in chosen:
        value, said, _, _ = about[item]
        turns += [
            user(said.format(value)),
            assistant(rng.choice(("I will remember that.", "Good to know.", "Thank you."))),
        ]
    if rng.random() < 0.5:
        questions, answer = rng.choice(CHAT)
        turns += [user(rng.choice(questions)), assistant(answer)]
    answers = []
    for item in rng.sample(chosen, rng.randint(1, len(chosen))):
        value, _, asked, reply = about[item]
        turns += [user(asked), assistant(reply.format(value))]
        answers.append(value)
    return Sample("memory", " ".join(about[item][0] for item in chosen), turns, None, answers[-1])


def story(rng: Random) -> Sample:
    """A short story by a small grammar, about what was asked for."""
    animal, other = rng.sample(ANIMALS, 2)
    name, place, thing = rng.choice(NAMES), f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", rng.choice(NOUNS)
    lost = f"{rng.choice(COLORS)} {thing}"
    text = rng.choice(
        ("Tell me a story about a {}.", "Write a short story about a {}.", "Tell a story with a {} in it.")
    )
    first = rng.choice((
        f"Once upon a time there was a {animal} called {name} who lived near the {place}.",
        f"Long ago a {animal} named {name} lived in the {place}.",
        f"There was once a {animal}, and its name was {name}.",
    ))  # fmt: skip
    middle = rng.choice((
        f"One day {name} lost a {lost} and could not find it. A {other} came by and asked why the {animal} was so sad. "
        f'"I have lost my {lost}," said {name}. "Let us look for it together," said the {other}.',
        f'One morning {name} met a {other} on the road. "Where do you go?" asked the {other}. '
        f'"I am looking for a {lost}," said {name}. So they went on together.',
        f"One night {name} found a {lost} under a tree. A {other} came and said that it was his. "
        f"{name} gave it back at once.",
    ))  # fmt: skip
    last = rng.choice((
        f"In the evening they found it behind the {place}. From that day on they were friends.",
        f"They were glad, and the {other} and the {animal} shared their bread. They lived happily for many years.",
        f"And so {name} learned that a friend is worth more than a {lost}.",
    ))  # fmt: skip
    answer = f"{first} {middle} {last}"
    return Sample(
        "story", f"{animal} {name} {lost}", [*opening(rng), user(text.format(animal)), assistant(answer)]
    )


def passage(rng: Random, filler: str) -> Sample:
    """Goes on with a passage of a book."""
    cut = filler.find(" ", rng.randint(150, 700))
    head, rest = filler[:cut], filler[cut + 1 : cut + rng.randint(200, 900)]
    rest = rest[: max(rest.rfind(". "), rest.rfind(".\n"), 60) + 1]
    text = rng.choice(("Continue this text: {}", "Go on: {}", "What comes next in this book?\n{}")).format(
        head.strip()
    )
    return Sample("passage", head, [user(text), assistant(rest.strip())])


def sentence(rng: Random) -> Sample:
    """A sentence with given words."""
    a, b, verb = rng.choice(ADJECTIVES), rng.choice(ANIMALS), rng.choice(VERBS)
    text = f"Write a sentence with the words {a}, {b} and {verb}."
    answer = f"The {a} {b} {verb} near the {rng.choice(NOUNS)}."
    return Sample("sentence", f"{a} {b} {verb}", [*opening(rng), user(text), assistant(answer)])


MAKERS = {headroom: 5.0, chat: 3.0, knowledge: 2.0, memory: 2.5, story: 2.0, sentence: 0.7}
