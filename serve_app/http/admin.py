"""Operators' routes: what every worker says of itself, emptying its prefix cache, and draining it.

They answer callers on this machine, and others by an admin key; :mod:`serve_app.http.access` sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from serve_app.http.documentation import ErrorBody, answers
from worker.api import ExpertResidency, WorkerSnapshot

ADMIN_PATHS = ("/admin", "/arena", "/experts")
"""These and all below them."""
FLUSH_TIMEOUT_S = 30.0
DRAIN_MARGIN_S = 30.0


class UnknownReplica(Exception):
    """No live worker has that name."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A worker's last report, and how old it is."""

    model: str
    replica: str
    age_s: float
    snapshot: WorkerSnapshot


class Operations(Protocol):
    """What an operator can see and do; answers are by model, then by replica."""

    def replicas(self) -> list[ReplicaState]:
        """The workers that reported lately."""
        ...

    async def ask(self, question: str, *given: Any, replica: str, timeout_s: float) -> list[ReplicaAnswer]:
        """Asks the named worker, or all with an empty name. Raises UnknownReplica."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """One worker's answer, or the error in its place."""

    model: str
    replica: str
    answer: Any
    error: str = ""

    def body(self, name: str) -> dict[str, Any]:
        """As JSON, the answer under ``name``."""
        who = {"model": self.model, "replica": self.replica}
        return {**who, "error": self.error} if self.error else {**who, name: self.answer}


class WhichReplica(BaseModel):
    """``replica``: its name as in ``/admin/replicas``; empty means all."""

    model_config = ConfigDict(extra="forbid")

    replica: str = ""


class Drain(BaseModel):
    """``timeout_s``: streams that still run afterwards are aborted."""

    model_config = ConfigDict(extra="forbid")

    replica: str = Field(min_length=1)
    timeout_s: float = Field(default=600.0, ge=0, le=86_400)


class AnswerList(BaseModel):
    """One entry per worker."""

    object: str
    data: list[dict[str, Any]]


def add_admin(app: FastAPI, operations: Operations) -> None:
    """Adds the routes."""
    refused: dict[int | str, dict[str, Any]] = {
        **answers(AnswerList),
        403: {"model": ErrorBody},
        404: {"model": ErrorBody},
    }

    @app.get("/admin/replicas", responses=refused)
    async def replicas() -> dict[str, Any]:
        return _listed([_state_body(state) for state in operations.replicas()])

    @app.post("/admin/flush", responses=refused)
    async def flush(body: WhichReplica) -> dict[str, Any]:
        found = await operations.ask("flush_prefixes", replica=body.replica, timeout_s=FLUSH_TIMEOUT_S)
        return _listed([answer.body("freed_bytes") for answer in found])

    @app.post("/admin/drain", responses=refused)
    async def drain(body: Drain) -> dict[str, Any]:
        timeout_s = body.timeout_s + DRAIN_MARGIN_S
        found = await operations.ask("drain", body.timeout_s, replica=body.replica, timeout_s=timeout_s)
        return _listed([answer.body("aborted") for answer in found])

    @app.get("/arena", responses=refused)
    async def arena(replica: str = "") -> dict[str, Any]:
        return await _reports(operations, "arena", replica)

    @app.get("/experts", responses=refused)
    async def experts(replica: str = "") -> dict[str, Any]:
        return await _reports(operations, "experts", replica)


async def _reports(operations: Operations, name: str, replica: str) -> dict[str, Any]:
    found = await operations.ask("engine_report", name, replica=replica, timeout_s=FLUSH_TIMEOUT_S)
    return _listed([answer.body(name) for answer in found])


def _listed(data: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": data}


def _state_body(state: ReplicaState) -> dict[str, Any]:
    plain: dict[str, Any] = asdict(state.snapshot)
    plain["headroom"]["available_bytes"] = state.snapshot.headroom.available_bytes
    plain["experts"] = _residency_body(state.snapshot.experts)
    who: Mapping[str, Any] = {"model": state.model, "replica": state.replica, "age_s": round(state.age_s, 3)}
    return {**who, "snapshot": plain}


def _residency_body(experts: ExpertResidency | None) -> dict[str, Any] | None:
    """Resident experts by layer; the bitmap itself only when it is whole."""
    if experts is None or experts.base_generation is not None:
        return None
    bits = int.from_bytes(experts.bits, "little")
    layer = (1 << experts.num_experts) - 1
    resident = [
        (bits >> (row * experts.num_experts) & layer).bit_count() for row in range(experts.num_layers)
    ]
    return {
        "num_layers": experts.num_layers,
        "num_experts": experts.num_experts,
        "resident_by_layer": resident,
        "generation": experts.generation,
        "bits": experts.bits.hex(),
    }
