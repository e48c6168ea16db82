"""Splits ``<think> ... </think>`` from an answer as it grows; what the other parsers see is the rest."""

from __future__ import annotations

from serve_app.text.chat_formats.base import first_mark, possible_mark
from serve_app.text.tokenizer import TextModel

OPEN = "<think>"
CLOSE = "</think>"
_BLANKS = "\n"


def begins_inside(prompt: str) -> bool:
    """Whether the prompt's end has opened the reasoning, so that the answer begins in it."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE) and not prompt[prompt.rfind(OPEN) + len(OPEN) :].strip()


def end_token(text: TextModel, prompt: str) -> int | None:
    """The token behind which a grammar is to begin: the end of a reasoning that the prompt has opened."""
    if not begins_inside(prompt):
        return None
    token: int | None = text.tokenizer.token_to_id(CLOSE)
    return token


class ReasoningSplitter:
    """Feeds on text; answers ``(reasoning, rest)``. Line ends around the marks belong to neither."""

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._held = ""
        self._reasoned = ""
        """Line ends at the end of the reasoning so far, held until more of it comes."""
        self._fresh = inside
        self._behind = False
        self._done = False

    def push(self, text: str) -> tuple[str, str]:
        """More text."""
        self._held += text
        reasoning, rest = "", ""
        while self._held:
            if self._done:
                taken, self._held = self._held, ""
                rest += self._without_lead(taken)
                break
            marks = (CLOSE,) if self._inside else (OPEN,)
            hit = first_mark(self._held, marks)
            if hit is None:
                free = len(self._held) - possible_mark(self._held, marks)
                taken, self._held = self._held[:free], self._held[free:]
                reasoning, rest = self._give(taken, reasoning, rest)
                break
            at, mark = hit
            taken, self._held = self._held[:at], self._held[at + len(mark) :]
            reasoning, rest = self._give(taken, reasoning, rest)
            self._cross()
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """The text is over."""
        taken, self._held = self._held, ""
        if self._inside:
            return self._give(taken, "", "")[0], ""
        return "", self._without_lead(taken)

    def _give(self, taken: str, reasoning: str, rest: str) -> tuple[str, str]:
        if not self._inside:
            return reasoning, rest + self._without_lead(taken)
        if self._fresh:
            taken = taken.lstrip(_BLANKS)
            self._fresh = not taken
        taken = self._reasoned + taken
        shown = taken.rstrip(_BLANKS)
        self._reasoned = taken[len(shown) :]
        return reasoning + shown, rest

    def _cross(self) -> None:
        if self._inside:
            self._inside, self._behind, self._done = False, True, True
            self._reasoned = ""
        else:
            self._inside, self._fresh = True, True

    def _without_lead(self, taken: str) -> str:
        if not self._behind:
            return taken
        taken = taken.lstrip(_BLANKS)
        self._behind = not taken
        return taken
