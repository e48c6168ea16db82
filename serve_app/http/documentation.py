"""What the OpenAPI document says about answers: their bodies, their errors, and streams."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(BaseModel):
    """Why a request failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error has this shape."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What generated tokens were for."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TextLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionBody(BaseModel):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class CalledFunction(BaseModel):
    """A function and the JSON text of its arguments."""

    name: str
    arguments: str


class MadeToolCall(BaseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[MadeToolCall] | None = None


class TokenLogprob(BaseModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class AnswerTokenLogprob(TokenLogprob):
    """A token of the answer with its alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[AnswerTokenLogprob]
    refusal: None


class ChatChoice(BaseModel):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatBody(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponseBody(BaseModel):
    """The answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenList(BaseModel):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class TokenText(BaseModel):
    """The text of ids."""

    prompt: str


class Status(BaseModel):
    """A word about the service."""

    status: str


ERRORS: dict[int, str] = {
    400: "The request cannot be served as it is; `param` names the field.",
    401: "The API key is missing or not valid.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too many requests; `Retry-After` says when to come again.",
    500: "An internal error.",
    503: "The model's worker failed.",
}


def answers(model: type[BaseModel], *, stream: bool = False) -> Responses:
    """The answers of a route: its body, as a stream too where it has one, and every error."""
    described: Responses = {200: {"model": model}}
    if stream:
        described[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        **described,
        **{status: {"model": ErrorBody, "description": text} for status, text in ERRORS.items()},
    }


def document(app: FastAPI) -> None:
    """Makes the application's OpenAPI document say 400, not 422, where a body does not fit its schema."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
