"""What the GPU benchmarks compute needs no GPU: shapes, limits, breakdowns, what a client saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.decode_soak import growth
from benchmarks.decode_speed import Case, DecodeTable, claimed_arena
from benchmarks.gpu_engine import RoutedAlike, random_prompts
from benchmarks.http_throughput import ModelServer, figures, write_tokenizer
from benchmarks.model_tables import Rates, Run
from benchmarks.offline_throughput import Stream
from benchmarks.prefill_speed import PrefillTable, prefill_flops
from benchmarks.shapes import QUANTIZATION, cut_folder, shape_config, shape_folder, shape_geometry
from benchmarks.speed_tables import CostTable
from benchmarks.step_profile import Kernel, breakdown, heaviest, part_of
from benchmarks.streaming.closed_loop import Answered
from worker.config import WorkerConfig
from worker.execution.loading import open_model

MODELS = ["qwen3-30b-a3b", "qwen3.5-4b", "qwen3.5-35b-a3b", "gpt-oss-20b"]


@pytest.mark.parametrize("model", MODELS)
def test_named_shapes_are_models_that_the_engine_knows(model: str) -> None:
    folder = shape_folder(model, "mxfp4" if model == "gpt-oss-20b" else "bf16")
    opened = open_model(WorkerConfig(model=str(folder), load="random", device="cpu"))
    geometry = shape_geometry(folder)
    # Rehearsed weights are those that the advisor counts: the expert blocks' biases and scales aside.
    assert opened.num_elements == pytest.approx(geometry.num_params, rel=2e-3)


def test_shapes_come_in_every_format() -> None:
    for format in QUANTIZATION:
        assert ("quantization_config" in shape_config("qwen3-30b-a3b", format)) == (format != "bf16")
    with pytest.raises(ValueError, match="format='nvfp4'"):
        shape_config("qwen3-30b-a3b", "nvfp4")


def test_prefill_operations_of_the_4b_shape() -> None:
    geometry = shape_geometry(shape_folder("qwen3.5-4b", "bf16"))
    facts = shape_config("qwen3.5-4b", "bf16")
    sizes = facts["num_attention_heads"], facts["head_dim"]
    found = prefill_flops(geometry, *sizes, 8192)
    layers = sum(layer.matrix_params for layer in geometry.layers)
    attention = 8 * 4 * 16 * 256 * 8192 * 8192 / 2  # 8 softmax layers, causal
    assert found == pytest.approx(2 * layers * 8192 + attention + 2 * geometry.head_params)


def test_a_recording_is_split_into_parts_and_gaps() -> None:
    kernels = [
        Kernel("_attend", 0.0, 10.0),
        Kernel("one_gate_up", 11.0, 31.0),
        Kernel("_prepare", 30.0, 34.0),  # begins while the one before ends
        Kernel("nvjet_sm90_tst", 34.0, 40.0),
        Kernel("_attend", 140.0, 150.0),
    ]
    found = breakdown(kernels, 2)
    assert found["attention"] == pytest.approx(0.010)
    assert found["experts"] == pytest.approx(0.010)
    assert found["linear_attention"] == pytest.approx(0.0015)
    assert found["rest"] == pytest.approx(0.003)
    assert found["launch_gaps"] == pytest.approx(0.0005)
    assert found["host_gaps"] == pytest.approx(0.05)
    assert found["kernels"] == 2.5
    assert heaviest(kernels, 1)[0].split()[-1] == "_attend"
    assert breakdown([], 1) == {}
    assert part_of("something_else") == "rest"


def test_a_client_counts_what_it_saw() -> None:
    quick = Answered(0.0, [0.5, 0.7, 0.9], 21)
    slow = Answered(0.0, [3.0, 3.5], 11)
    found = figures([quick, slow], 2.0, ttft_slo_s=1.0, tpot_slo_s=0.03)
    assert found["output_tokens_per_s"] == 16.0
    assert found["goodput_per_s"] == 0.5
    assert found["ttft_p99_ms"] == 3000.0
    assert found["tpot_p50_ms"] == pytest.approx(50.0)
    with pytest.raises(RuntimeError, match=r"1 of 2 requests failed: HTTP/1\.1 429"):
        figures([quick, Answered(0.0, failure="HTTP/1.1 429")], 1.0, 1.0, 1.0)
    stream = Stream(1.0, [(1.5, 1), (1.7, 4)])
    assert stream.first_s == 0.5
    assert stream.gaps_s == pytest.approx([0.05] * 4)
    assert growth([100, 90, 102]) == pytest.approx(0.02)


def test_a_server_that_ends_is_told_with_its_output(tmp_path: Path) -> None:
    server = ModelServer("default", {}, tmp_path, module="json.tool")  # ends: its arguments are no files
    with pytest.raises(RuntimeError, match="behind default ended with 2"):
        server.wait(20.0)
    server.close()
    assert "usage" in (tmp_path / "default.log").read_text()


def test_tables_name_what_fits_and_what_deterministic_mode_costs() -> None:
    geometry = shape_geometry(shape_folder("qwen3-30b-a3b", "bf16"))
    table = DecodeTable()
    cases = table.cases(geometry, 72_000_000_000)
    assert Case(64, "8k") in cases
    assert Case(256, "8k") not in cases
    needs = table.needs(geometry, 72_000_000_000)
    assert needs.batches == (1, 4, 16, 64, 256)
    assert needs.arena_bytes > 64 * 8192 * 98304
    assert PrefillTable().needs(geometry, 0).max_step_tokens == 32768
    windowed = shape_geometry(shape_folder("gpt-oss-20b", "mxfp4"))
    whole = (
        256 * 8192 * 2 * windowed.full_kv_bytes()
    )  # windows hold a claimed prompt as well, and are half the layers
    assert whole < claimed_arena(windowed, 256, 8192) < 1.2 * whole
    table.rows.append({"case": "m.bf16.b64.c1k", "tokens_per_s": 4000.0})
    costs = CostTable(table, ["m.bf16"])
    assert costs.cost("m.bf16.b64.c1k", {"tokens_per_s": 3000.0}) == pytest.approx(0.25)
    assert costs.cost("other", {"tokens_per_s": 3000.0}) is None


def test_a_model_that_fails_is_noted_and_the_others_go_on(tmp_path: Path) -> None:
    seen = []

    class Measured(Run):
        def _measure(self, name: str) -> None:
            seen.append(name)
            if name == "a.bf16":
                raise ValueError("no")
            if name == "d.bf16":
                self.tables[0].rows.append({"case": name, "share": 0.25})  # type: ignore[attr-defined]
                raise KeyboardInterrupt
            self.tables[0].rows.append({"case": name, "share": 0.5})  # type: ignore[attr-defined]

    run = Measured([DecodeTable()], Rates(4e12, 8e14), tmp_path)
    run.measure(["a.bf16", "b.bf16", "c.bf16"])
    assert seen == ["a.bf16", "b.bf16", "c.bf16"]
    written = json.loads((tmp_path / "decode_speed.json").read_text())
    assert written["figures"] == {"b.bf16.share": 0.5, "c.bf16.share": 0.5}
    assert written["notes"][-1] == "a.bf16 failed: ValueError: no"
    assert written["conditions"]["commit"]
    with pytest.raises(KeyboardInterrupt):
        run.measure(["d.bf16", "b.bf16"])
    written = json.loads((tmp_path / "decode_speed.json").read_text())
    assert written["figures"]["d.bf16.share"] == 0.25, "an interrupted run keeps what it has"


def test_experts_are_drawn_by_place_and_counted() -> None:
    choices = torch.tensor([[0, 1], [1, 2], [5, 0]])
    taken: list[torch.Tensor] = []

    def real(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        taken.append(experts)
        return x

    layer = RoutedAlike(real, choices)
    layer(torch.zeros(2, 4), torch.ones(2, 2), torch.full((2, 2), 7))
    assert taken[0].tolist() == [[0, 1], [1, 2]]
    assert [layer.distinct(rows) for rows in (1, 2, 3)] == [2, 3, 4]
    many = RoutedAlike(real, choices.repeat(100, 1))
    given = torch.zeros(300, 2, dtype=torch.int64)
    given[299] = -1
    many(torch.zeros(300, 4), torch.ones(300, 2), given)
    assert taken[1][298].tolist() == [1, 2]
    assert taken[1][299].tolist() == [-1, -1], "padding takes experts"
    assert random_prompts(2, 5, 3000) == random_prompts(2, 5, 3000)
    assert min(min(prompt) for prompt in random_prompts(4, 50, 3000)) >= 1000


def test_every_random_id_has_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 3000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 3000
    assert tokenizer.decode([256, 2999]) == "w256.w2999."
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_a_shape_is_cut_in_a_folder_of_its_own_and_the_demo_model_not_at_all() -> None:
    folder = cut_folder("qwen3-30b-a3b", "fp8", 3)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    with pytest.raises(ValueError, match="cannot be cut"):
        cut_folder("demo", "bf16", 3)
