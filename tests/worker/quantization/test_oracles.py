"""Formats against other people's code: compressed-tensors for packed int4 (where installed), transformers for FP8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.formats import CONFIGS, format_of
from worker.quantization.base import ExpertShape
from worker.quantization.fp8_block import Fp8Block, quantize_fp8_block
from worker.quantization.int4_tensors import quantize_int4


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packs_and_unpacks_as_we_do(symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is a test oracle, not a dependency")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    torch.manual_seed(0)
    format = format_of(CONFIGS["compressed" if symmetric else "compressed_zeros"])
    floats = {
        "gate_proj": torch.randn(64, 96),
        "up_proj": torch.randn(64, 96),
        "down_proj": torch.randn(96, 64),
    }
    theirs = {}
    tensors = {}
    for name, weight in floats.items():
        matrix = quantize_int4(weight, 32, symmetric)
        zeros = matrix.zeros if matrix.zeros is not None else torch.full(matrix.scales.shape, 8)
        state = {
            "weight": weight,
            "weight_scale": matrix.scales,
            "weight_zero_point": zeros.to(torch.int8) - 8,
        }
        packed = PackedQuantizationCompressor.compress(state, scheme)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in packed.items()}
        theirs[name] = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"].float()
    shape = ExpertShape(96, 64)
    assert {spec.name for spec in format.expert_tensors(shape)} == set(tensors)
    block = torch.zeros(format.block_layout(shape).num_bytes, dtype=torch.uint8)
    format.pack(tensors, shape, block)
    gate_up, down = format.dequantize(block, shape)
    # They answer in the scales' float16.
    for ours, their in zip((*gate_up.chunk(2), down), theirs.values(), strict=True):
        np.testing.assert_allclose(ours, their, rtol=2e-3, atol=1e-6)


def test_transformers_dequantises_block_fp8_as_we_do() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    stored = quantize_fp8_block(torch.randn(256, 384))
    ours = Fp8Block().dequantize_linear(stored)

    theirs = Fp8Dequantize(None)._dequantize_one(stored["weight"], stored["weight_scale_inv"])
    assert torch.equal(ours, theirs.float())
