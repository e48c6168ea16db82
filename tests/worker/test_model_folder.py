"""What a model folder's JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.tiny import write_tokenizer
from worker.errors import ModelLoadError
from worker.model_folder import read_model_info


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
    info = read_model_info(folder)
    assert (info.name, info.architecture, info.vocab_size) == (tmp_path.name, "Wrapped", 99)
    assert (info.num_layers, info.num_experts, info.experts_per_token) == (4, 8, 2)
    assert (info.max_model_len, info.eos_token_ids) == (512, (7,))


def test_the_generation_configuration_names_the_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [3, 4]})
    assert read_model_info(tmp_path).eos_token_ids == (3, 4)


def test_the_shorter_length_wins(tmp_path: Path) -> None:
    write(tmp_path, config={"max_position_embeddings": 512})
    assert [read_model_info(tmp_path, max_model_len=asked).max_model_len for asked in (0, 100, 1000)] == [
        512,
        100,
        512,
    ]


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("per_token", ["num_experts_per_tok", "num_experts_per_token"])
def test_experts_go_by_several_names(tmp_path: Path, key: str, per_token: str) -> None:
    write(tmp_path, config={key: 8, per_token: 2})
    info = read_model_info(tmp_path)
    assert (info.num_experts, info.experts_per_token) == (8, 2)


def test_a_folder_with_a_tokenizer_alone_has_its_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert read_model_info(tmp_path).vocab_size == 267
    assert read_model_info(tmp_path / "missing").vocab_size == 0


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=r"config\.json .* holds no JSON object"):
        read_model_info(tmp_path)
