"""The advice that a worker logs when it starts: never a reason not to start."""

from __future__ import annotations

from worker.advise.named import find_geometry
from worker.advise.plan import Machine, Workload, make_plan
from worker.advise.words import advice_sentences
from worker.config import WorkerConfig
from worker.errors import HeadroomError

ASSUMED_LINK_BYTES_PER_S = 25e9
ASSUMED_MEMORY_BYTES_PER_S = 900e9


def start_lines(
    config: WorkerConfig,
    gpu_bytes: int,
    host_bytes: int,
    link_bytes_per_s: float = ASSUMED_LINK_BYTES_PER_S,
    memory_bytes_per_s: float = ASSUMED_MEMORY_BYTES_PER_S,
) -> list[str]:
    """Advice for the configured model at full batch and half its context, one sentence per line.

    Rates that were not measured are assumed; a configuration that the advisor cannot read is said in one line.
    """
    try:
        geometry = find_geometry(config.model)
        context = min(length for length in (config.max_model_len, geometry.max_model_len, 2**20) if length)
        kv_dtype = "fp8_e4m3" if config.kv_dtype == "fp8_e4m3" else "bf16"
        workload = Workload(config.max_running, max(1, context // 2), kv_dtype)
        machine = Machine(gpu_bytes, link_bytes_per_s, host_bytes, memory_bytes_per_s)
        return advice_sentences(make_plan(geometry, geometry.checkpoint_format, machine, workload))
    except HeadroomError as error:
        return [f"No advice: {error}"]
