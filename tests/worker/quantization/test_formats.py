"""Every weight format against the meaning of its checkpoint layout, at odd sizes: block, reference kernel, Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import experts as face
from kernels._reference.experts import read_expert, run_experts
from kernels._triton import expert_tiles
from kernels._triton import experts as triton_experts
from kernels.pointwise import GatedActivation
from tests.helpers.formats import CONFIGS, MadeExpert, format_of, make_expert, with_group
from worker.errors import ModelLoadError
from worker.execution.quantized import DenseFormat
from worker.experts.block_format import block_format
from worker.quantization.base import ExpertShape, Format
from worker.quantization.choose import find_format, part_offset
from worker.quantization.fp8_block import quantize_fp8_block
from worker.quantization.int4 import Int4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(format: Format, made: MadeExpert, shape: ExpertShape) -> torch.Tensor:
    block = torch.full((format.block_layout(shape).num_bytes,), 0xA5, dtype=torch.uint8)
    format.pack(made.tensors, shape, block)
    return block


def product(matrices: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = matrices["gate_proj"] @ x, matrices["up_proj"] @ x
    return matrices["down_proj"] @ (gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("inner", [32, 64, 96, 192])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_means_what_the_checkpoint_means(name: str, inner: int) -> None:
    config, shape = CONFIGS[name], ExpertShape(160, inner)
    format, made = format_of(config), make_expert(config, shape, inner)
    declared = {spec.name: (spec.shape, spec.dtype) for spec in format.expert_tensors(shape)}
    present = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in made.tensors.items()}
    assert declared == present
    block = packed(format, made, shape)
    gate_up, down = format.dequantize(block, shape)
    x = np.random.default_rng(1).standard_normal(160)
    if "act_order" not in name:
        np.testing.assert_allclose(gate_up[:inner], made.meaning["gate_proj"], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(gate_up[inner:], made.meaning["up_proj"], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(down, made.meaning["down_proj"], rtol=1e-6, atol=1e-9)
    gate, up = gate_up.double().numpy()[:inner], gate_up.double().numpy()[inner:]
    found = product({"gate_proj": gate, "up_proj": up, "down_proj": down.double().numpy()}, x)
    np.testing.assert_allclose(found, product(made.meaning, x), rtol=1e-5, atol=1e-5)
    seen = read_expert(block, block_format(format.block_layout(shape)), inner, 160, torch.float32)
    assert torch.equal(seen.gate_up, gate_up)
    assert torch.equal(seen.down, down)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("name", ["gptq_act_order", "awq", "compressed_zeros"])
def test_groups_of_other_sizes_and_a_last_group_that_is_cut_off(name: str, group: int) -> None:
    base = CONFIGS[name]
    assert base is not None
    config, shape = with_group(base, group), ExpertShape(128, 192)
    made = make_expert(config, shape, group, group)
    gate_up, down = format_of(config).dequantize(packed(format_of(config), made, shape), shape)
    x = np.random.default_rng(1).standard_normal(128)
    gate, up = gate_up.double().numpy()[:192], gate_up.double().numpy()[192:]
    found = product({"gate_proj": gate, "up_proj": up, "down_proj": down.double().numpy()}, x)
    np.testing.assert_allclose(found, product(made.meaning, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "awq"])
def test_2880_by_2880_with_biases(name: str) -> None:
    config, shape = CONFIGS[name], ExpertShape(2880, 2880, has_bias=True)
    format, made = format_of(config), make_expert(config, shape, 7)
    block = packed(format, made, shape)
    gate_up, down = format.dequantize(block, shape)
    np.testing.assert_allclose(gate_up[2880:], made.meaning["up_proj"], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(down, made.meaning["down_proj"], rtol=1e-6, atol=1e-9)
    seen = read_expert(block, block_format(format.block_layout(shape)), 2880, 2880, torch.float32)
    assert seen.down_bias is not None
    assert torch.equal(seen.down_bias, made.tensors["down_proj.bias"].float())


@pytest.mark.parametrize("name", ["unquantized", "fp8_block", "awq", "mxfp4"])
def test_on_a_cpu_no_bit_of_a_token_depends_on_those_beside_it(name: str) -> None:
    config, shape = CONFIGS[name], ExpertShape(128, 96)
    format = format_of(config)
    blocks = [packed(format, make_expert(config, shape, seed), shape) for seed in range(3)]
    table = torch.tensor([block.data_ptr() for block in blocks])
    torch.manual_seed(3)
    x, weights = torch.randn(33, 128), torch.rand(33, 2)
    experts = torch.stack([torch.randperm(3)[:2] for _ in range(33)])

    def run(rows: slice) -> torch.Tensor:
        where = block_format(format.block_layout(shape))
        return face.run_experts(
            x[rows], weights[rows], experts[rows], table, where, 96, GatedActivation(), deterministic=True
        )

    together = run(slice(None))
    for token in range(33):
        assert torch.equal(together[token], run(slice(token, token + 1))[0]), token


@pytest.mark.parametrize(
    ("name", "hidden", "inner"),
    [
        ("unquantized", 96, 40),
        ("fp8_block", 160, 96),
        ("fp8_block", 128, 256),
        ("fp8_block", 64, 160),
        ("gptq_v1", 96, 32),
        ("gptq_v1_symmetric", 64, 64),
        ("gptq_act_order", 96, 64),
        ("awq", 64, 96),
        ("compressed_zeros", 96, 64),
        ("mxfp4", 64, 96),
    ],
)
def test_the_triton_kernel_and_the_reference_agree_with_the_meaning(
    name: str, hidden: int, inner: int
) -> None:
    config, shape, tokens = CONFIGS[name], ExpertShape(hidden, inner), 3
    format = format_of(config)
    made = [make_expert(config, shape, seed) for seed in range(4)]
    blocks = torch.stack([packed(format, expert, shape) for expert in made])
    where = block_format(format.block_layout(shape))
    torch.manual_seed(hidden)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    experts = torch.tensor([[3, 1], [1, 0], [-1, -1]])
    there = blocks.to(DEVICE)
    table = torch.tensor([block.data_ptr() for block in there], device=DEVICE)
    kept = torch.zeros_like(there)
    tee = torch.tensor([block.data_ptr() for block in kept], device=DEVICE)
    want = np.zeros((tokens, hidden))
    for token, choice in ((0, 0), (0, 1), (1, 0), (1, 1)):
        meaning = made[int(experts[token, choice])].meaning
        want[token] += float(weights[token, choice]) * product(meaning, x[token].double().numpy())

    def error(result: torch.Tensor, rows: slice = slice(None)) -> float:
        part = want[rows]
        return float(np.linalg.norm(result.double().cpu().numpy() - part) / np.linalg.norm(part))

    def on_device(rows: slice, dtype: torch.dtype, tee: torch.Tensor | None = None) -> torch.Tensor:
        moved = (x[rows].to(DEVICE, dtype), weights[rows].to(DEVICE), experts[rows].to(DEVICE))
        # Few programs where the interpreter runs them.
        alone = rows.stop is not None and DEVICE == "cpu"
        tiles = (expert_tiles.Tiles(32, 1, 1, 4, 1),) * 2 if alone else None
        return triton_experts.run_experts(*moved, table, where, inner, tee=tee, tiles=tiles)

    plain = run_experts(
        x,
        weights,
        experts,
        torch.tensor([b.data_ptr() for b in blocks]),
        where,
        inner,
        GatedActivation(),
        None,
    )
    out = on_device(slice(None), torch.float32)
    assert error(plain) < 2e-6
    assert error(out) < 2e-6
    assert torch.equal(out[2].cpu(), torch.zeros(hidden))
    assert torch.equal(on_device(slice(None), torch.float32, tee), out), "storing changed the result"
    chosen = [0, 1, 3]
    assert torch.equal(kept[chosen], there[chosen]), "a block was not stored whole"
    one = on_device(slice(1), torch.float32)
    assert error(one, slice(1)) < 2e-6, "a token alone"
    kept.zero_()
    assert torch.equal(on_device(slice(1), torch.float32, tee), one), "storing changed the result"
    assert torch.equal(kept[[1, 3]], there[[1, 3]]), "a block was not stored whole"
    assert torch.equal(on_device(slice(2, 3), torch.float32).cpu(), torch.zeros(1, hidden))
    if DEVICE == "cuda" and name != "unquantized":
        for rows in (slice(None), slice(1)):  # through the unpacking in assembly
            assert error(on_device(rows, torch.bfloat16), rows) < 2e-2


def test_a_tee_stores_the_blocks_of_chosen_experts_and_no_others() -> None:
    config, shape = CONFIGS["awq"], ExpertShape(64, 32)
    format = format_of(config)
    blocks = torch.stack([packed(format, make_expert(config, shape, s), shape) for s in range(4)])
    where = block_format(format.block_layout(shape))
    places = torch.zeros_like(blocks)
    table = torch.tensor([block.data_ptr() for block in blocks])
    tee = torch.tensor([0, places[1].data_ptr(), places[2].data_ptr(), 0])
    experts = torch.tensor([[3, 1]])
    face.run_experts(torch.randn(1, 64), torch.rand(1, 2), experts, table, where, 32, GatedActivation(), tee)
    assert torch.equal(places[1], blocks[1])
    assert not places[0].any()
    assert not places[2].any(), "an expert that nobody chose was stored"
    there, target = blocks.to(DEVICE), torch.zeros_like(blocks, device=DEVICE)
    source = torch.tensor([block.data_ptr() for block in there], device=DEVICE)
    targets = torch.tensor([0, target[1].data_ptr(), 0, target[3].data_ptr()], device=DEVICE)
    face.copy_blocks(source, targets, blocks.shape[1])
    assert torch.equal(target.cpu()[[1, 3]], blocks[[1, 3]])
    assert not target[0].any()
    assert not target[2].any()


def test_a_neighbours_scale_shows_in_every_format() -> None:
    """The control: were scales not read from the expert's own block, this is the size of the error."""
    shape = ExpertShape(160, 96)
    for name, config in CONFIGS.items():
        format = format_of(config)
        own, other = (packed(format, make_expert(config, shape, seed), shape) for seed in (1, 2))
        layout = format.block_layout(shape)
        scales = part_offset(layout, "down_scales")
        if scales < 0:
            assert name == "unquantized"
            continue
        end = min([p.offset_bytes for p in layout.parts if p.offset_bytes > scales] + [layout.num_bytes])
        mixed = own.clone()
        mixed[scales:end] = other[scales:end]
        right, wrong = (format.dequantize(block, shape)[1] for block in (own, mixed))
        assert float((right - wrong).norm() / right.norm()) > 0.1, name


