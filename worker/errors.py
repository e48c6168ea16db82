"""The error tree of a worker.

HeadroomError
|-- InvalidRequest       the caller can mend it: names the field
|   `-- PromptTooLong    both numbers
|-- ConfigError          start-up: names the option to change; collects all problems
|-- ModelLoadError       start-up: the folder or its tensors are not what the model needs
|-- Overloaded           try another replica, or later
|-- GrammarFailed        what enforces a request's grammar gave up; that request alone ends
`-- EngineDead           the step loop raised or stands still; the replica must be replaced
"""

from __future__ import annotations

from collections.abc import Sequence


class HeadroomError(Exception):
    """Base of every error that Headroom raises on purpose."""


class InvalidRequest(HeadroomError):
    """The request cannot be served as it is. ``field`` names the parameter to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return self.message


class PromptTooLong(InvalidRequest):
    """Prompt and asked-for tokens exceed what the model or the arena can hold."""

    def __init__(self, num_tokens: int, max_tokens: int, what: str = "this model's context") -> None:
        super().__init__("messages", f"The request needs {num_tokens} tokens, but {what} holds {max_tokens}.")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.what = what

    def __reduce__(self) -> tuple[type[PromptTooLong], tuple[int, int, str]]:
        return type(self), (self.num_tokens, self.max_tokens, self.what)


class GrammarFailed(HeadroomError):
    """A grammar was accepted but grew beyond what can be followed (a pattern with too many states, for instance)."""


class ConfigError(HeadroomError):
    """One or more options cannot be honoured; the message lists all of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(list(problems))
        self.problems = list(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class ModelLoadError(HeadroomError):
    """The model folder lacks something, or holds something that no part of the model declares."""


class Overloaded(HeadroomError):
    """The worker will not take the request now (its own queue is full, or it drains)."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class EngineDead(HeadroomError):
    """The engine stopped: its loop raised, or it has not advanced although there was work."""
