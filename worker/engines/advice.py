"""Measures the device that an engine is about to use, and logs what the model costs and what fits there."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from worker.advise.start import StartRates, start_lines
from worker.config import CPU_ARENA_BYTES, WorkerConfig
from worker.execution.loading import choose_device
from worker.probe import gather_curve, gpu_copy_rates, pinnable_bytes

log = logging.getLogger(__name__)


def log_advice(config: WorkerConfig) -> None:
    """A line per sentence, before the model is loaded. On a CPU the device's memory is the arena, and no rate is
    measured. ConfigError where ``config.device`` is not there."""
    device = choose_device(config.device)
    host_bytes, _ = pinnable_bytes()
    if device.type == "cuda":
        device_bytes, rates = torch.cuda.mem_get_info(device)[1], _measured(device)
    else:
        device_bytes, rates = host_bytes, None
        config = replace(config, arena_bytes=config.arena_bytes or CPU_ARENA_BYTES)
    for line in start_lines(config, device_bytes, host_bytes, rates):
        log.info("advice: %s", line)


def _measured(device: torch.device) -> StartRates | None:
    """None where another process has taken the memory that measuring needs."""
    try:
        with torch.cuda.device(device):
            _, memory = gpu_copy_rates()
            curve = gather_curve()
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        return None
    if not curve:
        return None
    num_bytes, seconds = curve[-1]
    return StartRates(num_bytes / seconds, memory)
