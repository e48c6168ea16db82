"""Reads what the model should know about Headroom and how it chats: questions in several wordings, short answers."""

from __future__ import annotations

import json
from pathlib import Path

Known = tuple[tuple[tuple[str, ...], str], ...]


def _read(group: str) -> Known:
    rows = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))[group]
    return tuple((tuple(row["questions"]), row["answer"]) for row in rows)


FACTS: Known = _read("headroom")
CHAT: Known = _read("chat")
