"""Loads a model: reads its configuration, rehearses against the checkpoint, then builds it for real."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from worker.api import ModelInfo
from worker.config import WorkerConfig
from worker.errors import ConfigError, ModelLoadError
from worker.execution.quantized import DenseFormat, DequantizedStore
from worker.execution.weights import (
    CheckpointFiles,
    LoadProgress,
    RandomTensors,
    TensorStore,
    WeightSource,
    read_json,
)
from worker.model_folder import read_end_token_ids, served_model_len
from worker.models import MODELS
from worker.models.base import BuildOptions, ExpertFactory, Model, ModelFamily
from worker.models.paged import table_experts
from worker.models.resident import resident_experts
from worker.quantization.choose import find_format

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run and its facts."""

    model: Model
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint that holds exactly what its model needs, as a rehearsal has shown; not loaded yet.

    ``num_elements`` counts what a whole :meth:`build` reads.
    """

    config: WorkerConfig
    raw: Mapping[str, Any]
    architecture: str
    family: ModelFamily
    options: BuildOptions
    store: TensorStore
    device: torch.device
    dtype: torch.dtype
    num_elements: int

    def build(self, source: WeightSource, experts: ExpertFactory | None = None) -> Model:
        """The model out of ``source``; ``experts`` instead of the factory it was opened with."""
        return self.family(self.raw, source, replace(self.options, experts=experts or self.options.experts))

    def info(self, model: Model) -> ModelInfo:
        """The facts of the built ``model``."""
        config, folder = self.config, Path(self.config.model)
        return ModelInfo(
            name=config.served_name or folder.resolve().name,
            folder=str(folder),
            architecture=self.architecture,
            vocab_size=model.vocab_size,
            max_model_len=served_model_len(config, model.max_model_len),
            eos_token_ids=read_end_token_ids(folder, self.raw),
            num_layers=model.num_layers,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            dtype=self.options.dtype,
            device=str(self.device),
        )


def choose_device(name: str) -> torch.device:
    """The device that ``device`` names; ConfigError where it is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError([f"device={name!r}: not auto, cpu, cuda or cuda:N"]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError([f"device={name!r}: this machine has no usable GPU; device=cpu would run without"])
    return torch.device("cuda:0") if name == "cuda" else device


def load_model(config: WorkerConfig, experts: ExpertFactory | None = None) -> LoadedModel:
    """Builds the model of ``config.model``; ``experts`` decides where routed experts live (None: resident,
    dequantised). ModelLoadError names everything that the folder lacks or has too much."""
    opened = open_model(config, experts)
    started_s = time.perf_counter()
    with LoadProgress(Path(config.model), opened.num_elements) as bar:
        model = opened.build(WeightSource(opened.store, opened.device, opened.dtype, bar))
    opened.store.close()
    log.info("%s", _loaded_line(opened, time.perf_counter() - started_s))
    return LoadedModel(model, opened.info(model), opened.device, opened.dtype)


def _loaded_line(opened: OpenedModel, seconds: float) -> str:
    """What loading took, for the log."""
    memory = f"host memory at most {peak_host_bytes() / 1e9:.2f} GB"
    if opened.device.type == "cuda":
        peak, now = torch.cuda.max_memory_allocated(opened.device), torch.cuda.memory_allocated(opened.device)
        memory += f", device memory at most {peak / 1e9:.2f} GB, {now / 1e9:.2f} GB now"
    return f"loaded {opened.num_elements / 1e9:.2f} billion weights in {seconds:.1f} s: {memory}"


def peak_host_bytes() -> int:
    """The most memory that this process ever had resident, mapped files included; 0 where Linux does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def open_model(config: WorkerConfig, experts: ExpertFactory | None = None) -> OpenedModel:
    """Reads the configuration of ``config.model`` and rehearses against the checkpoint; as :func:`load_model`, but no
    weights are read."""
    folder = Path(config.model)
    raw = read_json(folder / "config.json")
    device = choose_device(config.device)
    dtype_name = _dtype_name(config, raw, device)
    kv_dtype = {"auto": dtype_name, "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}[config.kv_dtype]
    architecture, family = _family(folder, raw)
    weight_format = find_format(_quantization(raw), dtype_name)
    factory = _resident_factory(device, config.deterministic) if experts is None else experts
    options = BuildOptions(
        kv_dtype=kv_dtype,
        dtype=dtype_name,
        experts=factory,
        format=weight_format,
        deterministic=config.deterministic,
    )
    store: TensorStore = RandomTensors(config.seed) if config.load == "random" else CheckpointFiles(folder)
    if config.load != "random" and isinstance(weight_format, DenseFormat):
        store = DequantizedStore(store, weight_format)
    dtype: torch.dtype = getattr(torch, dtype_name)
    rehearsal = WeightSource(store, torch.device("meta"), dtype)
    served_model_len(config, family(raw, rehearsal, options).max_model_len)  # refuses before weights are read
    problems = rehearsal.problems()
    if problems:
        raise ModelLoadError(f"{folder}: {'; '.join(problems)}")
    return OpenedModel(
        config, raw, architecture, family, options, store, device, dtype, rehearsal.num_elements
    )


def _resident_factory(device: torch.device, deterministic: bool) -> ExpertFactory:
    """On a GPU experts stay in the checkpoint's format; compiled CPU kernels want plain transposed weights."""
    return partial(table_experts, deterministic=deterministic) if device.type == "cuda" else resident_experts


def _family(folder: Path, raw: Mapping[str, Any]) -> tuple[str, ModelFamily]:
    named = raw.get("architectures") or []
    for architecture in named:
        if architecture in MODELS:
            family: ModelFamily = MODELS.load(architecture)
            return architecture, family
    known = ", ".join(MODELS)
    raise ModelLoadError(
        f"{folder}/config.json: architectures={named!r}, but the native engine knows {known}"
    )


def _quantization(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    return dict(found) if found else None


def _dtype_name(config: WorkerConfig, raw: Mapping[str, Any], device: torch.device) -> str:
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "float32"
    text = raw.get("text_config") or raw
    return str(text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix(
        "torch."
    )
