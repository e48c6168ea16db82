"""Random JSON schemas of the kinds that clients send."""

from __future__ import annotations

from random import Random
from typing import Any

WORDS = ("name", "city", "größe", "a b", "x", "count", "tags", "$ref_", "is-ok")


def random_schema(chance: Random, depth: int = 0) -> dict[str, Any]:
    """An object at the top; inside, any kind, at most three levels deep."""
    if depth == 0:
        return _object(chance, depth)
    leaves = [_string, _number, _boolean, _enum, _const, _nullable]
    nested = [] if depth >= 3 else [_object, _array, _any_of]
    return chance.choice([*leaves, *nested])(chance, depth)


def _object(chance: Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(0 if depth else 1, 4))
    required = [name for name in names if chance.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: random_schema(chance, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(chance: Random, depth: int) -> dict[str, Any]:
    low = chance.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(chance, depth + 1),
        "minItems": low,
        "maxItems": low + chance.randint(0, 2),
    }


def _any_of(chance: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}


def _string(chance: Random, depth: int) -> dict[str, Any]:
    return chance.choice(
        [
            {"type": "string"},
            {"type": "string", "maxLength": chance.randint(1, 8)},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
            {"type": "string", "format": "date"},
        ]
    )


def _number(chance: Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    return chance.choice(
        [
            {"type": "integer"},
            {"type": "number"},
            {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 90)},
        ]
    )


def _boolean(chance: Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _enum(chance: Random, depth: int) -> dict[str, Any]:
    return {"enum": ["red", 'qu"ote', 7, None, True]}


def _const(chance: Random, depth: int) -> dict[str, Any]:
    return {"const": chance.choice(["fixed", 3.5, False])}


def _nullable(chance: Random, depth: int) -> dict[str, Any]:
    return {"type": ["string", "null"], "maxLength": 5}
