"""API keys: a file of hashes with limits per key, read again when it changes, and the counts those limits need.

The file is JSON, ``{"keys": [{"name": "alice", "sha256": "..", "requests_per_minute": 60, "max_concurrent": 8,
"max_body_bytes": 1000000}]}``; limits may be left out, and ``"admin": true`` opens operators' routes. Keys are long
random strings, so a plain SHA-256 is enough.
``python -m serve_app.http.api_keys NAME`` makes a key and prints it, once, with its entry for the file.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker.errors import ConfigError

LOOK_AGAIN_S = 2.0
KEY_PREFIX = "hr-"


class KeyEntry(BaseModel):
    """One key of the file; a limit of 0 is none."""

    # Whoever puts a key where its hash belongs must not find it in the log.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1)
    admin: bool = False
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    requests_per_minute: float = Field(default=0, ge=0)
    max_concurrent: int = Field(default=0, ge=0)
    max_body_bytes: int = Field(default=0, ge=0)


class KeyFile(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: list[KeyEntry]


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A key's limit stands against a request; ``retry_after_s`` is when it may pass."""

    message: str
    retry_after_s: float


class KeyRing:
    """The keys of a file. Not thread-safe: the ingress's event loop owns it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries: dict[str, KeyEntry] = {}
        self._use: dict[str, _Use] = {}
        self._looked_s = -LOOK_AGAIN_S
        self._stamp: tuple[int, int] | None = None
        self._load()

    def find(self, key: str, now_s: float) -> KeyEntry | None:
        """The entry of a key, None for one that is not in the file."""
        if now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s = now_s
            self._load_if_changed()
        return self._entries.get(hash_key(key))

    def enter(self, entry: KeyEntry, now_s: float) -> LimitReached | None:
        """Counts a request that begins, or says which limit stands against it."""
        use = self._use.setdefault(entry.sha256, _Use(entry.requests_per_minute, now_s))
        if entry.max_concurrent and use.num_running >= entry.max_concurrent:
            return LimitReached(
                f"The key {entry.name!r} has {use.num_running} requests running already.", 1.0
            )
        wait_s = use.take(entry.requests_per_minute, now_s)
        if wait_s > 0:
            return LimitReached(
                f"The key {entry.name!r} may send {entry.requests_per_minute:g} requests a minute.", wait_s
            )
        use.num_running += 1
        return None

    def leave(self, entry: KeyEntry) -> None:
        """A request that entered has ended."""
        self._use[entry.sha256].num_running -= 1

    def _load_if_changed(self) -> None:
        try:
            self._load()
        except ConfigError:
            # A file that is being written, or was spoiled: the keys of before stay good.
            return

    def _load(self) -> None:
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            content = KeyFile.model_validate(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            raise ConfigError([f"api_keys_file={str(self._file)!r}: {error}"]) from error
        self._entries = {entry.sha256: entry for entry in content.keys}
        self._stamp = stamp


class _Use:
    """A bucket of at most one minute's requests that fills steadily, and a count of what runs."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._tokens = max(1.0, per_minute)
        self._filled_s = now_s
        self.num_running = 0

    def take(self, per_minute: float, now_s: float) -> float:
        """0 if a request may pass now, else the seconds until one may."""
        if not per_minute:
            return 0.0
        rate = per_minute / 60.0
        self._tokens = min(max(1.0, per_minute), self._tokens + (now_s - self._filled_s) * rate)
        self._filled_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / rate


def hash_key(key: str) -> str:
    """What stands in the file for a key."""
    return sha256(key.encode()).hexdigest()


def new_key(name: str) -> tuple[str, Mapping[str, object]]:
    """A fresh key and its entry."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, {"name": name, "sha256": hash_key(key)}


def main(arguments: list[str]) -> int:
    """Prints a new key and its entry."""
    if len(arguments) != 1 or arguments[0].startswith("-"):  # there are no options, and --help is no name
        print("usage: python -m serve_app.http.api_keys NAME\n" + (__doc__ or ""), file=sys.stderr)
        return 2
    key, entry = new_key(arguments[0])
    print(f"key (shown once): {key}\nentry: {json.dumps(entry)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
