"""Tiny random checkpoints for tests, each written once per test session."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from demo.tiny import make_tiny


@cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="headroom-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def tiny_folder(family: str = "qwen3_5_moe", seed: int = 0, window: int = 0) -> Path:
    """The folder of a tiny random checkpoint; the same one for equal arguments. Treat it as read-only."""
    return make_tiny(_session_folder() / f"{family}-{seed}-{window}", family, seed, window)
