"""The verifier on a CUDA device: sound formats pass, each control fails, and streaming gives the resident bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.quantized import converted_folder
from tests.helpers.spoiling import spoiled
from worker.config import WorkerConfig
from worker.experts import pager as paging
from worker.experts.pager import ExpertPager
from worker.models import paged
from worker.quantization.base import ExpertShape
from worker.quantization.blocks import block_part
from worker.quantization.choose import find_format
from worker.verify.__main__ import made_up_prompts
from worker.verify.compare import CASES, Outcome, Verifier
from worker.verify.reference import ResidentReference
from worker.verify.streamed import StreamedReference

pytestmark = pytest.mark.gpu

FORMATS = ("unquantized", "fp8_block", "int4", "mxfp4")
ARENA_BYTES = 1 << 23
PROMPTS = made_up_prompts(250, 2, 24)
LAYER = 1
SHAPE = ExpertShape(64, 32)


def cuda(folder: Path, dtype: str) -> WorkerConfig:
    return WorkerConfig(model=str(folder), device="cuda", dtype=dtype)


def verified(folder: Path, case: int, dtype: str = "bfloat16") -> tuple[Outcome, bool]:
    verifier = Verifier(cuda(folder, dtype), PROMPTS, ARENA_BYTES)
    outcome = verifier.run(CASES[case])
    print(outcome.line(verifier.tolerance))
    return outcome, outcome.passes(verifier.tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", FORMATS)
def test_sound_models_pass(format: str, dtype: str) -> None:
    for case in range(len(CASES)):
        outcome, passes = verified(converted_folder("qwen3_moe", format), case, dtype)
        assert passes, outcome
        assert outcome.hits > 0
        if CASES[case].churns:
            assert outcome.evictions > 20, "the forced case did not churn"


@pytest.mark.parametrize("format", FORMATS)
def test_streamed_equals_resident_bit_for_bit(format: str) -> None:
    config = cuda(converted_folder("qwen3_5_moe", format), "bfloat16")
    resident, streamed = ResidentReference(config, ARENA_BYTES), StreamedReference(config, ARENA_BYTES)
    for want, found in zip(resident.steps(PROMPTS), streamed.steps(PROMPTS), strict=True):
        for right, seen in zip(want.seen, found.seen, strict=True):
            for name in ("x", "weights", "experts", "out"):
                assert torch.equal(getattr(right, name).cpu(), getattr(seen, name)), (right.layer, name)
        assert torch.equal(want.likely.cpu(), found.likely)
        assert torch.equal(want.logprobs.cpu(), found.logprobs)


def test_an_unpaged_zero_point_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    where = paged.block_format
    monkeypatch.setattr(
        paged, "block_format", lambda layout: replace(where(layout), gate_up_zeros=-1, down_zeros=-1)
    )
    outcome, passes = verified(converted_folder("qwen3_moe", "int4"), 1)
    assert not passes
    assert outcome.parting is not None
    assert outcome.parting.layer == 0


def busiest_expert(folder: Path) -> int:
    """The expert of the layer that the prompts choose most; a made-up model may leave some unused."""
    reference = ResidentReference(cuda(folder, "bfloat16"), ARENA_BYTES)
    chosen = [s.experts.flatten() for step in reference.steps(PROMPTS) for s in step.seen if s.layer == LAYER]
    return int(torch.bincount(torch.cat(chosen)).argmax())


def test_a_neighbours_scale_fails_and_the_expert_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = converted_folder("qwen3_moe", "fp8_block")
    expert = busiest_expert(folder)

    def swap(pager: ExpertPager) -> None:
        layout = find_format(config).block_layout(SHAPE)
        own, other = (pager.host.block(LAYER, e) for e in (expert, (expert + 1) % 8))
        block_part(own, layout, "down_scales").copy_(2 * block_part(other, layout, "down_scales"))

    spoiled(monkeypatch, swap)
    outcome, passes = verified(folder, 1)
    assert not passes
    assert outcome.parting is not None
    assert (outcome.parting.layer, outcome.parting.experts) == (LAYER, (expert,))


def test_a_padded_mxfp4_tail_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one group laid out as if they had two: every row but the first begins too late."""

    def pad(pager: ExpertPager) -> None:
        layout = find_format({"quant_method": "mxfp4"}).block_layout(SHAPE)
        for expert in range(pager.host.num_experts):
            down = block_part(pager.host.block(LAYER, expert), layout, "down")
            rows, groups, width = down.shape
            wide = torch.zeros(rows, groups + 1, width, dtype=torch.uint8)
            wide[:, :groups] = down
            down.copy_(wide.flatten()[: down.numel()].view(down.shape))

    spoiled(monkeypatch, pad)
    outcome, passes = verified(converted_folder("qwen3_moe", "mxfp4"), 1)
    assert not passes
    assert outcome.parting is not None
    assert outcome.parting.layer == LAYER


def test_a_stale_place_fails_and_is_also_found_by_the_running_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that come from the host are not stored, so their places still hold who was there before."""
    run: Any = paging.run_experts

    def forgetful(*args: Any, **options: Any) -> Any:
        return run(*args[:7], *(None for _ in args[7:8]), *args[8:], **options)

    monkeypatch.setattr(paging, "run_experts", forgetful)
    outcome, passes = verified(converted_folder("qwen3_moe", "unquantized"), 2)
    assert not passes
    assert outcome.parting is not None
    assert outcome.parting.layer == 0
    assert "is not what was loaded" in outcome.corrupt


def test_the_streamed_reference_takes_one_layers_memory(tmp_path: Path) -> None:
    import json

    layer_params = 16 * 3 * 512 * 256
    raw = json.loads((converted_folder("qwen3_moe", "unquantized") / "config.json").read_text())
    raw |= {"num_hidden_layers": 24, "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16}
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = replace(cuda(tmp_path, "bfloat16"), load="random")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    list(StreamedReference(config, ARENA_BYTES).steps(PROMPTS))
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{peak / 1e6:.1f} MB at most; a layer's experts are {2 * layer_params / 1e6:.1f} MB")
    assert peak < 6 * 2 * layer_params + 3 * ARENA_BYTES < 24 * 2 * layer_params
