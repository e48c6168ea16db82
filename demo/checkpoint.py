"""Turns trained leaf tensors into checkpoint files under transformers' names, and back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.architecture import Leaf, Shape, leaves


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


def save(params: dict[str, Tensor], shape: Shape, folder: Path, num_shards: int = 1) -> None:
    """Writes bf16 safetensors into ``folder``: one file, or shards of nearly equal size with an index."""
    tensors = {
        n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in named_tensors(params, shape).items()
    }
    total = sum(t.numel() * 2 for t in tensors.values())
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    groups: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    done = 0
    for name, tensor in tensors.items():
        groups[min(done * num_shards // total, num_shards - 1)][name] = tensor
        done += tensor.numel() * 2
    places: dict[str, str] = {}
    for n, group in enumerate(groups, start=1):
        file = f"model-{n:05d}-of-{num_shards:05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(group, file))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def load(folder: Path, shape: Shape) -> dict[str, Tensor]:
    """Leaf tensors from the safetensors files in ``folder``."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return leaf_tensors(tensors, shape)