@pytest.mark.parametrize(
    "name", ["fp8_block", "mxfp4", "compressed_zeros", "gptq_v1", "awq", "gptq_v1_symmetric"]
)
def test_quantizing_and_packing_stays_near_the_weights(name: str) -> None:
    shape, format = ExpertShape(96, 64), format_of(CONFIGS[name])
    torch.manual_seed(0)
    weights = {
        "gate_proj": torch.randn(64, 96),
        "up_proj": torch.randn(64, 96) + 0.5,
        "down_proj": torch.randn(96, 64),
    }
    tensors = format.quantize(weights)
    assert {spec.name for spec in format.expert_tensors(shape)} == set(tensors)
    block = torch.zeros(format.block_layout(shape).num_bytes, dtype=torch.uint8)
    format.pack(tensors, shape, block)
    gate_up, down = format.dequantize(block, shape)
    wanted = torch.cat([weights["gate_proj"], weights["up_proj"]])
    bound = 0.04 if name == "fp8_block" else 0.16
    for found, want in ((gate_up, wanted), (down, weights["down_proj"])):
        assert float((found - want).norm() / want.norm()) < bound


def test_fp8_tiles_have_the_scale_of_their_own_square() -> None:
    weight = torch.ones(130, 130)
    weight[128:] = 1000.0
    found = quantize_fp8_block(weight)
    assert found["weight_scale_inv"].shape == (2, 2)
    torch.testing.assert_close(found["weight_scale_inv"][:, 0] * 448.0, torch.tensor([1.0, 1000.0]))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "8 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "64"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, object], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        find_format(config)


