"""The parts that the bodies of all APIs share: usage, log-probabilities, identity of an answer."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.text.output import OutputPiece
from serve_app.text.tokenizer import TextModel
from worker.api import TokenLogprobs


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What every chunk of one answer repeats."""

    id: str
    model: str
    created_s: int

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerIdentity:
        """A fresh id, ``prefix`` and 24 hexadecimal digits."""
        return cls(f"{prefix}{uuid.uuid4().hex[:24]}", model, int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        """``id``, ``object``, ``created`` and ``model``."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass
class UsageCount:
    """Counts the tokens of a request's answers."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    _generated: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, piece: OutputPiece) -> None:
        """Takes a piece of answer ``index`` into account."""
        self._generated[index] = piece.num_generated
        self.num_cached_tokens += piece.num_cached

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(self._generated.values())

    def body(self) -> dict[str, Any]:
        """OpenAI's ``usage``."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            # Several answers can share one prompt; no more of it than all was cached.
            "prompt_tokens_details": {"cached_tokens": min(self.num_cached_tokens, self.num_prompt_tokens)},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


def chat_logprobs(text: TextModel, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""
    content = [
        {
            **_named(text, entry.token_id, entry.logprob),
            "top_logprobs": [_named(text, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``logprobs`` of a completion choice as it grows. ``text_offset`` counts the characters that the tokens before
    spell: half a character counts with the token that ends it."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def body(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Those of its next tokens."""
        return {
            "tokens": [_piece(self._text, entry.token_id) for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {
                    _piece(self._text, token_id): logprob
                    for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top)
                }
                for entry in logprobs
            ],
            "text_offset": [self._pass(entry.token_id) for entry in logprobs],
        }

    def _pass(self, token_id: int) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(self._text.bytes_of(token_id)))
        return before


def _piece(text: TextModel, token_id: int) -> str:
    """A token's text; ``bytes:\\xe2\\x82`` for what is no whole character, so that no two of them look alike."""
    try:
        text.bytes_of(token_id).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.bytes_of(token_id))
    return text.piece(token_id)


def _named(text: TextModel, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": text.piece(token_id), "logprob": logprob, "bytes": list(text.bytes_of(token_id))}
