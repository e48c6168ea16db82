"""Reads the plain facts of a model folder (its JSON files) that make up a :class:`ModelInfo`; loads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.api import ModelInfo
from worker.errors import ModelLoadError

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty if there is no such file; ModelLoadError names a file that is no JSON."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path.name} in {path.parent} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path.name} in {path.parent} holds no JSON object.")
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration: multi-modal wrappers nest it under ``text_config``."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def end_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of ``eos_token_id`` in the first source that has one (an int or a list)."""
    for source in sources:
        found = source.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(int(token) for token in found)
    return ()


def read_model_info(
    folder: Path, *, name: str = "", max_model_len: int = 0, dtype: str = "float32", device: str = "cpu"
) -> ModelInfo:
    """The facts of ``folder``'s config.json, generation_config.json and tokenizer.json; 0 or empty where none says."""
    wrapper = read_json(folder / "config.json")
    config = text_config(wrapper)
    trained_len = int(config.get("max_position_embeddings") or 0)
    experts = next((int(config[key]) for key in _EXPERT_COUNT_KEYS if config.get(key)), 0)
    return ModelInfo(
        name=name or folder.name,
        folder=str(folder),
        architecture=next(iter(wrapper.get("architectures") or [""])),
        vocab_size=int(config.get("vocab_size") or _tokenizer_size(folder / "tokenizer.json")),
        max_model_len=min((n for n in (max_model_len, trained_len) if n), default=0),
        eos_token_ids=end_token_ids(read_json(folder / "generation_config.json"), config),
        num_layers=int(config.get("num_hidden_layers") or 0),
        num_experts=experts,
        experts_per_token=_per_token(config) if experts else 0,
        dtype=dtype,
        device=device,
    )


def _tokenizer_size(path: Path) -> int:
    tokenizer = read_json(path)
    ids = [int(token["id"]) for token in tokenizer.get("added_tokens") or []]
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        ids += [int(token) for token in vocabulary.values()]
    return max(ids, default=-1) + 1


def _per_token(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts_per_tok") or config.get("num_experts_per_token") or 0)
