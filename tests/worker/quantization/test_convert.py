"""Converted checkpoints load in the model families and stay near the model they were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.plans import PlanDriver
from tests.helpers.quantized import converted_folder, plain_folder
from tests.helpers.tiny import tiny_folder
from worker.api import SamplingParams
from worker.config import WorkerConfig
from worker.errors import ModelLoadError
from worker.execution.loading import load_model
from worker.execution.runner import ModelRunner
from worker.quantization.convert import convert, main

PROMPT = list(range(20, 60))


def prompt_logprobs(folder: Path) -> np.ndarray:
    """Log-probabilities of the 20 likeliest tokens behind the prompt, by token id."""
    driver = PlanDriver(ModelRunner(WorkerConfig(model=str(folder), device="cpu")))
    driver.add(PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    _, result = driver.step({0: len(PROMPT)})
    found = np.full(400, np.nan)
    for token, value in result.logprobs[0][0].top:
        found[token] = value
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("format", ["fp8_block", "int4", "mxfp4"])
def test_a_converted_model_is_the_model_its_codes_mean(family: str, format: str) -> None:
    folder = converted_folder(family, format)
    found, want = prompt_logprobs(folder), prompt_logprobs(plain_folder(folder))
    np.testing.assert_allclose(found, want, atol=2e-4)
    # And not by chance the model it was made from.
    assert not np.allclose(found, prompt_logprobs(tiny_folder(family)), atol=2e-3, equal_nan=True)


def test_block_fp8_stays_near_its_source() -> None:
    right = prompt_logprobs(tiny_folder("qwen3_moe"))
    found = prompt_logprobs(converted_folder("qwen3_moe", "fp8_block"))
    both = ~np.isnan(right) & ~np.isnan(found)
    assert both.sum() >= 10
    assert np.abs(right - found)[both].mean() < 0.3


def test_no_index_names_tensors_that_are_not_there_any_more(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_folder("qwen3_moe"), source)
    places = dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    target = convert(source, tmp_path / "target", "mxfp4")
    assert not (target / "model.safetensors.index.json").exists()
    assert (target / "tokenizer.json").exists()


def test_a_source_is_not_written_over_and_codes_are_not_taken_for_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_folder("qwen3_moe"), source)
    before = (source / "model.safetensors").read_bytes()
    assert main([str(source), str(tmp_path / "x" / ".." / "source"), "--format", "mxfp4"]) == 2
    assert "its weights would be lost" in capsys.readouterr().err
    assert (source / "model.safetensors").read_bytes() == before
    convert(source, tmp_path / "fp8", "fp8_block")
    assert main([str(tmp_path / "fp8"), str(tmp_path / "int4"), "--format", "int4"]) == 2
    assert "quantised already (fp8)" in capsys.readouterr().err
    assert not (tmp_path / "int4").exists()


def test_dense_projections_are_what_was_stored() -> None:
    """The plain weights that a model sees of a quantised layer against the stored tensors' meaning."""
    folder = converted_folder("qwen3_moe", "int4")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    packed, scales = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"]
    zeros = stored[f"{name}.weight_zero_point"]
    source = load_file(tiny_folder("qwen3_moe") / "model.safetensors")[f"{name}.weight"].float()
    rows, columns = source.shape
    step = scales.float().max()
    for row, column in ((0, 0), (3, 17), (rows - 1, columns - 1)):
        code = int(packed[row, column // 8]) >> (4 * (column % 8)) & 15
        zero = int(zeros[row // 8, column // 32]) >> (4 * (row % 8)) & 15
        value = (code - zero) * float(scales[row, column // 32])
        assert abs(value - float(source[row, column])) <= 0.51 * float(step)


def edited(folder: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a checkpoint with tensors replaced, added, or (None) left out."""
    target.mkdir()
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in change}
    tensors |= {name: tensor for name, tensor in change.items() if tensor is not None}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def test_an_undeclared_tensor_under_an_expert_stops_the_start_by_name(tmp_path: Path) -> None:
    folder = converted_folder("qwen3_moe", "int4")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_bonus"
    with pytest.raises(ModelLoadError, match=r"declared by no part.*experts\.3\.up_proj\.weight_bonus"):
        load_model(
            WorkerConfig(model=str(edited(folder, tmp_path / "extra", {name: torch.zeros(3)})), device="cpu")
        )


def test_zero_points_that_the_configuration_denies_stop_the_start_by_name(tmp_path: Path) -> None:
    """Left out of account they would give fluent wrong text."""
    folder = edited(converted_folder("qwen3_moe", "int4"), tmp_path / "denied", {})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match="weight_zero_point"):
        load_model(WorkerConfig(model=str(folder), device="cpu"))


def test_a_missing_scale_stops_the_start_by_name(tmp_path: Path) -> None:
    folder = converted_folder("qwen3_moe", "fp8_block")
    name = "model.layers.2.mlp.experts.7.down_proj.weight_scale_inv"
    with pytest.raises(ModelLoadError, match=r"missing.*experts\.7\.down_proj\.weight_scale_inv"):
        load_model(WorkerConfig(model=str(edited(folder, tmp_path / "short", {name: None})), device="cpu"))


@pytest.mark.parametrize(
    ("format", "suffix"),
    [("fp8_block", "weight_scale_inv"), ("int4", "weight_scale"), ("int4", "weight_zero_point")],
)
def test_a_missing_part_of_a_dense_linear_stops_the_start_by_name(
    format: str, suffix: str, tmp_path: Path
) -> None:
    name = f"model.layers.1.self_attn.o_proj.{suffix}"
    folder = edited(converted_folder("qwen3_moe", format), tmp_path / "short", {name: None})
    with pytest.raises(ModelLoadError, match=f"lacks {name}$"):
        load_model(WorkerConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize("format", ["fp8_block", "int4", "mxfp4"])
def test_random_weights_are_quantised_where_the_configuration_says_so(format: str, tmp_path: Path) -> None:
    folder = converted_folder("qwen3_moe", format)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    loaded = load_model(WorkerConfig(model=str(tmp_path), device="cpu", load="random"))
    assert loaded.model.num_experts == 8
