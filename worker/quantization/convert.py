"""Writes a checkpoint of a Qwen mixture of experts again in another weight format, shard by shard.

``python -m worker.quantization.convert SRC DST --format fp8_block|int4|mxfp4``: block FP8 takes in every projection, as
published FP8 checkpoints do; int4 (compressed-tensors, groups of 32 along the row, zero points unless ``--symmetric``)
the projections whose sizes allow it; MXFP4 the experts alone. Drafts (``mtp.*``), norms, routers and embeddings stay.
Rounding is to nearest, without calibration.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from worker.errors import ConfigError
from worker.quantization.base import Format
from worker.quantization.choose import find_format

FORMAT_NAMES = ("fp8_block", "int4", "mxfp4")
INT4_GROUP = 32
_EXPERT = re.compile(r"^(?P<experts>.*\.experts\.\d+)\.(?P<linear>gate_proj|up_proj|down_proj)\.weight$")
_STACKED = re.compile(r"^(?P<experts>.*\.experts)\.(?P<linear>gate_up_proj|down_proj)$")
_DENSE = re.compile(
    r"^.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_qkv|in_proj_z|out_proj)\.weight$"
)
_DRAFT = "mtp."
_INDEX = "model.safetensors.index.json"


def quantization_config(name: str, symmetric: bool = False) -> dict[str, Any]:
    """What the converted checkpoint's config.json says; ValueError for a format that is not written."""
    if name == "fp8_block":
        return {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    if name == "mxfp4":
        return {"quant_method": "mxfp4"}
    if name != "int4":
        raise ValueError(f"format={name!r} is none of {', '.join(FORMAT_NAMES)}")
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": INT4_GROUP,
        "symmetric": symmetric,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def convert(source: Path, target: Path, name: str, symmetric: bool = False) -> Path:
    """Writes ``target`` (made if absent) in the format ``name``; answers it. FileNotFoundError without safetensors;
    ConfigError where the weights are quantised already, or would be written over."""
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{source} holds no *.safetensors file")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _expect_plain(source, target, raw)
    settings = quantization_config(name, symmetric)
    target.mkdir(parents=True, exist_ok=True)
    format = find_format(settings)
    places: dict[str, str] = {}
    for shard in shards:
        with safe_open(str(shard), framework="pt") as file:
            found = dict(_converted(file, format))
        save_file(found, str(target / shard.name), metadata={"format": "pt"})
        places |= dict.fromkeys(found, shard.name)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": places}
        (target / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    raw["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".jinja", ".txt")
            and path.name != _INDEX  # of one file, too: it names tensors that are not there any more
            and not (target / path.name).exists()
        ):
            shutil.copyfile(path, target / path.name)
    return target


def _expect_plain(source: Path, target: Path, raw: Mapping[str, Any]) -> None:
    found = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    problems = []
    if found:
        method = found.get("quant_method")
        problems.append(f"{source} is quantised already ({method}): its codes would be taken for weights")
    if target.resolve() == source.resolve():
        problems.append(f"{target} is the source: its weights would be lost; name another folder")
    if problems:
        raise ConfigError(problems)


def _converted(file: Any, format: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, projections quantised under their new names."""
    for name in file.keys():  # noqa: SIM118 - not a mapping
        tensor = file.get_tensor(name)
        for linear, weight in _linears(name, tensor):
            if _quantizes(format, linear, weight):
                prefix, _, own = linear.rpartition(".")
                for suffix, part in format.quantize({own: weight.float()}).items():
                    yield f"{prefix}.{suffix}", part.contiguous()
            else:
                yield name if weight is tensor else f"{linear}.weight", weight.contiguous()


def _linears(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor as (name without .weight, matrix) pairs: stacked experts one by one, everything else as it is."""
    stacked = None if name.startswith(_DRAFT) else _STACKED.match(name)
    if stacked is None:
        yield name.removesuffix(".weight"), tensor
        return
    for expert, matrix in enumerate(tensor):
        prefix = f"{stacked['experts']}.{expert}"
        if stacked["linear"] == "down_proj":
            yield f"{prefix}.down_proj", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{prefix}.gate_proj", gate
            yield f"{prefix}.up_proj", up


def _quantizes(format: Format, linear: str, weight: torch.Tensor) -> bool:
    name = f"{linear}.weight"
    if linear.startswith(_DRAFT):
        return False
    if _EXPERT.match(name):
        return True
    if format.name == "mxfp4" or not _DENSE.match(name):
        return False
    rows, columns = weight.shape
    return format.name != "int4" or (rows % 8 == 0 and columns % INT4_GROUP == 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 for a folder that cannot be converted."""
    parser = argparse.ArgumentParser(prog="python -m worker.quantization.convert", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=FORMAT_NAMES, required=True)
    parser.add_argument("--symmetric", action="store_true", help="int4 without zero points")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.target, options.format, options.symmetric)
    except (FileNotFoundError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
