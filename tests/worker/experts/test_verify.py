"""The verifier passes sound models of every format, and names layer and expert under each control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels._reference import experts as reference_kernel
from tests.helpers.quantized import converted_folder
from tests.helpers.spoiling import spoiled
from tests.helpers.tiny import tiny_folder
from worker.config import WorkerConfig
from worker.errors import ConfigError
from worker.experts.pager import ExpertPager
from worker.models import paged
from worker.quantization.blocks import block_part
from worker.quantization.choose import find_format
from worker.quantization.mxfp4 import Mxfp4
from worker.verify.__main__ import made_up_prompts, main, read_prompts
from worker.verify.compare import CASES, Outcome, Verifier
from worker.verify.probe import Probe, Seen, find_parting
from worker.verify.reference import dequantized_experts

ARENA_BYTES = 1 << 23
LAYER, EXPERT = 1, 3


def verified(folder: Path, case: int = 1) -> tuple[Outcome, bool]:
    config = WorkerConfig(model=str(folder), device="cpu", num_threads=1)
    verifier = Verifier(config, made_up_prompts(250, 2, 20), ARENA_BYTES)
    outcome = verifier.run(CASES[case])
    return outcome, outcome.passes(verifier.tolerance)


@pytest.mark.parametrize(
    ("family", "format"),
    [("qwen3_moe", f) for f in ("unquantized", "fp8_block", "int4", "mxfp4")]
    + [("qwen3_5_moe", "int4"), ("gpt_oss", "unquantized")],
)
def test_sound_models_pass(family: str, format: str) -> None:
    for case in range(len(CASES)):
        outcome, passes = verified(converted_folder(family, format), case)
        assert passes, outcome
        assert outcome.num_tokens == 40
        assert outcome.hits > 0
        if CASES[case].churns:
            assert outcome.evictions > 20, "the forced case did not churn"


def test_an_unpaged_zero_point_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    where = paged.block_format
    monkeypatch.setattr(
        paged, "block_format", lambda layout: replace(where(layout), gate_up_zeros=-1, down_zeros=-1)
    )
    outcome, passes = verified(converted_folder("qwen3_moe", "int4"))
    assert not passes
    assert outcome.parting is not None
    assert outcome.parting.layer == 0
    assert outcome.mean > 0.02


def test_a_neighbours_scale_fails_and_the_expert_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted_folder("qwen3_moe", "fp8_block")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def swap(pager: ExpertPager) -> None:
        from worker.quantization.base import ExpertShape

        layout = find_format(config).block_layout(ExpertShape(64, 32))
        own, other = (pager.host.block(LAYER, e) for e in (EXPERT, EXPERT + 1))
        block_part(own, layout, "down_scales").copy_(2 * block_part(other, layout, "down_scales"))

    spoiled(monkeypatch, swap)
    outcome, passes = verified(folder)
    assert not passes
    assert outcome.parting is not None
    assert (outcome.parting.layer, outcome.parting.experts) == (LAYER, (EXPERT,))


def test_a_padded_mxfp4_tail_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2,880 laid out as if they had 2,944: every row but the first begins too late."""
    pack = Mxfp4.pack

    def padded(self: Mxfp4, tensors: Any, shape: Any, block: torch.Tensor) -> None:
        pack(self, tensors, shape, block)
        down = block_part(block, self.block_layout(shape), "down")
        rows, groups, width = down.shape
        wide = torch.zeros(rows, groups + 1, width, dtype=torch.uint8)
        wide[:, :groups] = down
        down.copy_(wide.flatten()[: down.numel()].view(down.shape))

    def spoil(pager: ExpertPager) -> None:
        host = pager.host
        format, block = Mxfp4(), torch.zeros(host.place_bytes, dtype=torch.uint8)
        from worker.quantization.base import ExpertShape

        shape = ExpertShape(64, 32)
        for expert in range(host.num_experts):
            own = host.block(LAYER, expert)
            layout = format.block_layout(shape)
            gate_up, down = (block_part(own, layout, n) for n in ("gate_up", "down"))
            scales, down_scales = (block_part(own, layout, n) for n in ("gate_up_scales", "down_scales"))
            tensors = {
                "down_proj.weight_blocks": down.clone(),
                "down_proj.weight_scales": down_scales.clone(),
            }
            for name, half in (("gate_proj", slice(0, 32)), ("up_proj", slice(32, 64))):
                tensors[f"{name}.weight_blocks"] = gate_up[half].clone()
                tensors[f"{name}.weight_scales"] = scales[half].clone()
            padded(format, tensors, shape, block[: own.numel()])
            own.copy_(block[: own.numel()])

    spoiled(monkeypatch, spoil)
    outcome, passes = verified(converted_folder("qwen3_moe", "mxfp4"))
    assert not passes
    assert outcome.parting is not None
    assert outcome.parting.layer == LAYER
    assert outcome.parting.experts != ()


