"""Keeps special tokens that somebody wrote into a message what they are there: text.

A chat template makes one text of the messages and its own marks, and a tokenizer turns every mark in it into a special
token, whoever wrote it. So marks inside messages are hidden behind placeholders that nobody can guess while the
template renders, and spelled out in ordinary tokens afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from serve_app.text.tokenizer import TextModel


class Literals:
    """The hidden marks of one prompt."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        # Digits alone: they survive whatever a template does to a text, escapes and changes of case included.
        self._nonce = f"{secrets.randbelow(10**24):024}"
        self._marks: list[str] = []

    def hide(self, value: Any, keep: Collection[str] = ()) -> Any:
        """A value with every special token in its strings hidden, but those to ``keep``; as it is if there is none."""
        if isinstance(value, str):
            return self._hidden(value, keep)
        if isinstance(value, Mapping):
            return {self.hide(name, keep): self.hide(entry, keep) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(entry, keep) for entry in value]
        return value

    def show(self, prompt: str) -> str:
        """The rendered text with the marks as they were written."""
        return "".join(self._marks[int(part)] if odd else part for odd, part in self._parts(prompt))

    def encode(self, prompt: str) -> list[int]:
        """Token ids of the rendered text; hidden marks become ordinary tokens."""
        ids: list[int] = []
        for is_mark, part in self._parts(prompt):
            ids += self._text.spelled[self._marks[int(part)]] if is_mark else self._text.encode(part)
        return ids

    def _hidden(self, string: str, keep: Collection[str]) -> str:
        # Longer ones first: one mark may begin like another.
        found = [mark for mark in self._text.spelled if mark in string and mark not in keep]
        if not found:
            return string
        pattern = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        return re.sub(pattern, lambda match: self._placeholder(match.group()), string)

    def _placeholder(self, mark: str) -> str:
        if mark not in self._marks:
            self._marks.append(mark)
        return f"{self._nonce}:{self._marks.index(mark)};"

    def _parts(self, prompt: str) -> list[tuple[bool, str]]:
        """Text and numbers of marks in turn; empty texts left out."""
        if not self._marks:
            return [(False, prompt)]
        split = re.split(rf"{self._nonce}:(\d+);", prompt)
        return [(index % 2 == 1, part) for index, part in enumerate(split) if part or index % 2]
