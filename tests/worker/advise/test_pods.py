"""The memory of a pod, from the advisor's plan: what is in it, and the patch that says it."""

from __future__ import annotations

import pytest
import yaml

from worker.advise.__main__ import main
from worker.advise.formats import find_format
from worker.advise.named import find_geometry
from worker.advise.plan import Machine, Plan, Workload, make_plan
from worker.advise.pods import (
    MIB,
    OBJECT_STORE_BYTES,
    POD_HEAP_BYTES,
    RAY_KILLS_AT,
    WORKER_HEAP_BYTES,
    pod_memory,
    pod_patch,
)


def plan(gpu_bytes: float, concurrency: int = 4) -> Plan:
    machine = Machine(int(gpu_bytes), 25e9, int(64e9), 900e9)
    return make_plan(find_geometry("qwen3-30b-a3b"), find_format("fp8"), machine, Workload(concurrency, 8192))


def near(num_bytes: float) -> object:
    """So many, rounded up to whole MiB."""
    return pytest.approx(num_bytes + MIB / 2, abs=MIB / 2)


def test_resident_experts_take_no_host_memory() -> None:
    memory = pod_memory(plan(80e9))
    assert (memory.heap_bytes, memory.pinned_bytes) == (near(POD_HEAP_BYTES + WORKER_HEAP_BYTES), 0)
    assert memory.shm_bytes == OBJECT_STORE_BYTES


def test_a_worker_alone_has_its_experts_in_memory_of_its_own() -> None:
    store = plan(24e9).host_store_bytes
    assert store > 28e9
    memory = pod_memory(plan(24e9), host_tier_bytes=5_000_000_000)
    assert memory.pinned_bytes == near(store + 5e9)
    assert memory.shm_bytes == OBJECT_STORE_BYTES


def test_workers_of_a_pod_share_one_copy_in_shared_memory() -> None:
    store = plan(24e9).host_store_bytes
    memory = pod_memory(plan(24e9), num_workers=8, host_tier_bytes=1_000_000_000)
    assert memory.shm_bytes == near(OBJECT_STORE_BYTES + store)
    assert memory.pinned_bytes == near(8e9)
    assert memory.heap_bytes == near(POD_HEAP_BYTES + 8 * WORKER_HEAP_BYTES)


@pytest.mark.parametrize("num_workers", [1, 8])
def test_the_limit_holds_all_of_it_below_the_share_at_which_ray_ends_processes(num_workers: int) -> None:
    memory = pod_memory(plan(24e9), num_workers)
    need = memory.heap_bytes + memory.pinned_bytes + memory.shm_bytes
    assert memory.limit_bytes % MIB == 0
    assert 0 <= memory.limit_bytes * RAY_KILLS_AT - need < MIB


def test_the_load_decides_whether_experts_wait() -> None:
    light, heavy = pod_memory(plan(40e9, 1)), pod_memory(plan(40e9, 64))
    assert (light.pinned_bytes == 0, heavy.pinned_bytes > 0) == (True, True)


def test_the_patch_says_it_in_five_places_and_how_it_came_about() -> None:
    memory = pod_memory(plan(24e9), 2, 10**9)
    text = pod_patch(plan(24e9), 2, 10**9)
    values = {entry["path"].split("/template/")[1]: entry["value"] for entry in yaml.safe_load(text)}
    assert values == {
        "metadata/annotations/headroom~1heap": f"{memory.heap_bytes // MIB}Mi",
        "metadata/annotations/headroom~1pinned": f"{memory.pinned_bytes // MIB}Mi",
        "spec/volumes/0/emptyDir/sizeLimit": f"{memory.shm_bytes // MIB}Mi",
        "spec/containers/0/resources/requests/memory": f"{memory.limit_bytes // MIB}Mi",
        "spec/containers/0/resources/limits/memory": f"{memory.limit_bytes // MIB}Mi",
    }
    assert all(entry["op"] == "replace" for entry in yaml.safe_load(text))
    assert "2 workers of qwen3-30b-a3b (block FP8) in a pod, each with 24 GB of GPU memory" in text


def test_the_command_that_it_names_writes_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    text = pod_patch(plan(24e9, 16), 8, 10**9)
    command = text.splitlines()[1].split("`")[1].removeprefix("python -m worker.advise ")
    assert main(command.split()) == 0
    assert capsys.readouterr().out == text


def test_sizes_may_be_written() -> None:
    with pytest.raises(SystemExit):
        main(["qwen3-30b-a3b", "--k8s", "--host-tier-bytes", "many"])
