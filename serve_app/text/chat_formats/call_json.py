"""Reads a tool call ``{"name": NAME, "arguments": VALUE}`` while its text is still arriving."""

from __future__ import annotations

import json
import re
from typing import Any

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')


class CallReader:
    """Feeds on the text of one call.

    With the keys in the usual order the arguments are given on as they come; otherwise all at once at the end.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._text = ""
        self._value = _ValueReader()

    def push(self, text: str) -> str:
        """More text; answers new text of the arguments. ``name`` is known before any of them."""
        if self.name is not None:
            return self._value.push(text)
        self._text += text
        head = _HEAD.match(self._text)
        if head is None:
            return ""
        name = _parsed(head.group(1))
        if not isinstance(name, str):
            return ""
        self.name = name
        rest, self._text = self._text[head.end() :], ""
        return self._value.push(rest)

    def finish(self) -> str | None:
        """The text of the call is over; answers what is left of the arguments, None if it was no call at all."""
        if self.name is not None:
            return self._value.finish()
        call = _parsed(self._text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        self.name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _ValueReader:
    """Passes one JSON value on, up to its end; a value that is a string holds the JSON text itself."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string: str | None = None
        self._begun = False
        self._over = False

    def push(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            self._begun = True
            if text[0] == '"':
                self._string = ""
        if self._over:
            return ""
        end = self._end(text)
        taken = text if end is None else text[:end]
        self._over = end is not None
        if self._string is None:
            return taken
        self._string += taken
        return self._decoded() if self._over else ""

    def finish(self) -> str:
        """What a string that was cut off holds."""
        return self._string[1:] if self._string is not None and not self._over else ""

    def _decoded(self) -> str:
        decoded = _parsed(self._string or "")
        return decoded if isinstance(decoded, str) else (self._string or "")

    def _end(self, text: str) -> int | None:
        """Where in ``text`` the value ends."""
        for index, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                    if not self._depth:
                        return index + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth < 0:
                    return index  # a number or a word: the end of the object around it
                if not self._depth:
                    return index + 1
            elif character in ", \n\t\r" and not self._depth:
                return index
        return None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
