"""What the scheduler asks of grammars: a mask ahead of each sampled token, and to be told which token came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from worker.api import Grammar


class Grammars(Protocol):
    """Matchers of the live requests, by request number. ``check`` may be called from any thread, the rest only from
    the loop's."""

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest (field ``response_format``) for a grammar that cannot be enforced."""
        ...

    def open(self, request: int, grammar: Grammar) -> None:
        """Makes a request's matcher; it stays over retractions."""
        ...

    def mask(self, request: int) -> npt.NDArray[np.int32] | None:
        """Bit mask over the vocabulary for the request's next token (bit set: allowed); None allows all."""
        ...

    def advance(self, request: int, token_ids: Sequence[int]) -> None:
        """The request's output went on by these tokens. Raises GrammarFailed where it can be followed no longer."""
        ...

    def close(self, request: int) -> None:
        """Forgets a matcher."""
        ...
