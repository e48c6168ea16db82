"""Dialogues answered in JSON: objects from facts, by a schema, extracted from a sentence, and lists."""

from __future__ import annotations

import json
from random import Random

from demo.tasks.copying import random_word
from demo.tasks.sample import Message, Sample, assistant, user
from demo.tasks.words import (
    ANIMALS,
    CITIES,
    COLORS,
    COUNTRIES,
    DAYS,
    FOODS,
    FRUITS,
    JOBS,
    MONTHS,
    NAMES,
    NOUNS,
)

FIELDS = {
    "name": ("string", NAMES), "city": ("string", CITIES), "job": ("string", JOBS), "color": ("string",
    COLORS), "food": ("string", FOODS), "fruit": ("string", FRUITS), "animal": ("string", ANIMALS), "month":
    ("string", MONTHS), "day": ("string", DAYS), "country": ("string", list(COUNTRIES)), "item": ("string",
    NOUNS), "title": ("string", NOUNS), "age": ("integer", (1, 99)), "price": ("integer", (1, 500)),
    "count": ("integer", (0, 1000)), "year": ("integer", (1900, 2030)), "id": ("integer", (1, 9999)),
    "score": ("integer", (0, 100)), "active": ("boolean", None), "open": ("boolean", None), "ready":
    ("boolean", None),
}  # fmt: skip
LISTS = {
    "fruits": FRUITS, "animals": ANIMALS, "colors": COLORS, "cities": CITIES, "names": NAMES, "foods":
    FOODS, "jobs": JOBS, "months": MONTHS, "days": DAYS,
}  # fmt: skip


def draw_field(rng: Random, name: str) -> tuple[str, object]:
    """JSON type and a value for a field; unknown names get a number or a word."""
    if name not in FIELDS:
        return ("integer", rng.randint(0, 999)) if rng.random() < 0.5 else ("string", random_word(rng))
    kind, pool = FIELDS[name]
    if kind == "boolean":
        return kind, rng.random() < 0.5
    if kind == "integer":
        low, high = pool
        return kind, rng.randint(low, high)
    return kind, rng.choice(pool)


def draw_object(rng: Random, low: int = 1, high: int = 5) -> tuple[dict[str, object], dict[str, object]]:
    """An object and the properties of its schema."""
    names = rng.sample([*FIELDS, random_word(rng), random_word(rng)], rng.randint(low, high))
    drawn = {name: draw_field(rng, name) for name in names}
    return {n: v for n, (_, v) in drawn.items()}, {n: {"type": t} for n, (t, _) in drawn.items()}


def spoken(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def listed(values: dict[str, object], rng: Random) -> str:
    link = rng.choice((" {n} {v}", " {n}: {v}", " {n} = {v}", " {n} is {v}"))
    parts = [link.format(n=n, v=spoken(v)) for n, v in values.items()]
    return (rng.choice((",", " and")) if len(parts) == 2 else ",").join(parts).strip()


def opening(rng: Random) -> list[Message]:
    texts = ("Reply with JSON only.", "Answer in JSON.", "You are a helpful assistant that writes JSON.")
    return [{"role": "system", "content": rng.choice(texts)}] if rng.random() < 0.3 else []


def from_fields(rng: Random) -> Sample:
    values, _ = draw_object(rng)
    ask = rng.choice(
        (
            "Write a JSON object with {}.",
            "Make a JSON object: {}",
            "Give me JSON with {}.",
            "Return JSON for {}.",
            "Turn this into JSON: {}",
        )
    )
    answer = json.dumps(values)
    turns = [*opening(rng), user(ask.format(listed(values, rng))), assistant(answer)]
    return Sample("json_fields", answer, turns, None, answer)


def from_schema(rng: Random) -> Sample:
    """The schema stands in the request or in the system message; its order of properties is the answer's."""
    values, properties = draw_object(rng)
    schema = {"type": "object", "properties": properties, "required": list(values)}
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    given = list(values.items())
    rng.shuffle(given)
    text = listed(dict(given), rng)
    rule = f"Answer with JSON that fits this schema:\n{json.dumps(schema)}"
    answer = json.dumps(values)
    if rng.random() < 0.5:
        turns: list[Message] = [{"role": "system", "content": rule}, user(text)]
    else:
        turns = [*opening(rng), user(f"{rule}\n{text}")]
    return Sample("json_schema", answer, [*turns, assistant(answer)], None, answer)


def extract(rng: Random) -> Sample:
    name, city, job, age = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS), rng.randint(5, 95)
    values = {"name": name, "age": age, "city": city, "job": job}
    sentence = rng.choice(
        (
            f"{name} is {age} years old, lives in {city} and works as a {job}.",
            f"In {city} there is a {job} called {name}, {age} years old.",
            f"{name}, {age}, is a {job} from {city}.",
        )
    )
    fields = rng.sample(list(values), rng.randint(1, 4))
    asked = " and ".join([", ".join(fields[:-1]), fields[-1]]) if len(fields) > 1 else fields[0]
    answer = json.dumps({field: values[field] for field in fields})
    ask = rng.choice((f"Extract the {asked} as JSON: {sentence}", f"{sentence}\nGive the {asked} as JSON."))
    return Sample(
        "json_extract", answer + sentence[:3], [*opening(rng), user(ask), assistant(answer)], None, answer
    )


def array(rng: Random) -> Sample:
    kind = rng.randrange(3)
    if kind == 0:
        group = rng.choice(list(LISTS))
        items = rng.sample(LISTS[group], rng.randint(2, 6))
        text = f"Write these {group} as a JSON array: {', '.join(items)}"
        value: object = items
    elif kind == 1:
        rows = [{"name": rng.choice(NAMES), "age": rng.randint(5, 95)} for _ in range(rng.randint(2, 4))]
        said = ", ".join(f"{row['name']} is {row['age']}" for row in rows)
        text, value = f"Write a JSON array of objects with name and age: {said}", rows
    else:
        inner, _ = draw_object(rng, 1, 3)
        outer = rng.choice(("user", "order", "data", "result", "person"))
        text, value = f"Write a JSON object with {outer} holding {listed(inner, rng)}.", {outer: inner}
    answer = json.dumps(value)
    return Sample("json_array", answer, [*opening(rng), user(text), assistant(answer)], None, answer)


MAKERS = {from_fields: 3.0, from_schema: 4.0, extract: 2.0, array: 2.0}
