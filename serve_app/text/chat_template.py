"""Renders a conversation into a prompt with the checkpoint's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.errors import InvalidRequest, ModelLoadError


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; when rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled template. Raises ModelLoadError when the source is no valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The chat template is not valid (line {error.lineno}): {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text.

        Args:
            messages: the conversation, each with ``role`` and ``content``.
            tools: function descriptions, or None.
            variables: further names for the template (``enable_thinking`` ...).
            add_generation_prompt: whether to open the assistant's turn.

        Raises:
            InvalidRequest: the template refused the conversation (with its own words).
        """
        names = {**self._special_tokens, **(variables or {})}
        names |= {
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                "messages", f"The model's chat template refuses the conversation: {error}"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                "messages", f"The model's chat template cannot render the conversation: {error}"
            ) from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters; prompts need the JSON text itself.
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
