"""Chat formats by name: how a family of models marks reasoning and tool calls in its text."""

from __future__ import annotations

from serve_app.text.chat_formats.base import ChatFormat
from worker.registry import Registry

AUTO = "auto"

CHAT_FORMATS = Registry(
    "chat format",
    "chat_format",
    {
        "harmony": "serve_app.text.chat_formats.harmony:HarmonyFormat",
        "qwen3_xml": "serve_app.text.chat_formats.qwen3_xml:Qwen3XmlFormat",
        "chatml_json": "serve_app.text.chat_formats.chatml_json:ChatmlJsonFormat",
        "plain": "serve_app.text.chat_formats.plain:PlainFormat",
    },
)
"""In the order in which ``auto`` tries them: the first whose marks a chat template holds."""


def make_chat_format(name: str, template: str) -> ChatFormat:
    """The format registered under ``name``; for ``auto`` the one that fits the template. ConfigError for others."""
    if name != AUTO:
        made: ChatFormat = CHAT_FORMATS.load(name)()
        return made
    for known in CHAT_FORMATS:
        made = CHAT_FORMATS.load(known)()
        if made.fits(template):
            return made
    raise AssertionError("the plain format fits every template")
