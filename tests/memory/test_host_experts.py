"""The host store: exact size, alignment, hashes, and one filling for all replicas of a host."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.experts import copy_blocks
from kernels.hashing import hash_blocks
from memory.device import host_experts
from memory.device.host_experts import HostExperts, LayerBlocks
from memory.device.host_region import SHARED_FOLDER, HostRegion, populate, remove_shared
from tests.helpers.eventually import eventually

BLOCKS = {1: LayerBlocks(4, 384), 5: LayerBlocks(2, 128)}


@pytest.fixture
def name() -> Iterator[str]:
    found = f"test-{uuid.uuid4().hex}"
    yield found
    remove_shared(found)


def fill(host: HostExperts, value: int) -> None:
    for layer, entry in BLOCKS.items():
        for expert in range(entry.num_experts):
            host.block(layer, expert).fill_(value + expert)
            host.seal(layer, expert)


def test_blocks_lie_one_behind_the_other_without_a_byte_between() -> None:
    host = HostExperts(BLOCKS)
    assert host.layers == (1, 5)
    assert host.num_bytes == 4 * 384 + 2 * 128
    assert host.place_bytes == 384
    addresses = host.addresses()
    assert addresses.shape == (2, 4)
    assert addresses[1, 2:].tolist() == [0, 0]
    assert (addresses % 128 == 0).all()
    assert addresses[1, 0] - addresses[0, 0] == 4 * 384
    fill(host, 7)
    for layer, expert in ((1, 3), (5, 1)):
        assert int(addresses[host.row(layer), expert]) == host.block(layer, expert).data_ptr()
        assert int(host.hashes[host.row(layer), expert]) == int(hash_blocks(host.block(layer, expert)))
        assert host.block(layer, expert).unique().tolist() == [7 + expert]


def test_a_layer_is_taken_at_once_with_its_hashes() -> None:
    host, other = HostExperts(BLOCKS), HostExperts(BLOCKS)
    fill(other, 3)
    for layer, entry in BLOCKS.items():
        blocks = [other.block(layer, expert) for expert in range(entry.num_experts)]
        host.fill(layer, torch.stack(blocks))
        assert all(torch.equal(host.block(layer, expert), block) for expert, block in enumerate(blocks))
    assert torch.equal(host.hashes, other.hashes)
    again = host.hashes.clone()
    for layer in BLOCKS:
        host.hashes[host.row(layer)] = 0
        host.seal_layer(layer, torch.device("cpu"))
    assert torch.equal(host.hashes, again)


def test_laying_pages_out_leaves_what_is_there() -> None:
    data = HostRegion(3 << 20).data
    data[5::4099] = 9
    populate(data)
    assert int((data != 0).sum()) == len(data[5::4099])


def test_blocks_must_be_whole_lines() -> None:
    with pytest.raises(ValueError, match="128"):
        HostExperts({0: LayerBlocks(1, 100)})
    with pytest.raises(ValueError, match="at least one layer"):
        HostExperts({})


def test_the_second_replica_finds_the_first_ones_blocks(name: str) -> None:
    first = HostExperts(BLOCKS, name)
    assert not first.is_filled
    fill(first, 40)
    first.complete()
    second = HostExperts(BLOCKS, name)
    assert second.is_filled
    assert second.block(1, 2).unique().tolist() == [42]
    assert torch.equal(second.hashes, first.hashes)
    first.close()
    del first
    third = HostExperts(BLOCKS, name)
    assert third.is_filled, "the region did not survive its first replica"
    assert third.block(5, 1).unique().tolist() == [41]


def test_a_filling_that_was_broken_off_is_begun_anew(name: str) -> None:
    broken = HostExperts(BLOCKS, name)
    fill(broken, 1)
    broken.close()  # dies before complete()
    again = HostExperts(BLOCKS, name)
    assert not again.is_filled
    again.complete()


def test_another_layout_under_the_name_is_not_taken_for_ours(name: str) -> None:
    first = HostExperts(BLOCKS, name)
    fill(first, 3)
    first.complete()
    path = SHARED_FOLDER / f"headroom-{name}"
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        other = HostExperts({1: LayerBlocks(2, 384)}, name)
        assert not other.is_filled
        other.complete()
        assert os.fstat(file.fileno()).st_size == size, "cut short under a worker that reads it"
    assert first.block(1, 3).unique().tolist() == [6]
    assert HostExperts({1: LayerBlocks(2, 384)}, name).is_filled


def test_a_store_that_was_removed_while_it_was_waited_for_is_made_anew(name: str) -> None:
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.SimpleQueue[list[int]] = context.SimpleQueue()
    first = HostExperts(BLOCKS, name)
    other = context.Process(target=_wait_for, args=(name, answer))
    other.start()
    _until_it_waits(other, name)
    fill(first, 9)
    remove_shared(name)
    first.complete()
    other.join(60)
    assert answer.get() == [0, 0], "it filled a file that nobody else can find"
    assert (SHARED_FOLDER / f"headroom-{name}").exists()


def _until_it_waits(other: multiprocessing.process.BaseProcess, name: str) -> None:
    """Returns once a process has the store open that another one fills, and has had time to do more than it may."""

    def num_open(process: int | str) -> int:
        links = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir() if entry.exists()]
        return sum(f"headroom-{name}" in link for link in links)

    # A child has what this process has open.
    eventually(lambda: num_open(other.pid or 0) > num_open("self"))
    time.sleep(0.05)


def _wait_for(name: str, answer: multiprocessing.SimpleQueue[list[int]]) -> None:
    host = HostExperts(BLOCKS, name)
    answer.put([int(host.is_filled), int(host.block(1, 0)[0])])


def test_a_replica_that_starts_meanwhile_waits(name: str) -> None:
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.SimpleQueue[list[int]] = context.SimpleQueue()
    first = HostExperts(BLOCKS, name)
    other = context.Process(target=_wait_for, args=(name, answer))
    other.start()
    _until_it_waits(other, name)
    assert answer.empty(), "the other did not wait for the store to be filled"
    fill(first, 9)
    first.complete()
    other.join(60)
    assert answer.get() == [1, 9]


def test_a_shared_folder_that_is_too_small_is_named_before_anything_is_written(name: str) -> None:
    room = os.statvfs(SHARED_FOLDER)
    large = room.f_blocks * room.f_frsize // 128 * 128 + 128
    with pytest.raises(OSError, match="host_store=private"):
        HostExperts({0: LayerBlocks(1, large)}, name)
    fill(HostExperts(BLOCKS, name), 2)  # the lock was let go


def test_removing_ends_the_file(name: str) -> None:
    HostExperts(BLOCKS, name).complete()
    assert (SHARED_FOLDER / f"headroom-{name}").stat().st_mode & 0o077 == 0
    assert remove_shared(name)
    assert not remove_shared(name)


def test_what_somebody_else_put_under_the_name_is_not_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(HostExperts(BLOCKS, name), 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError, match="host_store=private"):
            HostExperts(BLOCKS, name)
    remove_shared(name)
    target = SHARED_FOLDER / f"{name}-target"
    target.write_bytes(b"precious")
    try:
        (SHARED_FOLDER / f"headroom-{name}").symlink_to(target)
        with pytest.raises(OSError, match="symbolic link"):
            HostExperts(BLOCKS, name)
        assert target.read_bytes() == b"precious"
    finally:
        target.unlink()


def test_a_store_is_unpinned_before_its_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []

    def pin(data: torch.Tensor) -> None:
        told.append(("pin", data.data_ptr()))

    def unpin(data: torch.Tensor) -> None:
        assert int(data[0]) == 7, "still mapped"
        told.append(("unpin", data.data_ptr()))

    monkeypatch.setattr(host_experts, "pin", pin)
    monkeypatch.setattr(host_experts, "unpin", unpin)
    store = HostExperts({0: LayerBlocks(2, 256)})
    store.block(0, 0).fill_(7)
    address = store.block(0, 0).data_ptr()
    assert store.pin() is None
    del store
    gc.collect()
    assert told == [("pin", address), ("unpin", address)]


@pytest.mark.gpu
def test_stores_can_be_pinned_one_after_another() -> None:
    for number in range(8):
        store = HostExperts({0: LayerBlocks(4, 1 << 20)})
        store.block(0, 1).fill_(number)
        assert store.pin() is None
        kept = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        targets = torch.tensor([0, kept.data_ptr(), 0, 0], device="cuda")
        copy_blocks(store.addresses()[0].to("cuda"), targets, 1 << 20)
        assert bool((kept == number).all())
