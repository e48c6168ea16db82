"""Every option of the service, typed and checked; the only module that reads the environment.

``serve run serve_app:app NAME=VALUE ...`` fills :class:`AppArgs`. An option that is not given is taken from the
environment variable ``HEADROOM_<NAME>``, else it has the default below.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from serve_app.policies.autoscaling import ScalingRules
from serve_app.telemetry.otlp import OtlpSettings
from worker.byte_sizes import parse_bytes
from worker.config import WorkerConfig
from worker.errors import ConfigError

ENVIRONMENT_PREFIX = "HEADROOM_"

LOG_LEVELS = ("debug", "info", "warning", "error")


class AppArgs(BaseModel):
    """What ``serve run serve_app:app`` may be told: the options below, and beside them, under their own names, those of
    :class:`worker.config.WorkerConfig`, which every worker gets (``worker`` holds them afterwards)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="", description="Folder of the checkpoint, or a hub name (owner/name).")
    models_file: str = Field(
        default="",
        description="YAML or JSON file of several models, by name: each entry has the options that differ for it.",
    )
    revision: str = Field(default="", description="With a hub name: branch, tag or commit.")
    served_name: str = Field(default="", description="Name the model answers to; empty: the end of `model`.")
    replicas: int = Field(
        default=1, ge=0, description="Workers, one per GPU; with max_replicas, how many there are at first."
    )
    max_replicas: int = Field(
        default=0,
        ge=0,
        description="Most workers; 0: always `replicas`, else they follow retractions and queueing.",
    )
    min_replicas: int = Field(
        default=1, ge=0, description="With max_replicas, fewest workers; 0: the first request starts one."
    )
    scaling_rules: dict[str, float] = Field(
        default_factory=dict, description="With max_replicas, rules as JSON; names as in ScalingRules."
    )
    scaling_interval_s: float = Field(
        default=2.0,
        gt=0,
        description="With max_replicas, how often each worker's load is measured and judged.",
    )
    router_replicas: int = Field(default=1, ge=1, description="Routers (HTTP ingress and placement).")
    gpus_per_worker: float = Field(
        default=-1.0,
        ge=-1.0,
        description="GPUs that Ray reserves per worker; -1: one where a GPU will be used.",
    )
    cpus_per_worker: float = Field(default=0.0, ge=0.0, description="CPUs that Ray reserves per worker.")
    cpus_per_router: float = Field(default=0.0, ge=0.0, description="CPUs that Ray reserves per router.")
    max_queue: int = Field(
        default=256,
        ge=1,
        description="Requests that may wait in a router for a worker; each passes through, if only for a moment.",
    )
    queue_timeout_s: float = Field(default=60.0, gt=0, description="A request that waited so long gets 429.")
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="A request that has not ended after so long ends with an error."
    )
    expert_affinity: bool = Field(
        default=True, description="Place requests where the experts that they will likely use are resident."
    )
    link_bytes_per_s: float = Field(
        default=50e9,
        gt=0,
        description="From host to device: what a missing expert costs is its bytes over this (placement alone).",
    )
    accept_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="A worker that has not taken a request in after so long is passed over.",
    )
    worker_backlog: int = Field(
        default=8, ge=0, description="Requests a router sends to a worker beyond what its batch holds."
    )
    snapshot_interval_s: float = Field(
        default=0.03, gt=0, description="Least time between a worker's reports."
    )
    messages_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Stream messages per second that one router should carry; tokens are coalesced to keep to it. "
        "0: as measured, 1500 through Serve's own proxy and 7000 behind HAProxy.",
    )
    graceful_shutdown_timeout_s: float = Field(
        default=600.0,
        ge=0,
        description="Running requests of a worker that is taken away may go on for so long.",
    )
    health_check_period_s: float = Field(
        default=5.0, gt=0, description="How often each deployment is checked."
    )
    chat_template: str = Field(
        default="", description="File of a chat template; empty: the checkpoint's own."
    )
    chat_format: str = Field(
        default="auto", description="How reasoning and tool calls are marked; auto: as the template shows."
    )
    api_keys_file: str = Field(
        default="", description="File of API keys (hashes) and limits; empty: no keys needed."
    )
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="Largest body of a request.")
    log_level: str = Field(default="info", description="debug, info, warning or error.")

    worker: WorkerConfig = Field(
        default_factory=lambda: WorkerConfig(model=""), description="The options that every worker gets."
    )

    if TYPE_CHECKING:
        # What a type checker would derive from the fields alone lacks the workers' options.
        def __init__(self, **options: Any) -> None: ...

    @model_validator(mode="wrap")
    @classmethod
    def _from_flat_options(cls, given: Any, handler: ModelWrapValidatorHandler[AppArgs]) -> AppArgs:
        if not isinstance(given, Mapping):
            return handler(given)
        known = option_names()
        problems = [unknown_name(name, known, "option") for name in given if name not in known]
        options = {**from_environment(os.environ), **given}
        problems += _read_sizes(options)
        values = {name: options.pop(name) for name in _WORKER_NAMES if name in options}
        try:
            options["worker"] = _WORKER.validate_python({"model": "", **values})
        except ConfigError as error:
            problems += error.problems
        except ValidationError as error:
            problems += _sentences(error)
        try:
            built = handler(
                {name: value for name, value in options.items() if name in known or name == "worker"}
            )
            problems += built._problems()
        except ValidationError as error:
            problems += _sentences(error)
        if problems:
            raise ValueError("; ".join(problems))
        return built

    @field_validator("scaling_rules", mode="before")
    @classmethod
    def _rules_from_text(cls, rules: Any) -> Any:
        if isinstance(rules, str):
            rules = json.loads(rules or "{}")
        known = [entry.name for entry in fields(ScalingRules)]
        unknown = [name for name in rules if name not in known] if isinstance(rules, Mapping) else []
        if unknown:
            raise ValueError("; ".join(unknown_name(name, known, "option") for name in unknown))
        return rules

    def _problems(self) -> list[str]:
        """What does not fit together."""
        problems = []
        if self.models_file and (self.model or self.served_name):
            problems.append("models_file= and model= or served_name= exclude each other")
        if not self.model and not self.models_file and self.worker.engine != "fake":
            problems.append("model= is missing: name a checkpoint's folder or a hub name")
        if self.max_replicas and not self.min_replicas <= self.replicas <= self.max_replicas:
            problems.append(
                f"replicas={self.replicas} must lie between min_replicas={self.min_replicas} and "
                f"max_replicas={self.max_replicas}"
            )
        if not self.replicas and not self.max_replicas:
            problems.append("replicas=0 needs max_replicas=, or nothing would ever serve")
        if self.scaling_rules and not self.max_replicas:
            problems.append("scaling_rules= needs max_replicas=")
        if self.log_level not in LOG_LEVELS:
            problems.append(f"log_level={self.log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        if self.revision and not self.model:
            problems.append("revision= needs a hub name in model=")
        return problems

    @property
    def name(self) -> str:
        """The name the model is served under: ``served_name``, else the last part of ``model``."""
        return self.served_name or os.path.basename(self.model.rstrip("/")) or self.worker.engine

    def per_model(self) -> list[AppArgs]:
        """The options of each model: these, with what its entry in ``models_file`` says; these alone without one.

        Raises ConfigError naming the file, or the model whose options are wrong.
        """
        if not self.models_file:
            return [self]
        own = self.model_dump(exclude={"models_file", "worker"}, exclude_unset=True)
        given = {**own, **{name: getattr(self.worker, name) for name in _WORKER_NAMES}}
        found = []
        for name, entry in _read_models(Path(self.models_file)).items():
            try:
                found.append(
                    AppArgs.model_validate({**given, **entry, "served_name": name, "models_file": ""})
                )
            except ValidationError as error:
                raise ConfigError([f"models_file={self.models_file!r}, model {name!r}: {error}"]) from error
        return found

    def worker_config(self) -> WorkerConfig:
        """The part of the options that a worker gets."""
        return replace(self.worker, model=self.model, served_name=self.name)


_WORKER = TypeAdapter(WorkerConfig)
_WORKER_NAMES = tuple(entry.name for entry in fields(WorkerConfig) if entry.name not in AppArgs.model_fields)


def option_names() -> list[str]:
    """Every option: this service's own, then the workers'."""
    return [*(name for name in AppArgs.model_fields if name != "worker"), *_WORKER_NAMES]


def _read_sizes(options: dict[str, Any]) -> list[str]:
    """Turns sizes that are written (``24GB``) into numbers, in place; answers what is none, and takes it out."""
    problems = []
    for name, value in list(options.items()):
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                options[name] = parse_bytes(value)
            except ValueError as error:
                del options[name]
                problems.append(f"{name}: {error}")
    return problems


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that the environment sets, as ``HEADROOM_<NAME>`` in capitals; variables of other names with that
    prefix are not ours to judge."""
    found = {}
    for name in option_names():
        value = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if value is not None:
            found[name] = value
    return found


def otlp_settings(environment: Mapping[str, str]) -> OtlpSettings:
    """What the standard variables of OpenTelemetry say of a collector; the exporters themselves read the rest."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_METRICS_EXPORTER", "otlp").lower() != "otlp"
    )
    protocol = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return OtlpSettings(
        pushes_metrics=not is_off and any(environment.get(name) for name in endpoints),
        metrics_protocol=environment.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", protocol),
        traces_protocol=environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol),
        service_name="" if named else "headroom",
    )


def own_otlp_settings() -> OtlpSettings:
    """The same of this process."""
    return otlp_settings(os.environ)


def _read_models(file: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError([f"models_file={str(file)!r}: {error}"]) from error
    is_map = isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())
    if not content or not is_map:
        raise ConfigError([f"models_file={str(file)!r} must map the name of each model to its options"])
    for name, entry in content.items():
        if {"served_name", "models_file"} & set(entry):
            raise ConfigError([f"models_file={str(file)!r}, model {name!r}: the name is the entry's own key"])
    return {str(name): entry for name, entry in content.items()}


def _sentences(error: ValidationError) -> list[str]:
    return [f"{'.'.join(str(part) for part in entry['loc'])}: {entry['msg']}" for entry in error.errors()]


def unknown_name(name: str, known: Sequence[str], what: str) -> str:
    """A sentence that names what does not exist, and the nearest that does."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"there is no {what} {name!r}{hint}"
