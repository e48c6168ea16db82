"""Masks keep every output inside its grammar, say when it may end, and refuse what cannot be enforced."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.helpers.schemas import random_schema
from tests.helpers.tokenizers import byte_tokenizer, write_model_folder
from worker.api import Grammar
from worker.errors import GrammarFailed, InvalidRequest
from worker.grammar import GrammarMatchers

END = 258
NUM_SCHEMAS = 200


@pytest.fixture(scope="module")
def matchers() -> GrammarMatchers:
    """Over the byte tokenizer, with 300 logits: some stand for no token."""
    return GrammarMatchers(byte_tokenizer(["<call>"]).to_str(), 300, [END])


def allowed(matchers: GrammarMatchers, number: int) -> set[int]:
    mask = matchers.mask(number)
    assert mask is not None
    assert mask.dtype == np.int32
    assert mask.shape == (10,)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(matchers: GrammarMatchers, grammar: Grammar, chance: Random, limit: int = 3000) -> str:
    """A random output, up to its end."""
    matchers.open(1, grammar)
    out = []
    for _ in range(limit):
        choices = allowed(matchers, 1)
        closers = sorted(choices & set(b'"}]'))
        if choices == {END} or (END in choices and chance.random() < 0.5):
            matchers.close(1)
            return bytes(out).decode()
        if closers and chance.random() < 0.4:
            token = chance.choice(closers)
        else:
            token = chance.choice(sorted(choices - {END}))
        matchers.advance(1, [token])
        out.append(token)
    raise AssertionError(f"no end within {limit} tokens: {bytes(out)[:200]!r}")


def test_every_walk_through_a_random_schema_validates(matchers: GrammarMatchers) -> None:
    for seed in range(NUM_SCHEMAS):
        chance = Random(seed)
        schema = random_schema(chance)
        text = walk(matchers, Grammar("json_schema", json.dumps(schema)), chance)
        jsonschema.validate(json.loads(text), schema)


def test_any_object_is_an_object(matchers: GrammarMatchers) -> None:
    for seed in range(20):
        assert isinstance(json.loads(walk(matchers, Grammar("json_object"), Random(seed))), dict)


def test_a_complete_output_can_only_end(matchers: GrammarMatchers) -> None:
    matchers.open(2, Grammar("regex", "ab"))
    assert allowed(matchers, 2) == {ord("a")}
    matchers.advance(2, list(b"ab"))
    assert allowed(matchers, 2) == {END}
    matchers.advance(2, [END])
    matchers.close(2)


def test_ids_without_a_token_and_special_tokens_are_never_allowed(matchers: GrammarMatchers) -> None:
    matchers.open(3, Grammar("regex", "(.|\n)*"))
    assert allowed(matchers, 3) <= {*range(256), END}
    matchers.close(3)


def test_a_grammar_can_wait_for_a_token(matchers: GrammarMatchers) -> None:
    mark = 259
    matchers.open(4, Grammar("regex", "yes", after_token_id=mark))
    matchers.advance(4, list(b"anything at all"))
    assert matchers.mask(4) is None
    matchers.advance(4, [ord("?"), mark, ord("y")])
    assert allowed(matchers, 4) == {ord("e")}
    matchers.close(4)


def test_a_mark_of_the_vocabulary_is_one_token(matchers: GrammarMatchers) -> None:
    matchers.open(5, Grammar("lark", 'start: <call> "x"\n'))
    assert allowed(matchers, 5) == {259}
    matchers.close(5)


def test_requests_do_not_share_a_state(matchers: GrammarMatchers) -> None:
    grammar = Grammar("regex", "abc")
    matchers.open(6, grammar)
    matchers.open(7, grammar)
    matchers.advance(6, [ord("a")])
    assert allowed(matchers, 6) == {ord("b")}
    assert allowed(matchers, 7) == {ord("a")}
    matchers.close(6)
    matchers.close(7)


def test_a_token_outside_the_grammar_is_an_error(matchers: GrammarMatchers) -> None:
    matchers.open(8, Grammar("regex", "a"))
    with pytest.raises(RuntimeError, match="outside the grammar"):
        matchers.advance(8, [ord("b")])
    matchers.close(8)


def test_a_pattern_with_too_many_states_fails_and_is_no_broken_invariant(matchers: GrammarMatchers) -> None:
    matchers.open(9, Grammar("regex", "(a?){500}a{500}"))
    assert allowed(matchers, 9) == {ord("a")}
    with pytest.raises(GrammarFailed, match="too many"):
        matchers.advance(9, list(b"a" * 50))
    assert allowed(matchers, 9) == {END}
    matchers.close(9)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
        (Grammar("json_schema", '{"not": {"type": "string"}}'), "not"),
        (Grammar("json_schema", "["), "not valid"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("regex", "("), "regex"),
        (Grammar("yaml", ""), "'yaml'"),
        (Grammar("regex", "a" * 300_000), "longer"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    matchers: GrammarMatchers, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        matchers.check(grammar)
    assert refused.value.field == "response_format"


def test_a_folder_without_tokenizer_or_end_has_no_matchers(tmp_path: Path) -> None:
    assert GrammarMatchers.for_folder(tmp_path, 10, [1]) is None
    folder = write_model_folder(tmp_path / "m")
    assert GrammarMatchers.for_folder(folder, 259, []) is None
    assert GrammarMatchers.for_folder(folder, 259, [END]) is not None


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}],
)
def test_a_schema_that_only_refers_to_itself_is_refused(
    matchers: GrammarMatchers, schema: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        matchers.check(Grammar("json_schema", json.dumps(schema)))
