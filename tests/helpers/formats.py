"""Weight formats under test: experts made up in each checkpoint layout, and what they mean, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from worker.quantization.base import ExpertShape, Format
from worker.quantization.choose import find_format

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "unquantized": None,
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "gptq_v1": {**GPTQ, "sym": False, "desc_act": False},
    "gptq_v1_symmetric": {**GPTQ, "sym": True, "desc_act": False},
    "gptq_v2": {**GPTQ, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_act_order": {**GPTQ, "sym": False, "desc_act": True},
    "awq": AWQ_CONFIG,
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
        },
    },
    "compressed_zeros": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}}
        },
    },
}


@dataclass(frozen=True)
class MadeExpert:
    """An expert's checkpoint tensors, and its matrices [rows, columns] float64 by linear name."""

    tensors: dict[str, torch.Tensor]
    meaning: dict[str, np.ndarray]


def with_group(config: dict[str, Any], group: int) -> dict[str, Any]:
    """An int4 configuration with another group size."""
    if "config_groups" in config:
        weights = {**config["config_groups"]["group_0"]["weights"], "group_size": group}
        return {**config, "config_groups": {"group_0": {"weights": weights}}}
    return {**config, "group_size": group}


def make_expert(config: dict[str, Any] | None, shape: ExpertShape, seed: int, group: int = 32) -> MadeExpert:
    """Random codes in the configuration's layout. What they mean is computed here from each layout's description, one
    element at a time over numpy, without the code under test."""
    rng = np.random.default_rng(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    tensors: dict[str, torch.Tensor] = {}
    meaning: dict[str, np.ndarray] = {}
    for name, rows, columns in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        found, meaning[name] = _matrix(config, rng, rows, columns, group)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in found.items()}
        if shape.has_bias:
            tensors[f"{name}.bias"] = torch.from_numpy(rng.standard_normal(rows)).bfloat16()
    return MadeExpert(tensors, meaning)


def format_of(config: dict[str, Any] | None) -> Format:
    """The format under test; blocks that are not quantised hold float32."""
    return find_format(config, "float32")


def _matrix(
    config: dict[str, Any] | None, rng: np.random.Generator, rows: int, columns: int, group: int
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    method = None if config is None else config["quant_method"]
    if method is None:
        weight = rng.standard_normal((rows, columns)).astype(np.float32) * 0.1
        return {"weight": torch.from_numpy(weight)}, weight.astype(np.float64)
    if method == "fp8":
        return _fp8(rng, rows, columns)
    if method == "mxfp4":
        return _mxfp4(rng, rows, columns)
    assert config is not None
    return _int4(config, rng, rows, columns, group)


def _fp8(rng: np.random.Generator, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    values = torch.from_numpy(rng.standard_normal((rows, columns)) * 50).to(torch.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.01, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    index = np.ix_(np.arange(rows) // 128, np.arange(columns) // 128)
    meaning = values.float().numpy().astype(np.float64) * scales[index]
    return {"weight": values, "weight_scale_inv": torch.from_numpy(scales)}, meaning


def _mxfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    codes = rng.integers(0, 16, (rows, columns))
    exponents = rng.integers(119, 125, (rows, columns // 32))
    magnitude = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes & 7]
    meaning = np.where(codes & 8, -magnitude, magnitude) * 2.0 ** (np.repeat(exponents, 32, 1) - 127)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(rows, columns // 32, 16)
    blocks, scales = torch.from_numpy(packed), torch.from_numpy(exponents.astype(np.uint8))
    return {"weight_blocks": blocks, "weight_scales": scales}, meaning


def _int4(
    config: dict[str, Any], rng: np.random.Generator, rows: int, columns: int, group: int
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    groups = -(-columns // group)
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.uniform(0.005, 0.02, (rows, groups)).astype(np.float16)
    method = config["quant_method"]
    weights = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config
    symmetric = weights.get("sym", weights.get("symmetric", False))
    offset = 1 if method == "gptq" and config.get("checkpoint_format") != "gptq_v2" else 0
    stored = np.full((rows, groups), 8 - offset) if symmetric else rng.integers(0, 16, (rows, groups))
    groups_of = np.arange(columns) // group
    if config.get("desc_act"):
        groups_of = rng.permutation(groups_of)
    meaning = (codes - (stored + offset)[:, groups_of]) * scales.astype(np.float64)[:, groups_of]
    if method == "compressed-tensors":
        found = {
            "weight_packed": _words(codes),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            found["weight_zero_point"] = _words(stored.T).t().contiguous()
        return found, meaning
    order = (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else tuple(range(8))
    found = {"qzeros": _words(stored.T, order), "scales": torch.from_numpy(scales.T.copy())}
    if method == "awq":
        found["qweight"] = _words(codes.T, order)
    else:
        found["qweight"] = _words(codes).t().contiguous()
        found["g_idx"] = torch.from_numpy(groups_of.astype(np.int32))
    return found, meaning


def _words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbours along a row to one int32; nibble k holds element ``order[k]``."""
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // 8)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for nibble, element in enumerate(order):
            column = 8 * word + element
            if column < columns:
                words[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32).copy())
