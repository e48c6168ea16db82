"""What a model folder's JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.tiny import write_tokenizer
from worker.api import ModelInfo
from worker.config import WorkerConfig
from worker.errors import ConfigError, ModelLoadError
from worker.model_folder import read_model_info


def info_of(folder: Path, **options: Any) -> ModelInfo:
    return read_model_info(folder, WorkerConfig(model=str(folder), **options))


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_wrapped_configuration_is_read_through(tmp_path: Path) -> None:
    text = {
        "vocab_size": 99, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 7,
        "max_position_embeddings": 512,
    }  # fmt: skip
    folder = write(tmp_path, config={"architectures": ["Wrapped"], "model_type": "w", "text_config": text})
    info = info_of(folder)
    assert (info.name, info.architecture, info.vocab_size) == (tmp_path.name, "Wrapped", 99)
    assert (info.num_layers, info.num_experts, info.experts_per_token) == (4, 8, 2)
    assert (info.max_model_len, info.eos_token_ids) == (512, (7,))


def test_the_generation_configuration_names_the_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [3, 4]})
    assert info_of(tmp_path).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("asked", "more", "served"),
    [
        (0, {}, 512),
        (100, {}, 100),
        (1000, {"beyond_trained_len": True}, 1000),
        (1000, {"load": "random"}, 1000),
    ],
)
def test_the_length_is_the_trained_one_or_what_was_asked_for(
    tmp_path: Path, asked: int, more: dict[str, Any], served: int
) -> None:
    write(tmp_path, config={"max_position_embeddings": 512})
    assert info_of(tmp_path, max_model_len=asked, **more).max_model_len == served


def test_more_positions_than_were_trained_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 512})
    with pytest.raises(ConfigError, match=r"max_model_len=513 .* 512 positions .* beyond_trained_len=true"):
        info_of(tmp_path, max_model_len=513)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("per_token", ["num_experts_per_tok", "num_experts_per_token"])
def test_experts_go_by_several_names(tmp_path: Path, key: str, per_token: str) -> None:
    write(tmp_path, config={key: 8, per_token: 2})
    info = info_of(tmp_path)
    assert (info.num_experts, info.experts_per_token) == (8, 2)


def test_a_folder_with_a_tokenizer_alone_has_its_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert info_of(tmp_path).vocab_size == 267
    assert info_of(tmp_path / "missing").vocab_size == 0


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=r"config\.json .* holds no JSON object"):
        info_of(tmp_path)
