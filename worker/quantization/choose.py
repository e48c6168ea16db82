"""Chooses the weight format of a checkpoint by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.errors import ModelLoadError
from worker.quantization import FORMATS
from worker.quantization.base import BlockLayout, Format
from worker.quantization.unquantized import Unquantized


def find_format(quantization_config: Mapping[str, Any] | None, dtype: str = "bfloat16") -> Format:
    """The format that reads a checkpoint with such a configuration; ``dtype`` of blocks that are not quantised.
    ModelLoadError names what no format reads."""
    if quantization_config is None:
        return Unquantized(dtype)
    for name in FORMATS:
        known: Format = FORMATS.load(name)()
        if known.matches(quantization_config):
            return known.reading(quantization_config)
    method, layout = quantization_config.get("quant_method"), quantization_config.get("format")
    raise ModelLoadError(
        f"quantization_config: quant_method={method!r}"
        + (f", format={layout!r}" if layout else "")
        + f": none of the weight formats {', '.join(FORMATS)} reads it"
    )


def part_offset(layout: BlockLayout, name: str) -> int:
    """Where a part begins in a block, -1 if the block has none of that name."""
    return next((part.offset_bytes for part in layout.parts if part.name == name), -1)
