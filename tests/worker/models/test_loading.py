"""Checkpoints in every layout, and errors that name all that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from worker.api import SamplingParams
from worker.config import WorkerConfig
from worker.errors import ConfigError, ModelLoadError
from worker.execution.loading import load_model, open_model
from worker.execution.runner import ModelRunner

Tensors = dict[str, torch.Tensor]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
PROMPT = list(range(20, 110))


def rewritten(
    target: Path,
    family: str,
    change_tensors: Callable[[Tensors], Tensors] = dict,
    change_config: Callable[[dict[str, object]], dict[str, object]] = dict,
) -> Path:
    """A copy of a tiny checkpoint with other tensors or another configuration."""
    source = tiny_folder(family)
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(change_config(config)))
    tensors = change_tensors(load_file(source / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def answer(folder: Path, load: str = "checkpoint", seed: int = 0) -> list[object]:
    """Tokens and log-probabilities of one greedy continuation."""
    driver = PlanDriver(
        ModelRunner(WorkerConfig(model=str(folder), load=load, seed=seed)), arena_bytes=1 << 22
    )
    request = driver.add(PROMPT, SAMPLING)
    return [driver.step({request: driver.rows[request].num_pending})[1].logprobs[0][0] for _ in range(4)]


def stacked(tensors: Tensors) -> Tensors:
    """Per-expert tensors to the stacked names of published BF16 files."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: [tensors[f"{prefix}.{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        found[f"{prefix}.gate_up_proj"] = torch.stack(both)
        found[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    return found


def wrapped(tensors: Tensors) -> Tensors:
    """The names of a checkpoint with a vision tower and a draft head."""
    found = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    found["model.visual.patch_embed.proj.weight"] = torch.zeros(3)
    found["mtp.fc.weight"] = torch.zeros(4, 8)
    return found


def in_text_config(config: dict[str, object]) -> dict[str, object]:
    architecture = ["Qwen3_5MoeForConditionalGeneration"]
    return {"architectures": architecture, "model_type": "qwen3_5_moe", "text_config": config}


def test_stacked_experts_are_the_same_model(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3_5_moe")
    assert ".experts.0." in " ".join(load_file(folder / "model.safetensors"))
    assert answer(rewritten(tmp_path / "m", "qwen3_5_moe", stacked)) == answer(folder)


def test_a_wrapped_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    folder = rewritten(tmp_path / "m", "qwen3_5_moe", lambda t: wrapped(stacked(t)), in_text_config)
    assert answer(folder) == answer(tiny_folder("qwen3_5_moe"))


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    def tie(tensors: Tensors) -> Tensors:
        return {n: t for n, t in tensors.items() if n != "lm_head.weight"}

    def head_of_its_own(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    tied = rewritten(tmp_path / "t", "qwen3_5", tie, lambda c: {**c, "tie_word_embeddings": True})
    untied = rewritten(tmp_path / "u", "qwen3_5", head_of_its_own)
    assert answer(tied) == answer(untied)


def test_sharded_files_are_found_by_their_index(tmp_path: Path) -> None:
    folder = rewritten(tmp_path / "m", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        parts["ab"[i % 2] + ".safetensors"][name] = tensor
    for file, part in parts.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert answer(folder) == answer(tiny_folder("qwen3_moe"))
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"not there: b\.safetensors"):
        answer(folder)


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random MXFP4 of [experts, rows, columns] (columns a multiple of 32): blocks, scales and their exact values."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    nibbles = torch.randint(0, 16, weight.shape)
    scales = torch.randint(120, 126, (*weight.shape[:-1], weight.shape[-1] // 32))
    values = table[nibbles] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    packed = (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.uint8)
    return packed.unflatten(-1, (-1, 16)), scales.to(torch.uint8), values


def test_mxfp4_is_the_model_with_the_dequantised_experts(tmp_path: Path) -> None:
    torch.manual_seed(3)
    packed, plain = {}, {}
    for layer in range(4):
        for name, shape in (("gate_up_proj", (8, 128, 64)), ("down_proj", (8, 64, 64))):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            packed[f"{key}_blocks"], packed[f"{key}_scales"], values = pack(torch.empty(shape))
            plain[key] = values.transpose(1, 2)

    def without_experts(tensors: Tensors) -> Tensors:
        return {n: t for n, t in tensors.items() if n not in plain}

    quantised = rewritten(
        tmp_path / "q",
        "gpt_oss",
        lambda t: {**without_experts(t), **packed},
        lambda c: {**c, "quantization_config": {"quant_method": "mxfp4"}},
    )
    dequantised = rewritten(tmp_path / "d", "gpt_oss", lambda t: {**without_experts(t), **plain})
    assert answer(quantised) == answer(dequantised)


def test_one_error_names_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.experts.3.up_proj.qzeros"] = torch.zeros(2)
        tensors["model.layers.2.mlp.gate.weight"] = torch.zeros(8, 63)
        return tensors

    with pytest.raises(ModelLoadError) as raised:
        answer(rewritten(tmp_path / "m", "qwen3_5_moe", spoil))
    message = str(raised.value)
    assert "2 tensors missing: model.layers.1.mlp.experts.3.up_proj.weight, model.norm.weight" in message
    assert "1 tensors misshapen: model.layers.2.mlp.gate.weight is [8, 63], not [8, 64]" in message
    assert "1 tensors declared by no part: model.layers.0.mlp.experts.3.up_proj.qzeros" in message


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("qwen3_5_moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_5_moe", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_5_moe", {"attention_window_sizes": [8, None, None, None]}, r"attention_window_sizes\[0\]=8"),
        ("qwen3_5_moe", {"attention_window_sizes": [None, 0]}, "attention_window_sizes"),
        ("qwen3_5", {"quantization_config": {"quant_method": "gguf"}}, "quantization_config"),
        ("qwen3_5", {"num_attention_heads": None}, "num_attention_heads=None"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("gpt_oss", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_a_surprise_in_the_configuration_is_named(
    tmp_path: Path, family: str, change: Mapping[str, object], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        answer(rewritten(tmp_path / "m", family, dict, lambda c: {**c, **change}))


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    for family in ("qwen3_5_moe", "gpt_oss"):
        (tmp_path / family).mkdir()
        config = (tiny_folder(family) / "config.json").read_text()
        (tmp_path / family / "config.json").write_text(config)
        first = answer(tmp_path / family, load="random", seed=1)
        assert answer(tmp_path / family, load="random", seed=1) == first
        assert answer(tmp_path / family, load="random", seed=2) != first


def test_more_positions_than_were_trained_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    assert load_model(WorkerConfig(model=folder, device="cpu", max_model_len=4096)).info.max_model_len == 4096
    longer = WorkerConfig(model=folder, device="cpu", max_model_len=4097)
    with pytest.raises(ConfigError, match=r"max_model_len=4097 .* 4096 positions .* beyond_trained_len=true"):
        open_model(longer)
    assert load_model(replace(longer, beyond_trained_len=True)).info.max_model_len == 4097


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        answer(tmp_path)
    (tmp_path / "config.json").write_text((tiny_folder("qwen3_5") / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=r"holds no \*\.safetensors"):
        answer(tmp_path)
    (tmp_path / "model.safetensors.planes").touch()
    with pytest.raises(ModelLoadError, match=r"python -m demo\.packing restore"):
        answer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        answer(tmp_path)
    with pytest.raises(ConfigError, match="device='tpu'"):
        ModelRunner(WorkerConfig(model=str(tiny_folder("qwen3_5")), device="tpu"))
    with pytest.raises(ConfigError, match="float32 on a CPU"):
        ModelRunner(WorkerConfig(model=str(tiny_folder("qwen3_5")), kv_dtype="fp8_e4m3", deterministic=True))
