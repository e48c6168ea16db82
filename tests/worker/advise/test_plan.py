"""What fits where, said in figures and in words."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import tiny_folder
from worker.advise.__main__ import main
from worker.advise.formats import find_format
from worker.advise.named import find_geometry
from worker.advise.plan import Machine, Plan, Workload, make_plan, prefill_link_bytes, resident_row
from worker.advise.sizing import sizing_page
from worker.advise.start import StartRates, start_lines
from worker.advise.words import (
    advice_sentences,
    cost_sentences,
    counted,
    implied_sentences,
    report,
    sized,
    table,
)
from worker.byte_sizes import parse_bytes
from worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[3]


def plan(
    model: str = "qwen3-30b-a3b", weights: str = "fp8", gpu: float = 24e9, host: float = 64e9, **work: Any
) -> Plan:
    machine = Machine(int(gpu), link_bytes_per_s=50e9, host_bytes=int(host), memory_bytes_per_s=1e12)
    return make_plan(find_geometry(model), find_format(weights), machine, Workload(**work))


def advice(found: Plan) -> str:
    return " ".join(advice_sentences(found))


def test_places_requests_and_dense_weights_share_the_gpu() -> None:
    found = plan(concurrency=4, context=8192)
    place = found.geometry.place_bytes(found.weights)
    used = found.machine.runtime_bytes + found.dense_bytes + found.requests_bytes + found.places * place
    assert used <= 24e9 < used + place
    assert found.requests_bytes == 4 * 8192 * 98_304
    assert found.num_resident == found.places // 48
    row = next(row for row in found.rows if row.num_resident == found.num_resident)
    assert row.fits
    assert not resident_row(found, found.num_resident + 1).fits


def test_more_resident_experts_leave_less_context_and_miss_less() -> None:
    rows = plan(concurrency=4, context=8192).rows
    assert [row.num_resident for row in rows] == sorted({row.num_resident for row in rows})
    for less, more in pairwise(rows):
        assert more.context_tokens <= less.context_tokens
        assert more.miss_rate < less.miss_rate
        assert more.in_layer_s < less.in_layer_s
        assert more.foresight_s <= more.in_layer_s
    assert rows[-1].in_layer_s == rows[-1].foresight_s == plan(concurrency=4, context=8192).resident_s


def test_a_measured_link_is_slower_for_few_experts() -> None:
    """4.72 MB alone at 20 GB/s, many together at 50: the limit of a step with few misses falls by that."""
    found = plan(concurrency=1, context=8192)
    expert = found.geometry.expert_bytes(found.weights)
    points = ((expert, expert / 20e9), (64 * expert, 64 * expert / 50e9))
    slow = replace(found, machine=replace(found.machine, gather=points))
    assert slow.machine.link_curve(expert).seconds(1) == pytest.approx(expert / 20e9)
    assert found.machine.link_curve(expert).seconds(1) == pytest.approx(expert / 50e9)
    # One expert missed in each layer (K = 112 of 128, 8 a token).
    fast_row, slow_row = resident_row(found, 112), resident_row(slow, 112)
    hit_s = 7 * expert / 1e12
    assert fast_row.in_layer_s == pytest.approx(found.resident_s + 48 * (expert / 50e9 - hit_s))
    assert slow_row.in_layer_s == pytest.approx(found.resident_s + 48 * (expert / 20e9 - hit_s))


def test_the_context_that_fits_is_the_last_that_does() -> None:
    found = plan(concurrency=4, context=8192)
    row = resident_row(found, 64)
    each = (found.arena_bytes - row.places_bytes) // 4
    assert found.geometry.request_bytes(row.context_tokens) <= each
    assert found.geometry.request_bytes(row.context_tokens + 1) > each


def test_a_prefill_chunk_moves_nearly_every_expert() -> None:
    # With 40 of 128 experts resident a chunk of 100 FP8 tokens moves 20 GB, 0.4 s.
    for gpu in range(14, 22):
        found = plan(gpu=gpu * 1e9, concurrency=1, context=1024)
        if found.num_resident and found.num_resident >= 40:
            break
    moved = prefill_link_bytes(found, 100) * (1 - 40 / 128) / (1 - found.num_resident / 128)
    assert moved == pytest.approx(20e9, rel=0.01)
    assert moved / 50e9 == pytest.approx(0.4, rel=0.01)


def test_advice_for_a_model_that_fits() -> None:
    text = advice(plan(gpu=80e9))
    assert "experts=resident" in text
    assert "bound by device memory" in text


def test_a_context_beyond_the_models_is_said_first() -> None:
    assert advice(plan(context=50_000)).startswith("The model was trained for 40,960 tokens, not 50,000.")


def test_advice_for_a_model_that_must_page() -> None:
    found = plan(concurrency=4, context=8192)
    text = advice(found)
    assert f"on average {found.num_resident} of 128 experts" in text
    assert "The host store needs 29 GB" in text
    assert "bound by the link" in text
    assert "kv_dtype=fp8_e4m3 would free 1.56 GB" in text
    assert "int4 g32 would fit whole" in text


@pytest.mark.parametrize(("resident", "binds"), [(24, True), (40, False)])
def test_advice_says_whether_the_old_rule_binds(resident: int, binds: bool) -> None:
    for gpu in range(80, 160):
        found = plan(gpu=gpu * 1e8, concurrency=4, context=1024)
        if found.num_resident == resident:
            break
    assert found.num_resident == resident
    text = advice(found)
    assert "batch 4 x 8 experts per token = 32" in text
    assert ("would bind" in text) is binds
    assert ("would not bind" in text) is not binds


def test_advice_for_too_small_a_gpu_or_host() -> None:
    assert "weights besides routed experts alone need 19.1 GB" in advice(plan("deepseek-v3", gpu=16e9))
    crowded = plan(gpu=8e9, concurrency=64, context=8192)
    assert f"{crowded.largest_concurrency} such requests would fit" in advice(crowded)
    assert 0 < crowded.largest_concurrency < 64
    short = advice(plan(host=20e9))
    assert "needs 29 GB of pinned memory, but the host has 20 GB" in short


def test_advice_for_a_dense_model() -> None:
    found = plan("qwen3.5-4b", "bf16", concurrency=2, context=4096)
    assert advice(found).startswith("A dense model that fits")
    assert "Recurrent state: 51.5 MB a request" in " ".join(cost_sentences(found))


def test_costs_are_said_in_bytes_and_tokens() -> None:
    text = " ".join(cost_sentences(plan(weights="int4")))
    assert "98,304 B a token in bf16, 50,688 B in FP8" in text
    assert "117 MB, as much as 1,188 tokens of bf16 KV or 2,304 of FP8 KV" in text
    assert "moves 934 MB" in text


def test_a_measured_speed_implies_a_miss_rate() -> None:
    (sentence,) = implied_sentences(plan(), 87.7, 40)
    for part in ("159 GB/s", "at most 31% missed", "69% of uniform", "K = 40"):
        assert part in sentence


def test_sizes_and_tables_are_rendered() -> None:
    assert [counted(number) for number in (30.532e9, 752e6, 11.68e6)] == ["30.53e9", "0.75e9", "11.68e6"]
    assert [sized(number) for number in (12, 1234, 934e6, 99.96e9, 128e9, 2.5e12)] == [
        "12 B", "1.23 kB", "934 MB", "100 GB", "128 GB", "2.5 TB",
    ]  # fmt: skip
    assert table(["a", "b"], [["x", "10"]]) == ["| a |  b |", "|---|---:|", "| x | 10 |"]


def test_the_sizing_page_in_the_repository_is_the_one_the_advisor_writes() -> None:
    assert (ROOT / "docs" / "sizing.md").read_text() == sizing_page()


def test_the_command_reads_a_folder_and_answers_in_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([str(tiny_folder()), "--gpu-bytes", "2GiB", "--json", "--concurrency", "3", "--context", "64"])
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_params"] == 329_640
    assert figures["machine"]["gpu_bytes"] == 2 * 2**30
    assert figures["workload"] == {"concurrency": 3, "context": 64, "kv_dtype": "bf16"}
    assert figures["fits_resident"]
    assert main(["gpt-oss-20b", "--gpu-bytes", "16GB", "--tokens-per-s", "30", "--resident", "8"]) == 0
    text = capsys.readouterr().out
    assert "as MXFP4" in text, "the checkpoint's own format"
    assert "30 tokens/s would need" in text
    assert text.startswith("gpt-oss-20b: 20.91e9 weights")


def test_the_command_says_what_it_cannot_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-model"]) == 2
    assert "none of: deepseek-v3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpu-bytes", "many"),
        ("--gpu-bytes", "1e400"),
        ("--concurrency", "0"),
        ("--link-gbps", "0"),
        ("--link-gbps", "nan"),
        ("--memory-gbps", "0"),
        ("--tokens-per-s", "-3"),
        ("--tokens-per-s", "inf"),
        ("--resident", "-1"),
    ],
)
def test_an_option_without_sense_is_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["qwen3.5-4b", option, value])
    assert ended.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24e9", 24 * 10**9),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("7", 7),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_bytes_are_read_in_every_spelling(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_measuring_fills_in_what_was_not_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import worker.probe as probe

    gather = ((4 << 20, 2e-4), (64 << 20, 2e-3))
    measured = probe.MeasuredMachine(80 * 10**9, 40e9, 2e12, 50e9, 100 * 10**9, ("Link: 40.0 GB/s.",), gather)
    monkeypatch.setattr(probe, "measure_machine", lambda: measured)
    assert main(["qwen3-30b-a3b", "--measure", "--json", "--link-gbps", "20"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert (machine["gpu_bytes"], machine["link_bytes_per_s"]) == (80 * 10**9, 20e9)
    assert (machine["host_bytes"], machine["memory_bytes_per_s"]) == (100 * 10**9, 2e12)
    assert machine["gather"] == [], "a given link is not the measured one"
    main(["qwen3-30b-a3b", "--measure", "--json"])
    assert json.loads(capsys.readouterr().out)["machine"]["gather"] == [list(point) for point in gather]
    main(["qwen3-30b-a3b", "--measure"])
    assert "- Link: 40.0 GB/s." in capsys.readouterr().out


def test_advice_needs_no_torch() -> None:
    code = "import sys; from worker.advise.__main__ import main; main(['kimi-k3']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Advice" in done.stdout
    assert report(plan())[0].startswith("qwen3-30b-a3b")


def test_a_start_gets_advice_or_a_sentence_why_not(tmp_path: Path) -> None:
    config = WorkerConfig(model=str(tiny_folder()), max_running=4)
    said = " ".join(start_lines(config, 24 * 10**9, 64 * 10**9))
    assert "experts=resident" in said
    assert "One expert of one layer: " in said
    assert "tokens/s" not in said, "nothing was measured"
    geometry = find_geometry(config.model)
    each = geometry.request_bytes(geometry.max_model_len // 2)
    said = " ".join(start_lines(replace(config, arena_bytes=10 * each), 24 * 10**9, 64 * 10**9))
    assert "room for 6 more such requests" in said, (
        "beside the four of a full batch, in the arena that is set"
    )
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    (line,) = start_lines(WorkerConfig(model=str(tmp_path)), 24 * 10**9, 64 * 10**9)
    assert line.startswith("No advice: ")
    assert "num_hidden_layers" in line


def test_a_start_with_measured_rates_says_what_they_allow() -> None:
    config = WorkerConfig(model="qwen3-30b-a3b", max_running=1)
    said = start_lines(config, 24 * 10**9, 64 * 10**9, StartRates(48e9, 3e12))
    assert said[0].startswith("Measured: missing experts come at 48.0 GB/s")
    assert any("A prefill chunk" in line for line in said)
    assert any(line.startswith("Limits at K = ") for line in said)


def test_an_engine_says_at_start_what_its_model_costs(caplog: pytest.LogCaptureFixture) -> None:
    from worker.engines.native import NativeEngine

    caplog.set_level("INFO")
    config = WorkerConfig(
        model=str(tiny_folder()), device="cpu", num_threads=1, max_running=4, arena_bytes=1 << 23
    )
    NativeEngine(config).close()
    said = [record.getMessage() for record in caplog.records if record.name == "worker.engines.advice"]
    assert any(line.startswith("advice: Everything fits: experts=resident") for line in said)
    assert any("A token that finds none of its experts resident moves" in line for line in said)
