"""Probing this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker.probe import measure_machine, pinnable_bytes

MEMINFO = "MemTotal:       32000000 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "version").write_text("Linux version 6.1")
    return tmp_path


def test_the_tightest_limit_of_pinning_is_named(proc: Path, tmp_path: Path) -> None:
    group = tmp_path / "group"
    assert pinnable_bytes(proc, group) == (20_000_000 * 1024, "limited by available memory")
    (proc / "version").write_text("Linux version 5.15 microsoft-standard-WSL2")
    assert pinnable_bytes(proc, group) == (16_000_000 * 1024, "limited by half of the memory, under WSL2")
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    assert pinnable_bytes(proc, group)[0] == 16_000_000 * 1024
    (group / "memory.max").write_text("1000000\n")
    assert pinnable_bytes(proc, group) == (1_000_000, "limited by the control group's memory.max")


def test_this_machine_is_measured() -> None:
    measured = measure_machine()
    assert 1e8 < measured.host_memory_bytes_per_s < 1e13
    assert measured.pinnable_bytes > 0
    assert any("read and written" in line for line in measured.lines)
    if not torch.cuda.is_available():
        assert (measured.gpu_bytes, measured.link_bytes_per_s, measured.memory_bytes_per_s) == (0, 0.0, 0.0)
        assert measured.lines[-1] == "No GPU that torch can use."


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    measured = measure_machine()
    assert measured.gpu_bytes == torch.cuda.mem_get_info()[1]
    assert 1e9 < measured.link_bytes_per_s < measured.memory_bytes_per_s < 2e13
