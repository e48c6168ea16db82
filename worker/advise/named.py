"""Finds a model's geometry: a checkpoint's folder, a configuration file, or a name whose facts ship with Headroom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.advise.config_json import read_geometry
from worker.advise.geometry import ModelGeometry
from worker.errors import ModelLoadError
from worker.model_folder import read_json

_SHIPPED = Path(__file__).parent / "models"


def named_models() -> list[str]:
    """Names that :func:`find_geometry` knows without files."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def find_geometry(model: str) -> ModelGeometry:
    """The geometry of ``model``: a folder with config.json, a .json file, or a shipped name (case ignored).

    ModelLoadError lists the shipped names when it is none of them.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        return read_geometry(read_json(path / "config.json"), path.resolve().name)
    if path.is_file() and path.suffix == ".json":
        return read_geometry(read_json(path), path.stem)
    shipped = _SHIPPED / f"{model.lower()}.json"
    if shipped.is_file():
        facts: dict[str, Any] = json.loads(shipped.read_text())
        return read_geometry(facts, shipped.stem)
    raise ModelLoadError(
        f"{model!r} is no folder with a config.json, no .json file and none of: {', '.join(named_models())}."
    )
