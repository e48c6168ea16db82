"""Faults of what says how much memory a pod gets; those of manifests stand in tests/k8s/test_planted.py."""

from __future__ import annotations

from tests.faults import Fault

PODS = "tests/worker/advise/test_pods.py"

FAULTS = [
    Fault(
        "pods: shared experts counted once a worker",
        "worker.advise.pods",
        old="num_workers * host_tier_bytes + store - shared",
        new="num_workers * (host_tier_bytes + store) - shared",
        tests=(f"{PODS}::test_workers_of_a_pod_share_one_copy_in_shared_memory",),
    ),
    Fault(
        "pods: /dev/shm left out of the limit",
        "worker.advise.pods",
        old="(self.heap_bytes + self.pinned_bytes + self.shm_bytes) / RAY_KILLS_AT",
        new="(self.heap_bytes + self.pinned_bytes) / RAY_KILLS_AT",
        tests=(f"{PODS}::test_the_limit_holds_all_of_it_below_the_share_at_which_ray_ends_processes",),
    ),
    Fault(
        "pods: a limit at which Ray ends the worker",
        "worker.advise.pods",
        old="/ RAY_KILLS_AT)",
        new=")",
        tests=(f"{PODS}::test_the_limit_holds_all_of_it_below_the_share_at_which_ray_ends_processes",),
    ),
    Fault(
        "pods: experts that do not fit take no host memory",
        "worker.advise.pods",
        old="store = 0 if plan.fits_resident else plan.host_store_bytes",
        new="store = 0 if plan.host_fits else plan.host_store_bytes",
        tests=(f"{PODS}::test_a_worker_alone_has_its_experts_in_memory_of_its_own",),
    ),
]
