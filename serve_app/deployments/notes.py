"""What a dispatcher tells of a request on its way to a worker, for whoever keeps count or makes spans."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from serve_app.policies.placement import Choice


class RequestNotes(Protocol):
    """One request's notes. What is raised inside a context ended that stretch, and is raised on."""

    def queued(self) -> AbstractContextManager[None]:
        """It waits for a worker; once more after each try that came to nothing."""
        ...

    def placed(self, choice: Choice, num_candidates: int) -> AbstractContextManager[None]:
        """It was placed on one of so many workers, and is tried there up to its first tokens."""
        ...


class Unnoted:
    """Notes nothing."""

    def queued(self) -> AbstractContextManager[None]:
        """See :class:`RequestNotes`."""
        return nullcontext()

    def placed(self, choice: Choice, num_candidates: int) -> AbstractContextManager[None]:
        """See :class:`RequestNotes`."""
        return nullcontext()


UNNOTED = Unnoted()
