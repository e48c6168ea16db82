"""Dialogues that repeat, reorder or pick from short strings: everything needed lies inside one attention window."""

from __future__ import annotations

import string
from random import Random

from demo.tasks.sample import Sample, assistant, user
from demo.tasks.words import ADJECTIVES, ANIMALS, CITIES, NAMES, NOUNS, SYLLABLES, VERBS

COPY_PHRASES = (
    "Repeat this exactly: {}",
    "Repeat after me: {}",
    "Copy this text: {}",
    "Say exactly this and nothing else: {}",
    "Please write back: {}",
    "Echo: {}",
)


def random_word(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def random_code(rng: Random) -> str:
    alphabet = rng.choice((string.digits, string.ascii_uppercase, string.ascii_uppercase + string.digits))
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(3, 10)))


def random_string(rng: Random) -> str:
    """Words, invented words, codes, digits or a mixture: about 3 to 35 tokens."""
    kind = rng.randrange(6)
    if kind == 0:
        return " ".join(rng.choice(ADJECTIVES + NOUNS + ANIMALS + VERBS) for _ in range(rng.randint(3, 14)))
    if kind == 1:
        return " ".join(random_word(rng) for _ in range(rng.randint(2, 8)))
    if kind == 2:
        return " ".join(random_code(rng) for _ in range(rng.randint(1, 4)))
    if kind == 3:
        return " ".join(str(rng.randint(0, 10 ** rng.randint(1, 5))) for _ in range(rng.randint(2, 8)))
    if kind == 4:
        named, place = rng.choice(NAMES), rng.choice(CITIES)
        return (
            f"{named} {rng.choice(VERBS)} near the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} in {place}."
        )
    pieces = [
        random_word(rng),
        random_code(rng),
        rng.choice(NAMES),
        str(rng.randint(0, 9999)),
        rng.choice(NOUNS),
    ]
    rng.shuffle(pieces)
    return rng.choice((" ", ", ", "-", "; ")).join(pieces[: rng.randint(2, 5)])


def copy(rng: Random) -> Sample:
    text = random_string(rng)
    return Sample("copy", text, [user(rng.choice(COPY_PHRASES).format(text)), assistant(text)], None, text)


def copy_twice(rng: Random) -> Sample:
    """Two turns: the second repeats another string, so that the nearest one wins."""
    first, second = random_string(rng), random_string(rng)
    phrase = rng.choice(COPY_PHRASES)
    turns = [user(phrase.format(first)), assistant(first), user(phrase.format(second)), assistant(second)]
    return Sample("copy_twice", second, turns, None, second)


def pick(rng: Random) -> Sample:
    words = rng.sample(NOUNS + ANIMALS, rng.randint(3, 7))
    listed = ", ".join(words)
    which = rng.choice(("first", "last", "second", "reverse", "count"))
    if which == "reverse":
        text, answer = f"Write this list backwards: {listed}", ", ".join(reversed(words))
    elif which == "count":
        text, answer = f"How many words are in this list: {listed}?", str(len(words))
    else:
        place = {"first": 0, "second": 1, "last": -1}[which]
        text, answer = f"What is the {which} word in this list: {listed}?", words[place]
    return Sample("pick", f"{which} {listed}", [user(text), assistant(answer)], None, answer)


def spell(rng: Random) -> Sample:
    word = rng.choice((rng.choice(NOUNS + ANIMALS + NAMES), random_word(rng)))
    kind = rng.randrange(3)
    if kind == 0:
        text, answer = f"Spell the word {word}.", "-".join(word)
    elif kind == 1:
        text, answer = f"Write {word} in capital letters.", word.upper()
    else:
        text, answer = f"What is the first letter of {word}?", word[0]
    return Sample("spell", text, [user(text), assistant(answer)], None, answer)


MAKERS = {copy: 5.0, copy_twice: 1.5, pick: 1.5, spell: 1.5}
