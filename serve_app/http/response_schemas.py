"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, StrictInt, field_validator

from serve_app.http.schemas import MAX_COUNT, ContentPart, Finite, Lenient, RequestBody
from worker.api import MAX_TOP_LOGPROBS


class InputItem(Lenient):
    """One item of ``input``: a message, a call, a call's result, or an earlier reasoning."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class ResponseTool(Lenient):
    """One of ``tools``; only functions can be called here."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Lenient):
    """``tool_choice`` that names a function."""

    type: str
    name: str | None = None


class TextFormat(Lenient):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Lenient):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Lenient):
    """``reasoning``."""

    effort: str | None = None
    summary: str | None = None


class ResponseRequest(RequestBody):
    """``POST /v1/responses``. Nothing is kept between requests."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = Field(default=None, ge=1, le=MAX_COUNT)
    temperature: Finite | None = Field(default=None, ge=0, le=10)
    top_p: Finite | None = Field(default=None, gt=0, le=1)
    top_logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    tools: list[ResponseTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    @field_validator("previous_response_id")
    @classmethod
    def _nothing_is_kept(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("responses are not kept here; send the whole conversation in input")
        return value

    @field_validator("background")
    @classmethod
    def _no_background(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("background responses are not supported; use stream")
        return value
