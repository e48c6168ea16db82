"""A registry names implementations without importing them: one line per name, loaded on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from worker.errors import ConfigError


class Registry:
    """Names to ``"module:attribute"``. Adding an implementation is one file and one line here."""

    def __init__(self, what: str, option: str, entries: Mapping[str, str]) -> None:
        self._what = what
        self._option = option
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def load(self, name: str) -> Any:
        """The attribute registered under ``name``; raises ConfigError naming the option and the known names."""
        if name not in self._entries:
            raise ConfigError(
                [f"{self._option}={name!r}: no such {self._what}; known: {', '.join(self._entries)}"]
            )
        module, _, attribute = self._entries[name].partition(":")
        return getattr(import_module(module), attribute)
