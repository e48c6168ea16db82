"""Which releases of fla-core are called by their inner functions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kernels._triton import delta_chunks

LOCK = Path(__file__).parents[2] / "k8s" / "image" / "gpu.lock"


def test_only_known_releases_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = delta_chunks.problem.__wrapped__
    monkeypatch.setattr(delta_chunks, "version", lambda name: "0.7.1")
    assert problem() == "fla-core is 0.7.1, and only 0.6.x has the inner functions that are called"

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(delta_chunks, "version", missing)
    assert problem() == "fla-core is not installed"


def test_the_image_has_a_known_release() -> None:
    (line,) = (line for line in LOCK.read_text().splitlines() if line.startswith("fla-core=="))
    assert line.removeprefix("fla-core==").startswith(delta_chunks.KNOWN)
