"""Compiled kernels are built once, and their absence is only slow."""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels._native import library
from kernels._native import ops as native
from kernels.attention import DecodePages, paged_decode
from kernels.linear import Linear
from kernels.pointwise import rms_norm


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and a process that has not loaded the kernels yet."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    library.library.cache_clear()
    yield tmp_path
    library.library.cache_clear()


def test_without_a_compiler_the_twins_serve(
    forgotten: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert not native.serves(torch.zeros(1))
        x = torch.randn(3, 8)
        expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(rms_norm(x, None, 1e-6), expected)
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.text


def test_a_broken_compiler_is_named(
    forgotten: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: shutil.os.path.realpath("/bin/false"))
    assert library.library() is None
    assert "failed" in caplog.text
    assert list((forgotten / ".cache" / "headroom").iterdir()) == []


def test_the_second_start_compiles_nothing(forgotten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.library() is not None
    built = list((forgotten / ".cache" / "headroom").iterdir())
    assert [path.suffix for path in built] == [".so"]
    library.library.cache_clear()
    monkeypatch.setattr(library.subprocess, "run", None)
    assert library.library() is not None


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the option is x86's")
def test_processors_without_the_widest_vectors_compute_the_same(
    forgotten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O1", "-mno-avx512f"))
    weight, x = torch.randn(70, 33), torch.randn(21, 33)
    for count in (1, 2, 6, 21):
        torch.testing.assert_close(Linear(weight)(x[:count]), x[:count] @ weight.t(), rtol=1e-4, atol=1e-4)
    pages = torch.randn(2, 2, 32, 1, 24)
    rows = DecodePages(torch.tensor([[1, 0]]), torch.zeros(1).int(), torch.tensor([50]).int(), 50, 32, None)
    query, out = torch.randn(1, 2, 24), torch.empty(1, 2, 24)
    paged_decode(query, pages[:, 0], pages[:, 1], rows, 0.3, None, out)
    key, value = (pages[:, i].flip(0).reshape(64, 24)[:50] for i in (0, 1))
    expected = torch.softmax(query[0] @ key.t() * 0.3, -1) @ value
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-4)


def test_only_float32_on_the_cpu_is_served() -> None:
    assert native.serves(torch.zeros(1))
    assert not native.serves(torch.zeros(1, dtype=torch.bfloat16))
    assert not native.serves(torch.zeros(1, dtype=torch.float64))
    assert not native.serves(torch.zeros(1, device="meta"))
