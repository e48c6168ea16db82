"""Watches a runner's launches: what a step was given, what it cost the host, what the device had counted by its end."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.elasticity.stalls import StepFacts
from memory.api import StepCommands
from memory.device.residency import Lane
from worker.execution.staging import fetch
from worker.scheduling.step import StepPlan

Counts = npt.NDArray[np.int64]


@dataclass
class _Launch:
    """``counts`` [lanes, layers]: whole when ``copied`` is done, a moment behind the step's result; None: now."""

    counts: torch.Tensor
    copied: torch.cuda.Event | None
    banned: int
    allowed: int
    host_s: float
    commands_s: float
    collected_s: float
    beside_pass: bool
    captured: bool


class StepWatch:
    """Belongs to one runner and its loop's thread. A step's facts are to be asked for in the order of launches."""

    def __init__(self, place_bytes: int) -> None:
        """``place_bytes``: of an expert place."""
        self._place_bytes = place_bytes
        self._launches: dict[int, _Launch] = {}
        self._before: Counts | None = None
        self._banned = self._allowed = 0
        self._commands_s = 0.0
        self._collected_s = self._collecting_s = 0.0
        self._in_pass = False
        gc.callbacks.append(self._collector)

    def close(self) -> None:
        """Python's collector is watched no longer."""
        gc.callbacks.remove(self._collector)

    def _collector(self, phase: str, _info: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collecting_s = now
        else:
            self._collected_s += now - self._collecting_s

    def begin_pass(self, plan: StepPlan) -> None:
        """A pass was launched; what it banned the next step finds gone."""
        self._note(plan.commands)
        self._in_pass = True

    def end_pass(self) -> None:
        """All its layers were launched."""
        self._in_pass = False

    def _note(self, commands: StepCommands) -> None:
        self._banned += sum(entry.last - entry.first for entry in commands.ban)
        self._allowed += sum(entry.last - entry.first for entry in commands.allow)

    @contextmanager
    def commanding(self) -> Iterator[None]:
        """Around memory's commands."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._commands_s = time.perf_counter() - began_s

    def launched(self, plan: StepPlan, counts: torch.Tensor, began_s: float, captured: bool) -> None:
        """A step was launched, which the host began at ``began_s``. ``counts`` [lanes, layers] are copied behind it and
        ahead of the next one."""
        self._note(plan.commands)
        if not plan.num_rows:
            return
        held = fetch(counts) if counts.is_cuda else counts.clone()
        copied = torch.cuda.Event() if counts.is_cuda else None
        if copied is not None:
            copied.record()
        host_s = time.perf_counter() - began_s
        self._launches[plan.step] = _Launch(
            held, copied, self._banned, self._allowed, host_s, self._commands_s, self._collected_s, self._in_pass,
            captured,
        )  # fmt: skip
        self._banned = self._allowed = 0
        self._collected_s = 0.0

    def facts(self, plan: StepPlan, seconds: float) -> StepFacts | None:
        """Of a step whose result is there; None for one that was not launched here."""
        launch = self._launches.pop(plan.step, None)
        if launch is None:
            return None
        if launch.copied is not None:
            launch.copied.synchronize()
        counts = launch.counts.numpy().copy()  # what it was fetched into may be used again
        new = counts if self._before is None else counts - self._before
        self._before = counts
        size, commands = self._place_bytes, plan.commands
        return StepFacts(
            step=plan.step,
            num_rows=plan.num_rows,
            kv_tokens=int((plan.num_computed + plan.query_len).sum()),
            seconds=seconds,
            hits=tuple(int(n) for n in new[Lane.HIT]),
            misses=tuple(int(n) for n in new[Lane.TEE] + new[Lane.IN_PLACE]),
            banned_bytes=launch.banned * size,
            allowed_bytes=launch.allowed * size,
            rescued_bytes=int(new[Lane.RESCUED].sum()) * size,
            ring_bytes=int(new[Lane.STAGED].sum()) * size,
            num_moves=len(commands.moves),
            num_copies=len(commands.copies),
            num_patches=sum(len(update.virtual) for update in commands.table),
            beside_pass=launch.beside_pass,
            captured=launch.captured,
            host_s=launch.host_s,
            commands_s=launch.commands_s,
            collected_s=launch.collected_s,
        )
