"""Probing this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.experts import copy_blocks
from memory.device.host_region import pin, unpin
from worker.probe import gather_rate, measure_machine, pinnable_bytes, pinned_on_trial

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


def test_blocks_are_copied_where_they_are_wanted() -> None:
    blocks = torch.arange(3 * 256).to(torch.uint8).view(3, 256)
    kept = torch.zeros(2, 256, dtype=torch.uint8)
    table = blocks.data_ptr() + 256 * torch.arange(3)
    targets = torch.tensor([kept[1].data_ptr(), 0, kept[0].data_ptr()])
    copy_blocks(table, targets, 256)
    assert torch.equal(kept, blocks[[2, 0]])


def test_the_rate_of_a_gather_counts_every_block() -> None:
    blocks = torch.ones(32, 1 << 18, dtype=torch.uint8)
    addresses = blocks.data_ptr() + (1 << 18) * torch.arange(32)
    assert 1e8 < gather_rate(addresses, 1 << 18) < 1e12


@pytest.mark.parametrize(("limit", "low"), [(10**12, 2**32), (3 * 10**9, 2.5e9), (10**8, 8e7), (0, 0)])
def test_the_limit_of_pinning_is_found_by_trial(limit: int, low: float) -> None:
    asked = []

    def pinned(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return num_bytes <= limit

    found, _ = pinned_on_trial(2**32, pinned)
    assert low <= found <= limit
    assert len(asked) < 20
    if limit > 2**32:
        assert (found, asked) == (2**32, [2**32])


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    measured = measure_machine()
    assert measured.gpu_bytes == torch.cuda.mem_get_info()[1]
    assert 1e9 < measured.link_bytes_per_s < measured.memory_bytes_per_s < 2e13
    rates = [num_bytes / seconds for num_bytes, seconds in measured.gather]
    assert len(rates) == 7
    assert 0.5 * measured.link_bytes_per_s < rates[-1] < 1.2 * measured.link_bytes_per_s
    said = " ".join(measured.lines)
    assert "pinned on trial" in said or "found by trial" in said
    assert "GB/s 1 block of 4 MiB, " in said


@pytest.mark.gpu
def test_a_refused_pin_leaves_no_error_behind() -> None:
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    assert pin(data) is None
    assert "refused to pin" in str(pin(data)), "registered already"
    torch.ones(8, device="cuda").sum().item()
    unpin(data)
    assert pin(data) is None
    unpin(data)
