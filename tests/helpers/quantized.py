"""Tiny checkpoints in other weight formats, each written once per test session."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny import tiny_folder
from worker.quantization.convert import convert


@cache
def converted_folder(family: str, format: str, seed: int = 0, symmetric: bool = False) -> Path:
    """The folder of :func:`tiny_folder`'s model in ``format`` (``unquantized``: itself). Treat it as read-only."""
    source = tiny_folder(family, seed)
    if format == "unquantized":
        return source
    suffix = "-symmetric" if symmetric else ""
    return convert(source, source.parent / f"{source.name}-{format}{suffix}", format, symmetric)


QUANTISED = ("weight_scale", "weight_scales", "weight_scale_inv", "weight_shape", "weight_zero_point")
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


@cache
def plain_folder(folder: Path) -> Path:
    """A converted checkpoint written out as float32 without quantisation: what its codes mean by each layout's
    description, computed over numpy without the code under test."""
    target = folder.parent / f"{folder.name}-plain"
    target.mkdir()
    stored = load_file(folder / "model.safetensors")
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        linear, _, suffix = name.rpartition(".")
        part = {n.rpartition(".")[2]: t for n, t in stored.items() if n.rpartition(".")[0] == linear}
        if suffix == "weight_packed":
            plain[f"{linear}.weight"] = _int4(part)
        elif suffix == "weight_blocks":
            plain[f"{linear}.weight"] = _mxfp4(part)
        elif suffix == "weight" and "weight_scale_inv" in part:
            rows, columns = tensor.shape
            cells = np.ix_(np.arange(rows) // 128, np.arange(columns) // 128)
            scales = part["weight_scale_inv"].numpy()[cells]
            plain[name] = tensor.float() * torch.from_numpy(scales)
        elif suffix not in QUANTISED:
            plain[name] = tensor.float()
    save_file(plain, target / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (target / "config.json").write_text(json.dumps(raw))
    return target


def _int4(part: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = part["weight_shape"].tolist()
    shifts = 4 * np.arange(8)
    words = part["weight_packed"].numpy().astype(np.int64)
    codes = ((words[:, :, None] >> shifts) & 15).reshape(rows, -1)[:, :columns]
    zeros: np.ndarray | int = 8
    if "weight_zero_point" in part:
        words = part["weight_zero_point"].numpy().astype(np.int64)
        zeros = ((words[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, words.shape[1])[:rows]
        zeros = np.repeat(zeros, 32, 1)[:, :columns]
    scales = np.repeat(part["weight_scale"].float().numpy(), 32, 1)[:, :columns]
    return torch.from_numpy(((codes - zeros) * scales).astype(np.float32))


def _mxfp4(part: dict[str, torch.Tensor]) -> torch.Tensor:
    blocks, scales = part["weight_blocks"].numpy(), part["weight_scales"].numpy().astype(np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7]) * np.exp2(scales - 127)[..., None]
    return torch.from_numpy(values.reshape(len(blocks), -1).astype(np.float32))
