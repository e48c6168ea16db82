"""Turns trained leaf tensors into checkpoint files under transformers' names, and back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.architecture import Leaf, Shape, leaves
from demo.packing import WEIGHTS


def named_tensors(params: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Checkpoint tensors by name, from leaf tensors by leaf name; the tied head is not written twice."""
    out: dict[str, Tensor] = {}
    for leaf in leaves(shape):
        names = leaf.tensor_names(shape.num_layers)
        parts = params[leaf.name].unbind(0) if leaf.layers else (params[leaf.name],)
        out.update(zip(names, parts, strict=True))
    return out


def leaf_tensors(tensors: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Inverse of ``named_tensors``."""
    return {leaf.name: _joined(leaf, tensors, shape) for leaf in leaves(shape)}


def _joined(leaf: Leaf, tensors: dict[str, Tensor], shape: Shape) -> Tensor:
    parts = [tensors[name] for name in leaf.tensor_names(shape.num_layers)]
    return torch.stack(parts) if leaf.layers else parts[0]


def save(params: dict[str, Tensor], shape: Shape, folder: Path) -> None:
    """Writes ``folder``'s model.safetensors in bf16."""
    tensors = {
        n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in named_tensors(params, shape).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path, shape: Shape) -> dict[str, Tensor]:
    """Leaf tensors from what ``save`` wrote."""
    return leaf_tensors(load_file(folder / WEIGHTS), shape)
