"""Finds a FlashAttention library built for vLLM, loads it without importing vLLM, and calls its paged operator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

VARIABLE = "HEADROOM_FLASH_ATTN"
_FOLDERS = (("vllm_flash_attn", ""), ("vllm", "vllm_flash_attn"))
_OPERATORS = {3: ("_vllm_fa3_C", "fwd"), 2: ("_vllm_fa2_C", "varlen_fwd")}
_SCHEDULER = "get_scheduler_metadata"
_LEAST_CAPABILITY = {3: 9, 2: 8}
_ONES = ("cp_world_size",)
"""Whole-number arguments whose neutral value is 1."""


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """A loaded library: ``version`` 2 or 3, its file, the operator, and version 3's operator that shares a step's work
    out among the GPU's processors (else the first one does it anew in every layer), where the build has it."""

    version: int
    path: Path
    operator: Any
    scheduler: Any | None

    def takes(self, name: str) -> bool:
        """Whether the operator has an argument ``name``; builds differ."""
        return any(argument.name == name for argument in self.operator.default._schema.arguments)

    def call(self, values: Mapping[str, object]) -> Any:
        """Calls the operator with ``values`` by argument name, and what does nothing for all others."""
        return _call(self.operator, values)

    def schedule(self, values: Mapping[str, object]) -> torch.Tensor | None:
        """What ``call`` takes as ``scheduler_metadata`` for the same rows; None where the build cannot say."""
        return None if self.scheduler is None else _call(self.scheduler, values)


def _call(operator: Any, values: Mapping[str, object]) -> Any:
    return operator(*(values.get(a.name, _neutral(a)) for a in operator.default._schema.arguments))


def _neutral(argument: Any) -> object:
    if argument.has_default_value():
        return argument.default_value
    kind = str(argument.type)
    if kind.startswith("Optional"):
        return None
    if argument.name in _ONES:
        return 1
    return {"int": 0, "float": 0.0, "bool": False}.get(kind)


def candidates() -> Iterator[tuple[int, Path]]:
    """(version, file) of every library in sight: the named one, else those of the distributions, newest first."""
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        yield (2 if "fa2" in path.name else 3), path
        return
    for version, (stem, _) in _OPERATORS.items():
        for package, inner in _FOLDERS:
            spec = find_spec(package)  # of a top-level package: finds it without running it
            for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
                yield from ((version, path) for path in sorted((Path(folder) / inner).glob(f"{stem}*.so")))


def load(version: int, path: Path) -> FlashLibrary | str:
    """The library, or why it does not load."""
    if not path.is_file():
        return f"{path} is not there"
    namespace, name = _OPERATORS[version]
    try:
        torch.ops.load_library(str(path))
        operators = getattr(torch.ops, namespace)
        operator = getattr(operators, name)
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{path} does not load ({str(error).splitlines()[0]})"
    return FlashLibrary(version, path, operator, getattr(operators, _SCHEDULER, None))


@cache
def find_library(device: torch.device) -> FlashLibrary | str:
    """The newest library that serves ``device``, or a sentence that says why there is none."""
    if device.type != "cuda":
        return f"FlashAttention runs on a GPU, not on {device}"
    major = torch.cuda.get_device_capability(device)[0]
    reasons = []
    for version, path in candidates():
        # Version 3 is written for one generation of GPUs, version 2 for those from its own on.
        fits = major == 9 if version == 3 else major >= _LEAST_CAPABILITY[version]
        if not fits:
            reasons.append(f"FlashAttention {version} is not made for compute capability {major}")
            continue
        found = load(version, path)
        if isinstance(found, FlashLibrary):
            return found
        reasons.append(found)
    return "; ".join(reasons) or (
        f"no FlashAttention library is installed (vllm-flash-attn, vLLM's copy, or a file named by {VARIABLE})"
    )
