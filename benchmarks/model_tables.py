"""Fills tables about several models with one engine start each, and publishes what there is after every model."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.gpu_engine import GpuBench, copy_bytes_per_s, free_beside, matrix_flops, open_bench
from benchmarks.report import Conditions, Report, Value, publish
from benchmarks.shapes import shape_folder, shape_geometry
from benchmarks.step_profile import record_kernels
from worker.advise.formats import find_format
from worker.advise.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class Rates:
    """This machine's measured limits: bytes a second of a copy, operations a second of a bf16 product."""

    copy: float
    matrix: float

    @classmethod
    def measured(cls) -> Rates:
        """Measures both."""
        found = cls(copy_bytes_per_s(), matrix_flops())
        record_kernels(torch.cuda.synchronize)  # the profiler's first start takes longest
        torch.cuda.empty_cache()
        return found

    @property
    def note(self) -> str:
        """Both in words."""
        return (
            f"copy bandwidth {self.copy / 1e12:.2f} TB/s, bf16 matrix rate {self.matrix / 1e12:.0f} TFLOP/s"
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """What a table wants of an engine: arena bytes, rows of a step, tokens of requests and steps, and the steps to
    capture."""

    arena_bytes: int
    max_running: int
    max_model_len: int
    max_step_tokens: int
    batches: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()


class Table(Protocol):
    """One benchmark's table over several models."""

    name: str

    def needs(self, geometry: ModelGeometry, available: int) -> Needs:
        """For a model that leaves ``available`` bytes of the GPU."""
        ...

    def fill(self, bench: GpuBench, model: str, rates: Rates) -> None:
        """Measures a model, MODEL.FORMAT, as rows of the table."""
        ...

    def conditions(self, models: Sequence[str]) -> Conditions:
        """Under which the rows were measured."""
        ...

    @property
    def rows(self) -> Sequence[Mapping[str, Value]]:
        """So far."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """So far."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What all engines are told beside a table's needs."""

    attention_backend: str = "auto"
    deterministic: bool = False


@dataclass
class Run:
    """Tables that are filled together. ``folder``: where their JSON goes, by the table's name."""

    tables: Sequence[Table]
    rates: Rates
    folder: Path | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    failures: list[str] = field(default_factory=list)

    def measure(self, models: Sequence[str], before: Sequence[str] = ()) -> None:
        """Starts every model, MODEL.FORMAT, once. A model that fails is noted, and the others go on. ``before``: those
        that the tables have rows of already."""
        for number, model in enumerate(models):
            try:
                self._measure(model)
            except Exception as error:
                traceback.print_exc()
                self.failures.append(f"{model} failed: {type(error).__name__}: {error}")
            finally:  # also where the run is interrupted
                gc.collect()
                torch.cuda.empty_cache()
                self._publish([*before, *models[: number + 1]])

    def _measure(self, name: str) -> None:
        model, _, format = name.rpartition(".")
        geometry = shape_geometry(shape_folder(model, format))
        available = free_beside(geometry, find_format(format))
        needs = [table.needs(geometry, available) for table in self.tables]
        bench = open_bench(
            model,
            format,
            sorted({batch for need in needs for batch in need.batches}),
            sorted({chunk for need in needs for chunk in need.chunks}),
            arena_bytes=max(need.arena_bytes for need in needs),
            max_running=max(need.max_running for need in needs),
            max_model_len=max(need.max_model_len for need in needs),
            max_step_tokens=max(need.max_step_tokens for need in needs),
            attention_backend=self.options.attention_backend,
            deterministic=self.options.deterministic,
        )
        print(f"{name}: started in {bench.started_s:.1f} s", flush=True)
        started_s = time.perf_counter()
        try:
            for table in self.tables:
                table.fill(bench, name, self.rates)
        finally:
            bench.engine.close()
        print(f"{name}: measured in {time.perf_counter() - started_s:.1f} s", flush=True)

    def _publish(self, models: Sequence[str]) -> None:
        for table in self.tables:
            if not table.rows:
                continue
            notes = (self.rates.note, *table.notes, *self.failures)
            report = Report(table.name, table.conditions(models), tuple(table.rows), notes, named=True)
            publish(report, None if self.folder is None else self.folder / f"{table.name}.json")
