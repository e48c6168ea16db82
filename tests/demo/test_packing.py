"""Packed weights: bit for bit, restored only when needed, damage refused, whole under a race."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo import packing
from demo.packing import PACKED, WEIGHTS, PackedFileError, pack, restore, unpack

ROOT = Path(__file__).resolve().parents[2]


def weights_like(count: int) -> bytes:
    """``count`` bf16 numbers as trained weights have them: few exponents, any mantissa."""
    rng = random.Random(0)
    return b"".join(bytes((rng.randrange(256), rng.choice((0x3C, 0xBC, 0x3B)))) for _ in range(count))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds packed weights alone."""
    (tmp_path / WEIGHTS).write_bytes(weights_like(5000))
    packing.pack_folder(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    return tmp_path


@given(st.binary(max_size=200))
def test_any_bytes_come_back(data: bytes) -> None:
    assert unpack(pack(data)) == data


def test_numbers_of_two_bytes_pack_well() -> None:
    data = weights_like(20_000)
    assert len(pack(data)) < 0.65 * len(data)
    assert unpack(pack(data)) == data


def test_the_shipped_weights_are_those_of_the_packed_file() -> None:
    restore()
    header = json.loads((packing.MODEL / PACKED).open("rb").read(4096).split(b"\n")[1])
    data = (packing.MODEL / WEIGHTS).read_bytes()
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (header["sha256"], header["size"])


def test_weights_are_restored_when_missing_or_older_and_otherwise_left(folder: Path) -> None:
    weights, packed = folder / WEIGHTS, folder / PACKED
    assert restore(folder) == folder
    assert weights.read_bytes() == weights_like(5000)
    weights.write_bytes(b"trained since")
    restore(folder)
    assert weights.read_bytes() == b"trained since"
    later_ns = weights.stat().st_mtime_ns + 1
    os.utime(packed, ns=(later_ns, later_ns))
    restore(folder)
    assert weights.read_bytes() == weights_like(5000)


def test_a_folder_without_a_packed_file_is_left_alone(tmp_path: Path) -> None:
    assert restore(tmp_path) == tmp_path
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", ["magic", "header", "plane", "coding", "end", "longer", "empty"])
def test_a_damaged_file_is_refused_with_its_name_and_changes_nothing(folder: Path, at: str) -> None:
    whole = (folder / PACKED).read_bytes()
    first = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    damaged = {
        "magic": b"x" + whole[1:],
        "header": whole.replace(b'"sha256"', b'"sha257"', 1),
        "plane": whole[: first + 9] + bytes((whole[first + 9] ^ 1,)) + whole[first + 10 :],
        "coding": whole.replace(b'"xz"', b'"zz"', 1),
        "end": whole[:-40],
        "longer": whole + b"x",
        "empty": b"",
    }[at]
    (folder / PACKED).write_bytes(damaged)
    with pytest.raises(PackedFileError, match=rf"{PACKED} is damaged .*: fetch it again"):
        restore(folder)
    assert [entry.name for entry in folder.iterdir()] == [PACKED]


def test_a_write_that_breaks_off_leaves_the_old_weights_and_no_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    (folder / WEIGHTS).write_bytes(b"old")
    os.utime(folder / WEIGHTS, ns=(0, 0))
    monkeypatch.setattr(Path, "write_bytes", break_off)
    with pytest.raises(PackedFileError, match=r"cannot be written \(No space left on device\): run"):
        restore(folder)
    assert (folder / WEIGHTS).read_bytes() == b"old"
    assert sorted(entry.name for entry in folder.iterdir()) == [WEIGHTS, PACKED]


def test_nobody_sees_half_a_file_while_many_restore(folder: Path) -> None:
    expected, weights = weights_like(5000), folder / WEIGHTS
    failures: list[object] = []

    def use() -> None:
        for _ in range(20):
            try:
                restore(folder)
                if weights.read_bytes() != expected:
                    failures.append("another content")
                later_ns = weights.stat().st_mtime_ns + 1
                os.utime(folder / PACKED, ns=(later_ns, later_ns))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    restore(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == [WEIGHTS, PACKED]


def test_a_bare_python_restores_by_command(folder: Path) -> None:
    """Without a single installed package: ``-S`` hides them all."""
    command = [sys.executable, "-S", "-m", "demo.packing", "restore", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, f"{WEIGHTS} restored" in done.stderr) == (0, True), done.stderr
    assert (folder / WEIGHTS).read_bytes() == weights_like(5000)
    (folder / WEIGHTS).unlink()
    (folder / PACKED).write_bytes(b"nonsense")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_the_tracked_tree_stays_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name]
    sizes = {file.relative_to(ROOT).as_posix(): file.stat().st_size for file in files if file.is_file()}
    assert f"demo/model/{WEIGHTS}" not in sizes, "the restored weights are tracked: git rm --cached them"
    largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:5]
    assert sum(sizes.values()) < 25_000_000, f"largest: {largest}"
