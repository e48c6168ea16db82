"""Sizes read from configurations: against transformers' own modules and against published figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from demo.tiny import FAMILIES, tiny_config
from memory.api import PageKind
from worker.advise.config_json import read_geometry
from worker.advise.formats import FORMATS, ExpertShape, checkpoint_format, find_format
from worker.advise.named import find_geometry, named_models
from worker.errors import ConfigError, ModelLoadError

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 48,
}  # fmt: skip
KDA = {
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinearConfig", {**LATENT, "num_local_experts": 8, "linear_attn_config": KDA}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**DEEPSEEK, "index_topk": 32, "index_head_dim": 16, "index_n_heads": 16},
    ),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 2}),
}


def tiny(name: str) -> Any:
    if name in FAMILIES:
        return tiny_config(name)
    kind, options = OTHERS[name]
    return getattr(transformers, kind)(**COMMON, **options)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_every_weight_is_counted(name: str) -> None:
    config = tiny(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    geometry = read_geometry(json.loads(json.dumps(config.to_dict(), default=str)), name)
    assert geometry.num_params == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_params", "kv_bytes", "window_bytes", "state_bytes"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 98_304, 0, 0),
        ("gpt-oss-20b", 20_914_757_184, 24_576, 3_145_728, 0),
        ("gpt-oss-120b", 116_829_156_672, 36_864, 4_718_592, 0),
        ("qwen3.5-0.8b", 0.8e9, 12_288, 0, 18_874_368 + 663_552),
        ("qwen3.5-4b", 4e9, 32_768, 0, 50_331_648 + 1_179_648),
        ("qwen3.5-9b", 9e9, 32_768, 0, 50_331_648 + 1_179_648),
        ("qwen3.5-27b", 27e9, 65_536, 0, 150_994_944 + 2_949_120),
        ("qwen3.5-35b-a3b", 34.66e9, 20_480, 0, 62_914_560 + 1_474_560),
        ("qwen3-next-80b-a3b", 80e9, 24_576, 0, 75_497_472 + 1_769_472),
        ("kimi-linear-48b-a3b", 49e9, 8_064, 0, 41_943_040 + 1_474_560),
        ("kimi-k3", 2.78e12, 27_648, 0, 434_110_464 + 15_261_696),
        ("deepseek-v3", 671e9, 70_272, 0, 0),
        ("deepseek-v3.2", 672e9, 70_272 + 15_616, 0, 0),
    ],
)
def test_named_models_have_their_published_sizes(
    name: str, num_params: float, kv_bytes: int, window_bytes: int, state_bytes: int
) -> None:
    geometry = find_geometry(name)
    rounding = 0.0 if isinstance(num_params, int) else 0.062  # "0.8B" is 0.75e9
    assert geometry.num_params == pytest.approx(num_params, rel=rounding)
    assert geometry.full_kv_bytes() == kv_bytes
    assert geometry.window_kv_bytes() == window_bytes
    assert geometry.state_bytes == state_bytes


def test_every_shipped_name_is_checked_above() -> None:
    checked = test_named_models_have_their_published_sizes.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert sorted(row[0] for row in checked) == named_models()


def test_active_weights_are_as_published() -> None:
    assert find_geometry("qwen3-30b-a3b").num_active_params == pytest.approx(3.353e9, rel=2e-4)
    assert find_geometry("qwen3.5-35b-a3b").num_active_params == pytest.approx(3.455e9, rel=2e-4)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (ExpertShape(2048, 768), (9.437, 4.720, 2.433, 2.451, 2.654, 2.507, 2.654)),
        (ExpertShape(2048, 512), (6.291, 3.146, 1.622, 1.634, 1.769, 1.671, 1.769)),
        (ExpertShape(2304, 1024), (14.156, 7.080, 3.650, 3.677, 3.981, 3.760, 3.981)),
        (ExpertShape(3584, 3072), (66.060, 33.038, 17.031, 17.160, 18.579, 17.547264, 18.579)),
        (ExpertShape(7168, 2048), (88.080, 44.051, 22.708, 22.880, 24.773, 23.396, 24.773)),
    ],
)
def test_an_expert_has_its_bytes_in_every_format(shape: ExpertShape, expected: tuple[float, ...]) -> None:
    found = [entry.expert_bytes(shape) / 1e6 for entry in FORMATS]
    assert found == pytest.approx(expected, abs=6e-4)


def test_odd_sizes_and_biases_are_counted() -> None:
    oss = ExpertShape(2880, 2880, has_bias=True)
    assert find_format("mxfp4").expert_bytes(oss) == 13_219_200 + 17_280
    # 22.5 tiles of 128 are 23 scales a side.
    assert find_format("fp8").expert_bytes(oss) == 3 * (2880 * 2880 + 4 * 23 * 23) + 17_280
    assert not find_format("int4").divides(oss)
    assert find_format("fp8").divides(oss)
    assert find_format("mxfp4").place_bytes(ExpertShape(32, 32)) % 128 == 0


def test_a_place_in_all_layers_in_tokens_of_kv() -> None:
    geometry = find_geometry("qwen3-30b-a3b")
    int4, fp8 = (geometry.place_bytes(find_format(name)) * 48 for name in ("int4", "fp8"))
    assert (int4, fp8) == pytest.approx((117e6, 227e6), rel=3e-3)
    assert int4 / geometry.full_kv_bytes("bf16") == pytest.approx(1190, rel=3e-3)
    assert int4 / geometry.full_kv_bytes("fp8_e4m3") == pytest.approx(2300, rel=4e-3)
    assert fp8 / geometry.full_kv_bytes("bf16") == pytest.approx(2300, rel=3e-3)


def test_layers_are_told_apart() -> None:
    def kinds(config: dict[str, Any]) -> str:
        base = {**COMMON, "num_key_value_heads": 2, **config}
        letters = {PageKind.FULL: "F", PageKind.WINDOW: "W", PageKind.STATE: "S"}
        return "".join(letters[layer.kind] for layer in read_geometry(base, "x").layers)

    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    assert kinds({}) == "FFFF"
    assert kinds({**linear, "full_attention_interval": 4}) == "SSSF"
    assert kinds({"sliding_window": 8}) == "FFFF", "a window that nothing turns on"
    assert kinds({"sliding_window": 8, "use_sliding_window": True}) == "WWWW"
    assert kinds({"sliding_window": 8, "model_type": "mistral"}) == "WWWW"
    named = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    assert kinds({**linear, "layer_types": named, "attention_window_sizes": [None, None, 16, None]}) == "SSWF"


def test_window_kv_stops_growing_at_the_window() -> None:
    geometry = find_geometry("gpt-oss-20b")
    short, long = geometry.request_bytes(100), geometry.request_bytes(10_000)
    assert short == 100 * 24_576 * 2
    assert long == 10_000 * 24_576 + 3_145_728


def test_dense_layers_between_have_no_experts() -> None:
    config = {
        **COMMON, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 2, "mlp_only_layers": [3],
    }  # fmt: skip
    assert [layer.num_experts for layer in read_geometry(config, "x").layers] == [0, 8, 0, 0]


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4_zero"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "int4_g32"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}
                },
            },
            "int4",
        ),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ],
)
def test_the_checkpoints_format_is_recognised(quantization: dict[str, Any] | None, name: str) -> None:
    assert checkpoint_format(quantization).name == name


def test_unknown_formats_models_and_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="gptq, 3 bits"):
        checkpoint_format({"quant_method": "gptq", "bits": 3, "group_size": 128})
    with pytest.raises(ConfigError, match="format='int3'"):
        find_format("int3")
    with pytest.raises(ModelLoadError, match="qwen3-30b-a3b"):
        find_geometry("no-such-model")
    with pytest.raises(ModelLoadError, match="x: the configuration has no hidden_size"):
        read_geometry({"num_hidden_layers": 1, "vocab_size": 10}, "x")
