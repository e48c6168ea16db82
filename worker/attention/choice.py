"""Chooses the attention backends of a worker: what was asked for, or what suits device, model and mode.

Steps with chunks have one backend. On a GPU several may serve decode steps, and which is faster depends on the card,
the heads and the step's size: where none was asked for, they are timed at start. With ``deterministic`` nothing is
timed, for bits must not hang on a clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from worker.attention import BACKENDS
from worker.attention.base import AttentionBackend, AttentionShape
from worker.attention.decode_choice import DecodeTimes, choose_decode
from worker.attention.decode_times import DecodeGroup, measure_decode
from worker.attention.sized import SizedAttention
from worker.config import WorkerConfig
from worker.errors import ConfigError

log = logging.getLogger(__name__)

_OF_DECODE_STEPS = ("flash", "triton", "triton_few")
"""Names that may serve decode steps, where another serves those with chunks."""
Measure = Callable[
    [torch.device, DecodeGroup, tuple[str, ...], tuple[tuple[int, int], ...]], tuple[DecodeTimes, ...]
]


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


def choose_decode_backend(
    config: WorkerConfig,
    base: AttentionBackend,
    groups: Mapping[str, DecodeGroup],
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
    measure: Measure = measure_decode,
) -> AttentionBackend:
    """What serves decode steps, ``base`` serving all others: of those that can, the fastest at each of ``sizes``
    (rows, bound), by groups' names; ``base`` where another choice was made than ``auto``, or there is no other."""
    if config.attention_backend != "auto" or config.deterministic or not base.capturable or not groups:
        return base
    shapes = [group.shape for group in groups.values()]
    found: dict[str, AttentionBackend] = {base.name: base}
    for name in _OF_DECODE_STEPS:
        backend: AttentionBackend = base if name == base.name else BACKENDS.load(name)()
        if backend.capturable and not unusable_reasons(backend, shapes, device):
            found[name] = backend
    if len(found) == 1:
        return base
    started_s = time.perf_counter()
    choices = {}
    for name, group in groups.items():
        # A window is read alike in all contexts beyond it.
        asked = sizes if group.shape.window is None else _of_the_longest(sizes)
        choice = choose_decode(measure(device, group, tuple(found), tuple(asked)), base.name)
        log.info("attention of decode steps, group %s: %s", name, choice.line())
        choices[group.shape] = choice
    log.info("attention of decode steps was chosen in %.2f s", time.perf_counter() - started_s)
    if all(set(choice.names) <= {base.name} for choice in choices.values()):
        return base
    return SizedAttention(found, choices)


def _of_the_longest(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    longest = max(bound for _, bound in sizes)
    return [(rows, bound) for rows, bound in sizes if bound == longest]
