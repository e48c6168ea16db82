"""The bodies that clients send, checked: OpenAI's fields, the usual extensions, and null where a field is unset.

Fields that this service does not know are ignored, as clients send many; ``unknown_fields`` lists them so that the
answer's ``x-ignored-fields`` header can.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from worker.api import MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams
from worker.errors import InvalidRequest

MAX_COUNT = 2**31 - 1
"""Of tokens: far beyond any context, and a number that every reader behind can hold."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16
MAX_DEPTH = 200
"""Levels of lists and objects in a body: what walks through them must not run out of stack."""

_T = TypeVar("_T")
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Lenient(BaseModel):
    """A body whose unknown fields are kept aside."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown_fields(self) -> list[str]:
        """Names that were sent and mean nothing here."""
        return sorted(self.model_extra or {})


class RequestBody(Lenient):
    """A whole body: no text in it, at any depth, is one that cannot be encoded, and no depth is too large."""

    @model_validator(mode="before")
    @classmethod
    def _texts_are_unicode(cls, body: Any) -> Any:
        check_json(body)
        return body


class StreamOptions(Lenient):
    """``stream_options`` of a streamed request."""

    include_usage: bool | None = None


class SamplingFields(RequestBody):
    """What completions and chat share."""

    model: str | None = None
    max_tokens: StrictInt | None = Field(default=None, ge=1, le=MAX_COUNT)
    temperature: Finite | None = Field(default=None, ge=0, le=10)
    top_p: Finite | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=-1, le=MAX_COUNT, description="0 or -1 keeps all.")
    min_p: Finite | None = Field(default=None, ge=0, le=1)
    presence_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, Finite] | None = None
    seed: StrictInt | None = Field(default=None, ge=-(2**63), le=MAX_SEED)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: StrictInt | None = Field(default=None, ge=0, le=MAX_COUNT)
    ignore_eos: bool | None = None
    n: StrictInt | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None

    @field_validator("stop")
    @classmethod
    def _stop_is_short(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        if any(not string or len(string) > MAX_STOP_LENGTH for string in strings):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias_of_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key, value in (bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"keys are token ids, not {key!r}")
            if not -100 <= value <= 100:
                raise ValueError(f"values lie between -100 and 100, not {value}")
        return bias

    @field_validator("priority")
    @classmethod
    def _no_priorities(cls, priority: int | None) -> int | None:
        if priority:
            raise ValueError("priorities are not supported; leave the field out or 0")
        return priority

    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none twice."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(dict.fromkeys(strings))

    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def usage_to_come(self) -> dict[str, None]:
        """What every chunk but the last says of the usage where that is asked for."""
        return {"usage": None} if self.wants_usage() else {}

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The worker's parameters; raises InvalidRequest for what only it can judge."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_k=max(_or(self.top_k, 0), 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=tuple((int(key), value) for key, value in (self.logit_bias or {}).items()),
            seed=self.seed,
            logprobs=logprobs,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=_or(self.min_tokens, 0),
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: StrictInt | None = None
    suffix: str | None = None

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, echo: bool | None) -> bool | None:
        if echo:
            raise ValueError("echo is not supported; put the prompt before the answer on your side")
        return echo

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str | None) -> str | None:
        if suffix:
            raise ValueError("suffix is not supported")
        return suffix

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list: of texts, or of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt", "The prompt is empty.")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ContentPart(Lenient):
    """One part of a message's content; only text can be read by the models served here."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Lenient):
    """A call that the assistant made in an earlier turn."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: str | None = "function"
    function: FunctionCall


class ChatMessage(Lenient):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class FunctionDescription(Lenient):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Lenient):
    """One of ``tools``."""

    type: Literal["function"] = "function"
    function: FunctionDescription


class NamedFunction(Lenient):
    """The function that must be called."""

    name: str


class NamedToolChoice(Lenient):
    """``tool_choice`` that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchemaFormat(Lenient):
    """``response_format.json_schema``."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class OutputFormat(Lenient):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: OutputFormat | None = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None

    @field_validator("modalities")
    @classmethod
    def _text_alone(cls, modalities: list[str] | None) -> list[str] | None:
        if set(modalities or ()) - {"text"}:
            raise ValueError("only text can be answered")
        return modalities

    @field_validator("audio", "web_search_options", "functions", "function_call")
    @classmethod
    def _not_served(cls, value: Any, info: ValidationInfo) -> Any:
        # Without them the answer would be another one than was asked for, and nothing in it would say so.
        if value is not None and value not in ([], "none"):
            older = {"functions": "; send tools", "function_call": "; send tool_choice"}
            raise ValueError(f"{info.field_name} is not supported{older.get(info.field_name or '', '')}")
        return value

    def token_limit(self) -> int | None:
        """``max_completion_tokens``, or its older name; None leaves it to the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted besides the chosen token; None for no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs=true.")
            return None
        return self.top_logprobs or 0


def check_json(value: Any, depth: int = MAX_DEPTH) -> None:
    """Raises ValueError if a text in a JSON value holds half of a surrogate pair (JSON can write it, UTF-8 cannot), or
    if more than ``depth`` lists and objects lie in each other."""
    if depth < 0:
        raise ValueError(f"the body is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("a text in the body holds half of a surrogate pair") from None
    elif isinstance(value, list):
        for entry in value:
            check_json(entry, depth - 1)
    elif isinstance(value, dict):
        for name, entry in value.items():
            check_json(name)
            check_json(entry, depth - 1)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
