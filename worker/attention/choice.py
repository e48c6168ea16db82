"""Chooses the attention backend of a worker: what was asked for, or what suits device, model and mode."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape
from worker.config import WorkerConfig
from worker.errors import ConfigError

log = logging.getLogger(__name__)


def _preferred(device: torch.device, deterministic: bool) -> tuple[str, ...]:
    """Names in order of preference; with ``deterministic`` those that compute every query alike in any company."""
    if device.type == "cuda":
        return ("triton",) if deterministic else ("flash", "triton", "torch")
    return ("rowwise",) if deterministic else ("torch",)


def unusable_reasons(
    backend: AttentionBackend, shapes: Sequence[AttentionShape], device: torch.device
) -> list[str]:
    """Why ``backend`` cannot serve some of the ``shapes``, each reason once; empty where it serves all."""
    reasons = [reason for shape in shapes if (reason := backend.unusable_reason(shape, device)) is not None]
    return list(dict.fromkeys(reasons))


def choose_backend(
    config: WorkerConfig, shapes: Sequence[AttentionShape], device: torch.device
) -> AttentionBackend:
    """The backend, checked against every shape; ConfigError with a sentence where it cannot serve one."""
    preferred = _preferred(device, config.deterministic)
    asked = config.attention_backend
    if asked != "auto":
        BACKENDS.load(asked)  # a name that nobody knows is told first
        if config.deterministic and asked not in preferred:
            raise ConfigError(
                [f"deterministic=true on {device} needs attention_backend={preferred[0]!r}, not {asked!r}"]
            )
    refused: list[str] = []
    for name in preferred if asked == "auto" else (asked,):
        backend: AttentionBackend = BACKENDS.load(name)()
        reasons = unusable_reasons(backend, shapes, device)
        if not reasons:
            log.info("attention_backend=%s%s", name, "".join(f"; {sentence}" for sentence in refused))
            return backend
        refused.extend(f"{name} is not usable: {reason}" for reason in reasons)
    raise ConfigError([f"attention_backend={asked!r}: {sentence}" for sentence in refused])
