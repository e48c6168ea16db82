"""Chooses the attention backend of a worker: what was asked for, or what suits device and mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape
from worker.config import WorkerConfig
from worker.errors import ConfigError


def choose_backend(
    config: WorkerConfig, shapes: Sequence[AttentionShape], device: torch.device
) -> AttentionBackend:
    """The backend, checked against every shape; ConfigError with a sentence where it cannot serve one."""
    if config.deterministic and device.type != "cpu":
        raise ConfigError([f"deterministic=true is kept on device=cpu alone so far, not on {device}"])
    name = config.attention_backend
    if name == "auto":
        name = "rowwise" if config.deterministic else "torch"
    backend: AttentionBackend = BACKENDS.load(name)()
    reasons = [r for shape in shapes if (r := backend.unusable_reason(shape, device)) is not None]
    if reasons:
        raise ConfigError([f"attention_backend={name!r}: {reason}" for reason in dict.fromkeys(reasons)])
    if config.deterministic and name != "rowwise":
        raise ConfigError([f"deterministic=true on a CPU needs attention_backend='rowwise', not {name!r}"])
    return backend
