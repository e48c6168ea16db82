"""Reads the plain facts of a model folder (its JSON files) that make up a :class:`ModelInfo`; loads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.api import ModelInfo
from worker.config import WorkerConfig
from worker.errors import ConfigError, ModelLoadError

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


def read_end_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer: as ``folder``'s generation_config.json says, else its configuration."""
    return end_token_ids(read_json(folder / "generation_config.json"), text_config(config))


def served_model_len(config: WorkerConfig, trained: int) -> int:
    """Most tokens of a request: what was asked for, else what the model was trained for (0: nobody knows). ConfigError
    where it would be more than that, and no option says that it may: behind it text becomes worse without a sign."""
    asked = config.max_model_len
    if 0 < trained < asked and not config.beyond_trained_len and config.load == "checkpoint":
        raise ConfigError(
            [
                f"max_model_len={asked} is more than the {trained} positions that the model was trained for; a"
                " checkpoint that can do more says so in its config.json (max_position_embeddings, with a rope type"
                " that scales), and beyond_trained_len=true serves it longer all the same"
            ]
        )
    return asked or trained


def read_model_info(
    folder: Path, config: WorkerConfig, dtype: str = "float32", device: str = "cpu"
) -> ModelInfo:
    """The facts of ``folder``'s config.json, generation_config.json and tokenizer.json, as ``config`` names and limits
    them; 0 or empty where none says. ModelLoadError, ConfigError."""
    wrapper = read_json(folder / "config.json")
    facts = text_config(wrapper)
    trained_len = int(facts.get("max_position_embeddings") or 0)
    experts = next((int(facts[key]) for key in _EXPERT_COUNT_KEYS if facts.get(key)), 0)
    return ModelInfo(
        name=config.served_name or folder.name,
        folder=str(folder),
        architecture=next(iter(wrapper.get("architectures") or [""])),
        vocab_size=int(facts.get("vocab_size") or _tokenizer_size(folder / "tokenizer.json")),
        max_model_len=served_model_len(config, trained_len),
        eos_token_ids=read_end_token_ids(folder, wrapper),
        num_layers=int(facts.get("num_hidden_layers") or 0),
        num_experts=experts,
        experts_per_token=_per_token(facts) if experts else 0,
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
