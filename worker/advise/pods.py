"""Works out the memory of a Kubernetes pod that holds workers, and says it as a patch of k8s/base's RayService."""

from __future__ import annotations

from dataclasses import dataclass

from worker.advise.plan import Plan
from worker.advise.words import sized

WORKER_HEAP_BYTES = 8_000_000_000
"""Of a worker besides pinned memory: Python, torch, the driver's context, buffers of loading. An assumption, as are the
next two: look at what the pod's containers really use, and correct it."""
POD_HEAP_BYTES = 3_000_000_000
"""Of a pod besides its workers: Ray's own processes, a proxy, a Router."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Ray's object store, in /dev/shm. Tokens travel in messages; next to nothing passes through it."""
RAY_KILLS_AT = 0.95
"""Ray ends processes of a pod that uses this share of its limit (``RAY_memory_usage_threshold``)."""
MIB = 2**20

_POD = "/spec/rayClusterConfig/workerGroupSpecs/0/template"


@dataclass(frozen=True, slots=True)
class PodMemory:
    """Bytes of a pod. ``pinned_bytes``: page-locked and private to its workers; ``shm_bytes``: its /dev/shm, which
    counts against the limit as it fills. ``limit_bytes`` is request and limit: pinned pages can be neither swapped nor
    given back."""

    heap_bytes: int
    pinned_bytes: int
    shm_bytes: int

    @property
    def limit_bytes(self) -> int:
        """The least limit under which Ray lets all of it stay."""
        return _whole_mib((self.heap_bytes + self.pinned_bytes + self.shm_bytes) / RAY_KILLS_AT)


def pod_memory(plan: Plan, num_workers: int = 1, host_tier_bytes: int = 0) -> PodMemory:
    """The memory of a pod with ``num_workers`` of the plan's workers, each with a host tier of so many bytes.

    Experts that do not all fit the device beside the workload wait in host memory: of one worker in its own
    (``host_store=private``), of several in one copy in /dev/shm (``host_store=shared``).
    """
    store = 0 if plan.fits_resident else plan.host_store_bytes
    shared = store if num_workers > 1 else 0
    return PodMemory(
        heap_bytes=_whole_mib(POD_HEAP_BYTES + num_workers * WORKER_HEAP_BYTES),
        pinned_bytes=_whole_mib(num_workers * host_tier_bytes + store - shared),
        shm_bytes=_whole_mib(OBJECT_STORE_BYTES + shared),
    )


def pod_patch(plan: Plan, num_workers: int = 1, host_tier_bytes: int = 0) -> str:
    """A JSON patch, as YAML, that gives the first worker group of k8s/base's RayService this memory."""
    memory = pod_memory(plan, num_workers, host_tier_bytes)
    container = f"{_POD}/spec/containers/0/resources"
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''} of {plan.geometry.name}"
    entries = [
        (f"{_POD}/metadata/annotations/headroom~1heap", memory.heap_bytes),
        (f"{_POD}/metadata/annotations/headroom~1pinned", memory.pinned_bytes),
        (f"{_POD}/spec/volumes/0/emptyDir/sizeLimit", memory.shm_bytes),
        (f"{container}/requests/memory", memory.limit_bytes),
        (f"{container}/limits/memory", memory.limit_bytes),
    ]
    lines = [
        f"# {workers} ({plan.weights.title}) in a pod, each with {sized(plan.machine.gpu_bytes)} of GPU memory.",
        f"# Written by `{_command(plan, num_workers, host_tier_bytes)}`.",
        *(f"- {{op: replace, path: {path}, value: {value // MIB}Mi}}" for path, value in entries),
    ]
    return "\n".join(lines) + "\n"


def _command(plan: Plan, num_workers: int, host_tier_bytes: int) -> str:
    work = plan.workload
    options = [
        f"--format {plan.weights.name} --gpu-bytes {plan.machine.gpu_bytes}",
        f"--concurrency {work.concurrency} --context {work.context} --kv-dtype {work.kv_dtype} --k8s",
        *([f"--pod-workers {num_workers}"] if num_workers > 1 else []),
        *([f"--host-tier-bytes {host_tier_bytes}"] if host_tier_bytes else []),
    ]
    return " ".join(["python -m worker.advise", plan.geometry.name, *options])


def _whole_mib(num_bytes: float) -> int:
    return -int(-num_bytes // MIB) * MIB
