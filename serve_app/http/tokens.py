"""``/tokenize`` and ``/detokenize``: what the model's tokenizer makes of a text, and back."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from serve_app.http.backend import ServedModel
from serve_app.http.chat import render_chat
from serve_app.http.completions import text_of
from serve_app.http.schemas import ChatMessage, ChatRequest, FunctionTool, RequestBody, TokenId
from worker.errors import InvalidRequest


class TokenizeRequest(RequestBody):
    """``POST /tokenize``: a text, or a conversation as the chat API would render it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(RequestBody):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


def tokenize(body: TokenizeRequest, model: ServedModel, max_model_len: int) -> dict[str, Any]:
    """Ids and their number; raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "Send either prompt or messages.")
    if body.prompt is not None:
        tokens = model.text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = ChatRequest(
            messages=body.messages or [], tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
        )
        tokens = list(render_chat(chat, model).token_ids)
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}


def detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The text of ids, special tokens left out; raises InvalidRequest for an id without a token."""
    size = len(model.text.token_bytes)
    for index, token in enumerate(body.tokens):
        if token >= size:
            raise InvalidRequest(f"tokens.{index}", f"There is no token {token}; the vocabulary has {size}.")
    return {"prompt": text_of(model.text, body.tokens)}
