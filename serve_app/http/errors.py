"""Errors as HTTP answers in OpenAI's shape: which exception gets which status, type, code and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse

from worker.errors import EngineDead, InvalidRequest, Overloaded, PromptTooLong


class UnknownModel(Exception):
    """No application here serves a model of that name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, list(known))
        self.message = f"The model {name!r} does not exist here; served: {', '.join(known)}."

    def __str__(self) -> str:
        return self.message


class WorkerLost(Exception):
    """The worker that held the request died or could not be reached, and it cannot be run elsewhere."""


class DeadlinePassed(Exception):
    """The request took longer than requests may take here."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error answer.

    Attributes:
        status: HTTP status.
        message: a sentence for people.
        kind: OpenAI's ``type``.
        code: OpenAI's ``code``, for programs.
        param: the field to change.
        headers: extra response headers.
    """

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body, the same for responses and for ``data:`` events of a broken stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))


def describe_error(error: BaseException) -> ApiError:
    """The answer for an exception; what is not known here is an internal error whose text stays in the log."""
    if isinstance(error, PromptTooLong):
        return ApiError(
            400, str(error), "invalid_request_error", code="context_length_exceeded", param=error.field
        )
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), "invalid_request_error", param=error.field)
    if isinstance(error, UnknownModel):
        return ApiError(404, str(error), "invalid_request_error", code="model_not_found", param="model")
    if isinstance(error, Overloaded):
        seconds = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(
            429, str(error), "rate_limit_error", code="overloaded", headers={"Retry-After": seconds}
        )
    if isinstance(error, EngineDead | WorkerLost):
        return ApiError(503, f"The model's worker failed: {error}", "server_error", code="worker_failed")
    if isinstance(error, DeadlinePassed):
        return ApiError(504, str(error), "server_error", code="deadline_passed")
    return ApiError(500, "The service met an internal error; its log has the details.", "server_error")


_NO_OBJECT = frozenset({"dict_type", "missing", "model_attributes_type", "model_type"})
"""Kinds of problem that say, of a whole body, that it is no object: another value, nothing, or a form's text."""


def describe_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The answer for a body that does not fit its schema: names the first field that is wrong, and how."""
    first = problems[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", "invalid_request_error")
    if not path and first["type"] in _NO_OBJECT:
        sentence = "The body must be a JSON object, sent with the header Content-Type: application/json."
        return ApiError(400, sentence, "invalid_request_error")
    param = ".".join(path) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{message}", "invalid_request_error", param=param)
