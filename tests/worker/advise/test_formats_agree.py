"""The advisor's bytes are those laid out: of an expert's block in every weight format, of a token's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from worker.advise import formats as advised
from worker.advise.named import find_geometry
from worker.attention.base import AttentionShape
from worker.models.base import GroupCollector
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


@pytest.mark.parametrize(("kv_dtype", "stored_as"), [("bf16", "bfloat16"), ("fp8_e4m3", "float8_e4m3fn")])
def test_a_tokens_keys_and_values_have_the_bytes_of_their_pages_scales_included(
    kv_dtype: str, stored_as: str
) -> None:
    geometry = find_geometry("gpt-oss-20b")
    groups = GroupCollector(stored_as)
    for number in range(24):
        window = 128 if number % 2 == 0 else None
        groups.attention(number, AttentionShape(64, 8, 64, 0.125, window=window, has_sinks=True))
    window_group, full_group = groups.groups()
    full, window = full_group.page_spec(64), window_group.page_spec(64)
    assert geometry.full_kv_bytes(kv_dtype) == full.page_bytes / full.page_tokens
    assert geometry.window_kv_bytes(kv_dtype) == 128 * window.page_bytes / window.page_tokens
