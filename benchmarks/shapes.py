"""Folders with the config.json of a named model shape in a weight format, for engines with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.packing import restore
from worker.advise.geometry import ModelGeometry
from worker.advise.named import find_geometry

SHIPPED = Path("worker/advise/models")
ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "rope_theta": 1e6},
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    },
}
QUANTIZATION: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "mxfp4": {"quant_method": "mxfp4"},
}
END_TOKEN_ID = 2
DEMO = "demo"


def shape_config(model: str, format: str) -> Mapping[str, Any]:
    """config.json of a shipped shape with its experts in ``format``; ValueError for a format that is not known."""
    if format not in QUANTIZATION:
        raise ValueError(f"format={format!r} must be one of {', '.join(QUANTIZATION)}")
    facts: dict[str, Any] = json.loads((SHIPPED / f"{model}.json").read_text())
    facts.pop("quantization_config", None)
    kind = facts["model_type"]
    found = {
        **facts,
        **EXTRA.get(kind, {}),
        "architectures": [ARCHITECTURES[kind]],
        "dtype": "bfloat16",
        "eos_token_id": END_TOKEN_ID,
    }
    quantization = QUANTIZATION[format]
    return found if quantization is None else {**found, "quantization_config": quantization}


def shape_folder(model: str, format: str) -> Path:
    """A fresh folder with such a config.json; the demo model's own folder for ``demo``."""
    if model == DEMO:
        return restore("demo/model")
    folder = Path(tempfile.mkdtemp(prefix=f"{model}-{format}-")) / f"{model}.{format}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape_config(model, format)))
    return folder


def cut_folder(model: str, format: str, num_layers: int) -> Path:
    """The shape's folder, of its first ``num_layers`` layers where that is above 0. ValueError for the demo model,
    whose folder is its own."""
    if num_layers and model == DEMO:
        raise ValueError("the demo model cannot be cut: its weights have all their layers")
    folder = shape_folder(model, format)
    if num_layers:
        config = {**shape_config(model, format), "num_hidden_layers": num_layers}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def shape_geometry(folder: Path) -> ModelGeometry:
    """The sizes of a folder's model, for limits."""
    return find_geometry(str(folder))