def test_a_symmetric_checkpoint_with_other_zero_points_is_refused() -> None:
    config, shape = CONFIGS["gptq_v1"], ExpertShape(64, 32)
    made = make_expert(config, shape, 0)
    assert config is not None
    wrong = format_of({**config, "sym": True})
    with pytest.raises(ModelLoadError, match="zero point other than 8"):
        wrong.pack(made.tensors, shape, torch.zeros(wrong.block_layout(shape).num_bytes, dtype=torch.uint8))


def test_unsorted_groups_need_act_order_in_the_configuration() -> None:
    config, shape = CONFIGS["gptq_act_order"], ExpertShape(64, 64)
    assert config is not None
    made = make_expert(config, shape, 0)
    wrong = format_of({**config, "desc_act": False})
    assert isinstance(wrong, Int4)
    with pytest.raises(ModelLoadError, match="desc_act"):
        wrong.pack(made.tensors, shape, torch.zeros(wrong.block_layout(shape).num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in ("unquantized", "mxfp4")])
def test_a_dense_linear_means_what_the_checkpoint_means(name: str) -> None:
    """Attention and dense MLPs are dequantised at load, act-order put back into the inputs' order."""
    format, made = format_of(CONFIGS[name]), make_expert(CONFIGS[name], ExpertShape(96, 64), 5)
    assert isinstance(format, DenseFormat)
    suffixes = format.linear_suffixes()
    for linear, meaning in made.meaning.items():
        tensors = {s: t for s in suffixes if (t := made.tensors.get(f"{linear}.{s}")) is not None}
        found = format.dequantize_linear(tensors)
        np.testing.assert_allclose(found, meaning, rtol=1e-6, atol=1e-9)
        first = "weight" if "weight" in suffixes else suffixes[0]
        assert format.linear_shape(first, tuple(tensors[first].shape)) == meaning.shape


def test_group_size_is_a_property_of_the_tensors() -> None:
    """A configuration that says 128 for tensors in groups of 32 and 64 does not mislead."""
    config = CONFIGS["awq"]
    assert config is not None
    format = format_of(with_group(config, 128))
    assert isinstance(format, Int4)
    fitted = format.fitted(ExpertShape(256, 192), (8, 192), (3, 256))
    assert fitted.groups(ExpertShape(256, 192)) == (32, 64)
    with pytest.raises(ModelLoadError, match="no known size"):
        format.fitted(ExpertShape(256, 192), (7, 192), (3, 256))
