"""Loads the image's scripts, which belong to no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.k8s.deployed import K8S


def script(name: str) -> ModuleType:
    """The module of a script in k8s/image."""
    path = K8S / "image" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"k8s_image_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
