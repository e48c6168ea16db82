"""Turns a stream of token ids into text: whole characters only, and nothing at or behind a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class TextStep:
    """What some tokens added.

    Attributes:
        text: text that is certain now: it is neither half a character nor the possible start of a stop string.
        num_tokens: how many of the given tokens count; fewer than given when a stop string was completed.
        stop: the stop string that ended the output, or None.
    """

    text: str
    num_tokens: int
    stop: str | None = None


@dataclass
class Detokenizer:
    """Incremental decoding of one output.

    Attributes:
        model: whose bytes the ids stand for.
        stop: strings that end the output; of several that match, the one that was completed first wins, then the one
            that starts first.
        keep_special: ids of special tokens that are to appear as text (their written form).
    """

    model: TextModel
    stop: Sequence[str] = ()
    keep_special: frozenset[int] = frozenset()
    _held: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Adds tokens, in order."""
        before = self._decoder.getstate() if self.stop else None
        text = self._held + self._decoder.decode(self._bytes_of_all(token_ids))
        if before is not None and any(stop in text for stop in self.stop):
            self._decoder.setstate(before)
            return self._push_to_stop(token_ids)
        free = len(text) - self._possible_stop_length(text)
        self._held = text[free:]
        return TextStep(text[:free], len(token_ids))

    def _push_to_stop(self, token_ids: Sequence[int]) -> TextStep:
        """As :meth:`push`, token by token: which one completes a stop string is to be found."""
        certain = ""
        for index, token_id in enumerate(token_ids):
            self._held += self._decoder.decode(self._bytes_of(token_id))
            hit = self._find_stop()
            if hit is not None:
                start, stop = hit
                text, self._held = certain + self._held[:start], ""
                return TextStep(text, index + 1, stop)
            free = len(self._held) - self._possible_stop_length(self._held)
            certain, self._held = certain + self._held[:free], self._held[free:]
        return TextStep(certain, len(token_ids))

    def finish(self) -> TextStep:
        """The rest, when no more tokens come; bytes that never became a character show as U+FFFD."""
        self._held += self._decoder.decode(b"", final=True)
        text, self._held = self._held, ""
        return TextStep(text, 0)

    def _bytes_of_all(self, token_ids: Sequence[int]) -> bytes:
        if not self.keep_special or self.keep_special.isdisjoint(token_ids):
            return self.model.bytes_of_all(token_ids)
        return b"".join(map(self._bytes_of, token_ids))

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self.keep_special:
            return (self.model.tokenizer.id_to_token(token_id) or "").encode()
        return self.model.bytes_of(token_id)

    def _find_stop(self) -> tuple[int, str] | None:
        hits = [(self._held.find(stop), stop) for stop in self.stop if stop in self._held]
        if not hits:
            return None
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))

    def _possible_stop_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        longest = 0
        for stop in self.stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
