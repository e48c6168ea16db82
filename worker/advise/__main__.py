"""The advisor's command line: ``python -m worker.advise MODEL``; reads the configuration file alone."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from worker.advise.formats import FORMATS, find_format
from worker.advise.geometry import KV_DTYPES
from worker.advise.named import find_geometry
from worker.advise.plan import RUNTIME_BYTES, Machine, Plan, Workload, make_plan
from worker.advise.pods import pod_patch
from worker.advise.sizing import sizing_page
from worker.advise.words import bullets, implied_sentences, report
from worker.byte_sizes import parse_bytes
from worker.errors import HeadroomError
from worker.registry import Registry

# By name and loaded on demand: measuring needs torch, advice does not.
_PROBES = Registry("probe", "measure", {"machine": "worker.probe:measure_machine"})


class MeasuredMachine(Protocol):
    """What a probe answers; 0 where this machine has no such part."""

    @property
    def gpu_bytes(self) -> int: ...
    @property
    def link_bytes_per_s(self) -> float: ...
    @property
    def memory_bytes_per_s(self) -> float: ...
    @property
    def pinnable_bytes(self) -> int: ...
    @property
    def gather(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def lines(self) -> tuple[str, ...]: ...


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    return _at_least(1, text)


def _not_negative(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
    return number


def _rate(text: str) -> float:
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker.advise", description="What a model costs and what fits here."
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help="a checkpoint's folder, a config.json, or a shipped name such as qwen3-30b-a3b",
    )
    add("--format", choices=[entry.name for entry in FORMATS], help="of the weights; else the checkpoint's")
    add("--gpu-bytes", type=_bytes, help="memory of the GPU (else measured, or 24GB)")
    add("--link-gbps", type=_rate, help="host to GPU, 1e9 bytes a second (else measured, or 25)")
    add(
        "--memory-gbps",
        type=_rate,
        help="GPU memory, read and written, 1e9 bytes a second (else measured, or 900)",
    )
    add(
        "--host-bytes",
        type=_bytes,
        help="memory of the host that can be pinned (else measured, or 64GB)",
    )
    add("--runtime-bytes", type=_bytes, default=RUNTIME_BYTES, help="of the GPU, for all else")
    add("--concurrency", type=_positive, default=4, help="requests that decode together")
    add("--context", type=_positive, default=8192, help="tokens of each request")
    add("--kv-dtype", choices=list(KV_DTYPES), default="bf16")
    add(
        "--tokens-per-s", type=_rate, help="a measured single-stream speed: says what it implies about misses"
    )
    add(
        "--resident",
        type=_not_negative,
        help="experts resident in each layer at that speed (else the plan's)",
    )
    add("--measure", action="store_true", help="measure link, pin limit, GPU and host memory of this machine")
    add("--json", action="store_true", help="figures instead of words")
    add("--k8s", action="store_true", help="the memory of a pod, as a patch for k8s/, instead of words")
    add("--pod-workers", type=_positive, default=1, help="with --k8s, workers in a pod; they share experts")
    add("--host-tier-bytes", type=_bytes, default=0, help="with --k8s, the workers' option of that name")
    add("--sizing-page", action="store_true", help="write docs/sizing.md's text and end")
    return parser


def _measure() -> MeasuredMachine:
    measured: MeasuredMachine = _PROBES.load("machine")()
    return measured


def _machine(options: argparse.Namespace, measured: MeasuredMachine | None) -> Machine:
    def chosen(given: float | None, found: float, otherwise: float) -> float:
        return given if given is not None else found or otherwise

    link = options.link_gbps * 1e9 if options.link_gbps is not None else None
    memory = options.memory_gbps * 1e9 if options.memory_gbps is not None else None
    return Machine(
        gpu_bytes=int(chosen(options.gpu_bytes, measured.gpu_bytes if measured else 0, 24e9)),
        link_bytes_per_s=chosen(link, measured.link_bytes_per_s if measured else 0, 25e9),
        host_bytes=int(chosen(options.host_bytes, measured.pinnable_bytes if measured else 0, 64e9)),
        memory_bytes_per_s=chosen(memory, measured.memory_bytes_per_s if measured else 0, 900e9),
        runtime_bytes=options.runtime_bytes,
        # What was measured here says nothing of a link that was given.
        gather=measured.gather if measured and link is None else (),
    )


def plan_figures(plan: Plan) -> dict[str, Any]:
    """The plan's figures as plain values for JSON."""
    geometry, weights = plan.geometry, plan.weights
    return {
        "model": geometry.name,
        "format": weights.name,
        "machine": asdict(plan.machine),
        "workload": asdict(plan.workload),
        "num_params": geometry.num_params,
        "num_active_params": geometry.num_active_params,
        "dense_bytes": plan.dense_bytes,
        "arena_bytes": plan.arena_bytes,
        "full_kv_bytes_per_token": geometry.full_kv_bytes(plan.workload.kv_dtype),
        "window_kv_bytes": geometry.window_kv_bytes(plan.workload.kv_dtype),
        "state_bytes": geometry.state_bytes,
        "expert_bytes": geometry.expert_bytes(weights),
        "all_miss_bytes": geometry.all_miss_bytes(weights),
        "host_store_bytes": plan.host_store_bytes,
        "requests_bytes": plan.requests_bytes,
        "places": plan.places,
        "num_resident": plan.num_resident,
        "fits_resident": plan.fits_resident,
        "distinct_per_layer": plan.distinct_per_layer,
        "resident_s": plan.resident_s,
        "rows": [asdict(row) for row in plan.rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the advice; 0, or 2 with a sentence when the model or an option cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.sizing_page:
        sys.stdout.write(sizing_page())
        return 0
    if options.model is None:
        parser.error("name a MODEL (or --sizing-page)")
    try:
        geometry = find_geometry(options.model)
        weights = find_format(options.format) if options.format else geometry.checkpoint_format
        measured = _measure() if options.measure else None
    except HeadroomError as error:
        print(error, file=sys.stderr)
        return 2
    workload = Workload(options.concurrency, options.context, options.kv_dtype)
    plan = make_plan(geometry, weights, _machine(options, measured), workload)
    if options.json:
        print(json.dumps(plan_figures(plan), indent=1))
        return 0
    if options.k8s:
        sys.stdout.write(pod_patch(plan, options.pod_workers, options.host_tier_bytes))
        return 0
    lines = ["Measured here", *bullets(measured.lines), ""] if measured else []
    lines += report(plan)
    if options.tokens_per_s and geometry.num_experts:
        resident = options.resident if options.resident is not None else plan.num_resident or 0
        lines += bullets(implied_sentences(plan, options.tokens_per_s, resident))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
