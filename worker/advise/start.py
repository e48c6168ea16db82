"""What a worker logs when it starts about the model and the machine: never a reason not to start."""

from __future__ import annotations

from dataclasses import dataclass

from worker.advise.named import find_geometry
from worker.advise.plan import RUNTIME_BYTES, Machine, Workload, make_plan
from worker.advise.words import advice_sentences, cost_sentences
from worker.config import WorkerConfig
from worker.errors import HeadroomError

ASSUMED_LINK_BYTES_PER_S = 25e9
ASSUMED_MEMORY_BYTES_PER_S = 900e9


@dataclass(frozen=True, slots=True)
class StartRates:
    """Rates of this machine in bytes per second, measured at start: how missing experts come, and how fast the device
    reads and writes its memory."""

    link_bytes_per_s: float
    memory_bytes_per_s: float


def start_lines(
    config: WorkerConfig, device_bytes: int, host_bytes: int, rates: StartRates | None = None
) -> list[str]:
    """What the configured model costs and what fits at full batch and half its context, one sentence per line.

    ``device_bytes``, ``host_bytes``: memory of the device, and of the host that can be pinned; of the device's, no more
    is planned with than an ``arena_bytes`` that is set leaves room for. Without ``rates`` nothing is said about speed.
    A configuration that the advisor cannot read is said in one line.
    """
    try:
        geometry = find_geometry(config.model)
        context = min(length for length in (config.max_model_len, geometry.max_model_len, 2**20) if length)
        kv_dtype = "fp8_e4m3" if config.kv_dtype == "fp8_e4m3" else "bf16"
        workload = Workload(config.max_running, max(1, context // 2), kv_dtype)
        found = rates or StartRates(ASSUMED_LINK_BYTES_PER_S, ASSUMED_MEMORY_BYTES_PER_S)
        if config.arena_bytes:
            held = geometry.dense_held_bytes(geometry.checkpoint_format)
            if config.experts == "resident":  # beside the arena
                held += geometry.all_experts_bytes(geometry.checkpoint_format)
            device_bytes = min(device_bytes, config.arena_bytes + held + RUNTIME_BYTES)
        machine = Machine(device_bytes, found.link_bytes_per_s, host_bytes, found.memory_bytes_per_s)
        plan = make_plan(geometry, geometry.checkpoint_format, machine, workload)
    except HeadroomError as error:
        return [f"No advice: {error}"]
    lines = [*cost_sentences(plan), *advice_sentences(plan, about_speed=rates is not None)]
    if rates is not None:
        lines.insert(
            0,
            f"Measured: missing experts come at {rates.link_bytes_per_s / 1e9:.1f} GB/s, device memory is read and "
            f"written at {rates.memory_bytes_per_s / 1e9:.0f} GB/s.",
        )
    return lines
