"""Keeps outputs inside a grammar: per request a matcher that says which tokens may come next, through llguidance.

Implements :class:`worker.scheduling.grammars.Grammars`. Masks are int32 words over the model's vocabulary, lowest bit
first; a set bit allows the token. What a grammar may be is described at :class:`worker.api.Grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.api import Grammar
from worker.errors import ConfigError, GrammarFailed, InvalidRequest

FIELD = "response_format"
MAX_GRAMMAR_LENGTH = 256 * 1024
CACHED_GRAMMARS = 64

# The form in which most models write JSON by themselves, without room for endless blanks.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarMatchers:
    """Matchers of the live requests.

    Args:
        tokenizer_json: text of the checkpoint's ``tokenizer.json``.
        vocab_size: tokens of the model's logits; ids behind the tokenizer's own are never allowed.
        eos_token_ids: the tokens that end an output; allowed where the grammar is complete.

    Raises ConfigError where llguidance is not installed.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(["structured output needs the package llguidance"]) from error
        self._library = llguidance
        size = max(vocab_size, _tokenizer_size(tokenizer_json))
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=size, eos_token=list(eos_token_ids))
        self._num_words = -(-vocab_size // 32)
        self._tail = _tail_mask(vocab_size)
        self._ends = frozenset(eos_token_ids)
        self._ends_only = np.zeros(self._num_words, dtype=np.int32)
        for token in self._ends:
            self._ends_only.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._live: dict[int, _Live] = {}
        # Making a matcher of a large schema takes 100 ms and more; copying one does not.
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compile)

    @classmethod
    def for_folder(
        cls, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> GrammarMatchers | None:
        """Matchers for a checkpoint; None where it has no tokenizer or no end token, or llguidance is missing."""
        file = folder / "tokenizer.json"
        if not file.is_file() or not eos_token_ids:
            return None
        try:
            return cls(file.read_text(encoding="utf-8"), vocab_size, eos_token_ids)
        except ConfigError:
            return None

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for a grammar that cannot be enforced, with the library's reason."""
        if len(grammar.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(FIELD, f"The grammar is longer than {MAX_GRAMMAR_LENGTH} characters.")
        self._compiled(grammar.kind, grammar.text)

    def open(self, request: int, grammar: Grammar) -> None:
        """Makes a request's matcher."""
        matcher = self._compiled(grammar.kind, grammar.text).deep_copy()
        self._live[request] = _Live(matcher, grammar.after_token_id)

    def mask(self, request: int) -> npt.NDArray[np.int32] | None:
        """Which tokens may come next: [ceil(vocab_size / 32)] int32, None for all of them."""
        live = self._live[request]
        if live.waits_for is not None:
            return None
        if live.matcher.is_stopped():
            return self._ends_only.copy()
        words = np.frombuffer(live.matcher.compute_bitmask(), dtype=np.int32)[: self._num_words].copy()
        if live.matcher.is_error():  # said when the token comes
            return self._ends_only.copy()
        words[-1] &= self._tail
        live.mask = words
        return words

    def advance(self, request: int, token_ids: Sequence[int]) -> None:
        """The output went on by these tokens. GrammarFailed where the library cannot follow; a token that the grammar
        forbids is a broken invariant: RuntimeError."""
        live = self._live[request]
        tokens = list(token_ids)
        if live.waits_for is not None:
            if live.waits_for not in tokens:
                return
            tokens = tokens[tokens.index(live.waits_for) + 1 :]
            live.waits_for = None
        for token in tokens:
            # A complete output can only end, and the library takes no token behind its end, not even that one.
            _expect_sound(live.matcher)
            over = live.matcher.is_stopped()
            if (over and token not in self._ends) or (not over and not live.matcher.consume_token(token)):
                if live.allows(token):
                    _expect_sound(live.matcher)
                raise RuntimeError(f"token {token} was generated outside the grammar")

    def close(self, request: int) -> None:
        """Forgets a matcher."""
        self._live.pop(request, None)

    def _compile(self, kind: str, text: str) -> Any:
        source = self._source(kind, text)
        # Some grammars fail only at their first token: a schema that is nothing but a reference to itself. A matcher of
        # its own finds that out, since copies share what the library learns of a grammar.
        probe, matcher = (self._library.LLMatcher(self._tokenizer, source, log_level=0) for _ in range(2))
        if not probe.is_error():
            probe.compute_bitmask()
        if probe.is_error():
            reason = probe.get_error().strip().splitlines()[0]
            raise InvalidRequest(FIELD, f"The {kind.replace('_', ' ')} cannot be enforced: {reason}")
        return matcher

    def _source(self, kind: str, text: str) -> str:
        make = self._library.LLMatcher
        try:
            if kind == "json_object":
                source = make.grammar_from_json_schema({"type": "object"}, overrides=_JSON_FORM)
            elif kind == "json_schema":
                source = make.grammar_from_json_schema(json.loads(text), overrides=_JSON_FORM)
            elif kind == "regex":
                source = make.grammar_from_regex(text)
            elif kind == "lark":
                source = make.grammar_from_lark(text)
            else:
                raise InvalidRequest(FIELD, f"Grammars of kind {kind!r} are not known.")
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(FIELD, f"The {kind.replace('_', ' ')} is not valid: {error}") from error
        return str(source)


class _Live:
    __slots__ = ("mask", "matcher", "waits_for")

    def __init__(self, matcher: Any, waits_for: int | None) -> None:
        self.matcher = matcher
        self.waits_for = waits_for
        """The token behind which the grammar begins, until it came."""
        self.mask: npt.NDArray[np.int32] | None = None
        """What was last said to be allowed."""

    def allows(self, token: int) -> bool:
        return self.mask is not None and bool(self.mask[token // 32] >> np.int32(token % 32) & 1)


def _expect_sound(matcher: Any) -> None:
    if matcher.is_error():
        reason = matcher.get_error().strip().splitlines()[0]
        raise GrammarFailed(f"The grammar cannot be followed: {reason}")


def _tail_mask(vocab_size: int) -> np.int32:
    """The bits of the last word that stand for tokens."""
    used = vocab_size % 32
    return np.int32(-1) if used == 0 else np.uint32((1 << used) - 1).view(np.int32)


def _tokenizer_size(tokenizer_json: str) -> int:
    content = json.loads(tokenizer_json)
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    ids += [token["id"] for token in content.get("added_tokens", [])]
    return max(ids, default=-1) + 1
