"""The parser that formats with ``<tool_call> ... </tool_call>`` share: reasoning, text, and calls between marks."""

from __future__ import annotations

from typing import Protocol

from serve_app.text.chat_formats.base import ChatDelta, ToolDelta, first_mark, possible_mark
from serve_app.text.chat_formats.reasoning import ReasoningSplitter

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class CallParser(Protocol):
    """Reads the inside of one call."""

    def push(self, text: str) -> tuple[str | None, str]:
        """More text; answers the name, when it becomes known with it, and new text of the arguments."""
        ...

    def finish(self) -> tuple[str | None, str] | None:
        """The inside is over; None if it was no call."""
        ...


class MakesCallParser(Protocol):
    """Makes the reader of the next call."""

    def __call__(self) -> CallParser: ...


class MarkedCallsParser:
    """Reads one answer. What stands between the marks and is no call is given on as text, marks and all."""

    def __init__(self, inside_reasoning: bool, make: MakesCallParser | None) -> None:
        self._splitter = ReasoningSplitter(inside_reasoning)
        self._make = make
        self._held = ""
        self._blanks = ""
        self._said = False
        self._call: CallParser | None = None
        self._raw = ""
        self._named = False
        self._num_calls = 0

    def push(self, text: str) -> ChatDelta:
        """More text."""
        reasoning, rest = self._splitter.push(text)
        return ChatDelta(reasoning=reasoning) + self._read(rest)

    def finish(self) -> ChatDelta:
        """The text is over; a call that was cut off ends here."""
        reasoning, rest = self._splitter.finish()
        delta = ChatDelta(reasoning=reasoning) + self._read(rest)
        left, self._held = self._held, ""
        if self._call is not None:
            delta += self._inside(left) + self._close_call("")
        else:
            delta += self._text(left)
        if not self._num_calls:
            delta += ChatDelta(content=self._blanks)
        return delta

    def _read(self, text: str) -> ChatDelta:
        if self._make is None:
            return ChatDelta(content=text)
        self._held += text
        delta = ChatDelta()
        while self._held:
            mark = OPEN if self._call is None else CLOSE
            hit = first_mark(self._held, (mark,))
            if hit is None:
                free = len(self._held) - possible_mark(self._held, (mark,))
                taken, self._held = self._held[:free], self._held[free:]
                return delta + (self._text(taken) if self._call is None else self._inside(taken))
            taken, self._held = self._held[: hit[0]], self._held[hit[0] + len(mark) :]
            if self._call is None:
                delta += self._text(taken)
                self._call, self._raw, self._named = self._make(), "", False
            else:
                delta += self._inside(taken) + self._close_call(CLOSE)
        return delta

    def _text(self, text: str) -> ChatDelta:
        """Text outside of calls; blanks ahead of and between calls belong to the marks."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        return ChatDelta(content=shown)

    def _inside(self, text: str) -> ChatDelta:
        assert self._call is not None
        self._raw += text
        name, arguments = self._call.push(text)
        return self._tool(name, arguments)

    def _close_call(self, mark: str) -> ChatDelta:
        assert self._call is not None
        found = self._call.finish()
        self._call = None
        if found is None:
            return self._text(OPEN + self._raw + mark)
        delta = self._tool(*found)
        self._num_calls += 1
        self._blanks = ""
        return delta

    def _tool(self, name: str | None, arguments: str) -> ChatDelta:
        if name is None and not arguments:
            return ChatDelta()
        return ChatDelta(tools=(ToolDelta(self._num_calls, name, arguments),))
