"""The advisor's bytes of an expert are those of the blocks that the weight formats lay out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from worker.advise import formats as advised
from worker.quantization.base import ExpertShape
from worker.quantization.choose import find_format

CONFIGS: tuple[Mapping[str, Any] | None, ...] = (
    None,
    {"quant_method": "mxfp4"},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
)
SHAPES = ((2048, 768, False), (2880, 2880, True), (256, 32, False))


def test_formats_are_found_by_their_configuration() -> None:
    found = [find_format(config).name for config in CONFIGS]
    assert found == ["unquantized", "mxfp4", "fp8_block", "int4", "int4"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_the_bytes_agree_up_to_alignment(shape: tuple[int, int, bool]) -> None:
    for config in CONFIGS:
        entry, weights = find_format(config), advised.checkpoint_format(config)
        if not weights.divides(advised.ExpertShape(*shape)):
            continue
        layout = entry.block_layout(ExpertShape(*shape))
        expected = weights.expert_bytes(advised.ExpertShape(*shape))
        assert expected <= layout.num_bytes < expected + 128 * len(layout.parts), entry.name
