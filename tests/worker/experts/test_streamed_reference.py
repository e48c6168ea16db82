"""The reference that holds one layer at a time gives what the resident one gives, in one layer's memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memory.device.arena import Arena
from memory.device.host_experts import HostExperts
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.quantized import converted_folder
from tests.helpers.tiny import tiny_folder
from worker.config import WorkerConfig
from worker.experts.pager import ExpertPager
from worker.models.paged import PagedFactory
from worker.verify import fitting
from worker.verify.__main__ import made_up_prompts, main
from worker.verify.fitting import Need, choose_reference, resident_need
from worker.verify.reference import ResidentReference
from worker.verify.streamed import StreamedReference

ARENA_BYTES = 1 << 20
PROMPTS = made_up_prompts(250, 3, 24)
LAYER, EXPERT = 2, 3


def cpu(folder: Path) -> WorkerConfig:
    return WorkerConfig(model=str(folder), device="cpu", num_threads=1)


@pytest.mark.parametrize(
    ("family", "format"),
    [("qwen3_moe", f) for f in ("unquantized", "fp8_block", "int4", "mxfp4")]
    + [("qwen3_5_moe", f) for f in ("fp8_block", "int4", "mxfp4")]
    + [("gpt_oss", "unquantized")],
)
def test_streamed_equals_resident_bit_for_bit(family: str, format: str) -> None:
    config = cpu(converted_folder(family, format))
    resident, streamed = ResidentReference(config, ARENA_BYTES), StreamedReference(config, ARENA_BYTES)
    assert resident.info == streamed.info
    num_tokens = 0
    for want, found in zip(resident.steps(PROMPTS), streamed.steps(PROMPTS), strict=True):
        assert torch.equal(want.likely, found.likely)
        assert torch.equal(want.logprobs, found.logprobs)
        assert [seen.layer for seen in found.seen] == list(range(resident.info.num_layers))
        for right, seen in zip(want.seen, found.seen, strict=True):
            for name in ("x", "weights", "experts", "out"):
                assert torch.equal(getattr(right, name), getattr(seen, name)), (right.layer, name)
        num_tokens += len(found.logprobs)
    assert num_tokens == 3 * 24
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    for layer in (LAYER, 0):
        assert torch.equal(resident.single(layer, x, EXPERT), streamed.single(layer, x, EXPERT))


def test_other_prompts_are_streamed_anew() -> None:
    config = cpu(tiny_folder("qwen3_moe"))
    resident, streamed = ResidentReference(config, ARENA_BYTES), StreamedReference(config, ARENA_BYTES)
    list(streamed.steps(PROMPTS))
    other = [[5, 6, 7, 8, 9]]
    for want, found in zip(resident.steps(other), streamed.steps(other), strict=True):
        assert torch.equal(want.logprobs, found.logprobs)


@pytest.fixture
def deep_folder(tmp_path: Path) -> Path:
    """A configuration of ten layers, for random weights."""
    raw = json.loads((tiny_folder("qwen3_moe") / "config.json").read_text())
    raw["num_hidden_layers"] = 10
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def test_one_layer_is_in_memory_at_a_time(deep_folder: Path) -> None:
    config = WorkerConfig(model=str(deep_folder), device="cpu", num_threads=1, load="random")
    prompts = [PROMPTS[0][:6]]
    with LiveBytes() as all_layers:
        resident = ResidentReference(config, ARENA_BYTES)
    layer = all_layers.now / 10
    assert layer > 200_000, "ten layers, embedding and head, as float32"
    with LiveBytes() as live:
        streamed = StreamedReference(config, ARENA_BYTES)
        assert live.peak < layer / 4, "nothing is read before it is asked for"
        steps = list(streamed.steps(prompts))
        kept = live.now
    with LiveBytes() as memory:
        arena = Arena(streamed.page_specs, ARENA_BYTES, torch.device("cpu"))
    assert memory.peak >= arena.num_bytes
    assert live.peak - memory.peak < 1.3 * layer + kept
    assert kept < layer / 4, "weights stayed behind"
    for want, found in zip(resident.steps(prompts), steps, strict=True):
        assert torch.equal(want.logprobs, found.logprobs)


def test_what_does_not_fit_is_streamed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = converted_folder("qwen3_moe", "int4")
    arguments = [str(folder), "--device", "cpu", "--arena-bytes", str(1 << 23)]
    need = resident_need(folder, "float32", 1 << 23, on_cpu=True)
    # Three layers of 8 experts of 3 x 64 x 32 and their attention, embedding and head, in float32.
    assert need.reference == 4 * (
        3 * (8 * 3 * 64 * 32 + 64 * 8 + 64 * 192 + 2 * 64 + 2 * 16) + 2 * 288 * 64 + 64
    )
    free = int((need.reference + need.beside) / 0.9)
    assert need.fits(free + 10)
    assert not need.fits(free - 10)
    monkeypatch.setattr(fitting, "free_bytes", lambda device: free - 10)
    assert main(arguments) == 0
    assert "reference: streamed layer by layer (the whole model takes" in capsys.readouterr().out
    monkeypatch.setattr(fitting, "free_bytes", lambda device: free + 10)
    assert choose_reference("auto", cpu(folder), 1 << 23)[1].startswith("reference: resident (the whole")
    assert Need(10**12, 0).fits(10**11) is False


@pytest.mark.parametrize("format", ["unquantized", "int4"])
def test_layer_and_expert_are_named(
    format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish: Callable[..., ExpertPager] = PagedFactory.finish

    def spoiling(self: PagedFactory, device: torch.device) -> ExpertPager:
        pager = finish(self, device)
        host: HostExperts = pager.host
        host.block(LAYER, EXPERT).copy_(host.block(LAYER, EXPERT + 1).clone())
        host.seal(LAYER, EXPERT)
        return pager

    arguments = [str(converted_folder("qwen3_moe", format)), "--device", "cpu", "--reference", "streamed"]
    monkeypatch.setattr(PagedFactory, "finish", spoiling)
    assert main([*arguments, "--arena-bytes", str(1 << 23)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "reference: streamed layer by layer (as asked)"
    for line in said[1:4]:
        assert line.startswith("FAIL")
        assert f"first differs in layer {LAYER}, expert {EXPERT} (" in line
    assert said[4] == "paged experts differ from resident ones"