def test_a_stale_place_fails_and_is_also_found_by_the_running_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that come from the host are not stored, so their places still hold who was there before."""
    run = reference_kernel.run_experts

    def forgetful(*args: Any) -> torch.Tensor:
        return run(*args[:-2], None, args[-1])

    monkeypatch.setattr(reference_kernel, "run_experts", forgetful)
    outcome, passes = verified(converted_folder("qwen3_moe", "unquantized"), case=2)
    assert not passes
    assert outcome.parting is not None
    assert outcome.parting.layer == 0
    assert outcome.parting.experts != ()
    assert "is not what was loaded" in outcome.corrupt


def test_the_command_says_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = converted_folder("qwen3_moe", "int4")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[20, 30, 40, 50, 60, 70, 80, 90]\nA line of text.\n")
    assert len(read_prompts(prompts, tiny_folder("qwen3_moe"))) == 2
    arguments = [str(folder), "--device", "cpu", "--prompts", str(prompts), "--arena-bytes", str(ARENA_BYTES)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("ok  ") for line in lines] == [False, True, True, True, False]
    assert lines[0].startswith("reference: resident (the whole model takes 0.00 GB")
    assert "churning" in lines[1]
    where = paged.block_format
    monkeypatch.setattr(
        paged, "block_format", lambda layout: replace(where(layout), gate_up_zeros=-1, down_zeros=-1)
    )
    assert main(arguments) == 1
    assert "FAIL" in (said := capsys.readouterr().out)
    assert "first differs in layer 0" in said
    assert main([str(tmp_path / "absent"), "--device", "cpu"]) == 2
    capsys.readouterr()
    assert main([str(tiny_folder("qwen3_5")), "--device", "cpu", "--arena-bytes", str(ARENA_BYTES)]) == 2
    assert "no routed experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[20, 30, 40", "not JSON"),
        ('["a", "b", "c"]', "not a list of token ids"),
        ("[20, 30, 1.5]", "not a list of token ids"),
        ("[20, 30, 99999]", "token id 99999 is not in the vocabulary of 288"),
        ("[20, 30, -5]", "token id -5 is not in the vocabulary of 288"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_no_difference(
    line: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"[20, 30, 40]\n{line}\n")
    assert main([str(tiny_folder("qwen3_moe")), "--device", "cpu", "--prompts", str(prompts)]) == 2
    assert f"line 2: {said}" in capsys.readouterr().err


def test_texts_for_a_folder_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 288}')
    (tmp_path / "prompts.txt").write_text("A line of text.\n")
    with pytest.raises(ConfigError, match="give token ids"):
        read_prompts(tmp_path / "prompts.txt", tmp_path)


def test_a_nan_is_a_parting() -> None:
    right, found = Probe(dequantized_experts), Probe(dequantized_experts)
    x, out = torch.ones(2, 4), torch.ones(2, 4)
    spoilt = out.clone()
    spoilt[1] = torch.nan
    chosen = torch.zeros(2, 0, dtype=torch.int64)
    for probe, result in ((right, out), (found, spoilt)):
        probe.seen.append(Seen(5, x, torch.ones(2, 0), chosen, result))
    parting = find_parting(right.seen, right, found, 1e-3)
    assert parting is not None
    assert (parting.layer, parting.token) == (5, 1)
    found.seen[0] = right.seen[0]
    assert find_parting(right.seen, right, found, 1e-3) is None
