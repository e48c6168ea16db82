"""Every call of Ray Serve that may change between versions: pinned calls, fresh call contexts, pushes, identity.

Behind a Worker's handle sits :class:`PinnedRouter`: the Router has chosen a replica already, and this carries the
choice out. Two traps that it is written around: a call whose future was failed must still get a rank, or the routing
task wedges; and two calls inside one HTTP request share an id by which Serve tells routing tasks apart, so each call
gets a context of its own.
"""

from __future__ import annotations

import contextvars
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import context as serve_context
from ray.serve._private import constants as serve_constants
from ray.serve._private import tracing_utils
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.deployments.protocol import ReplicaGone, WorkerReport
from serve_app.deployments.trunk_reader import SeatedStream, Trunks
from serve_app.http.errors import WorkerLost
from worker.api import GenerateRequest

FAILURES = (RayError, RayServeException)
"""How a call ends whose replica, node or deployment is gone: not only the death of the actor is told, but, where a
node died, also the loss of what it owned."""
ANY = ""
"""The first argument of a call that any replica may answer."""


class PinnedRouter(RequestRouter):
    """Sends a call to the replica that its first argument names."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        target = pending_request.args[0] if pending_request.args else ANY
        if target == ANY:
            return [candidate_replicas]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target:
                return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGone(target))
        return [candidate_replicas]


class PinnedCalls:
    """A :class:`serve_app.deployments.protocol.Transport` over a Worker handle."""

    def __init__(self, worker: DeploymentHandle[Any]) -> None:
        self._worker = worker.options(stream=True)
        self._plain = worker
        self._trunks = Trunks(self._trunk, own_replica_id())

    def start(self, replica_id: str, request: GenerateRequest) -> SeatedStream:
        """Calls ``Worker.generate`` on that replica."""
        seat = self._trunks.seat(replica_id, request.request_id)
        generate = self._worker.generate
        try:
            response = in_fresh_context(lambda: generate.remote(replica_id, request, seat.place))
        except FAILURES as error:
            seat.leave()
            raise _lost(error) from error
        return SeatedStream(PinnedStream(response), seat)

    def close(self) -> None:
        """Closes what no request holds; the Router is about to end."""
        self._trunks.close()

    def _trunk(self, replica_id: str, trunk_id: str) -> PinnedStream:
        return PinnedStream(in_fresh_context(lambda: self._worker.trunk.remote(replica_id, trunk_id)))

    async def ask(self, replica_id: str, question: str, *given: Any) -> Any:
        """Calls ``Worker.<question>`` on that replica."""
        try:
            return await in_fresh_context(lambda: getattr(self._plain, question).remote(replica_id, *given))
        except FAILURES as error:
            raise _lost(error) from error

    async def report_of(self, replica_id: str) -> WorkerReport:
        """Asks that replica for its report."""
        report: WorkerReport = await self.ask(replica_id, "worker_report")
        return report

    async def wake(self) -> WorkerReport | None:
        """Asks any replica for its report: a call that waits is what Serve starts a first replica for."""
        try:
            report: WorkerReport = await self.ask(ANY, "worker_report")
        except WorkerLost:
            return None
        return report


class PinnedStream:
    """One call's items, with Ray's errors turned into the service's own."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._over = False

    def __aiter__(self) -> PinnedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._response)
        except StopAsyncIteration:
            self._over = True
            raise
        except FAILURES as error:
            self._over = True
            raise _lost(error) from error
        except Exception:
            # Never sent: the request router failed it (ReplicaGone).
            self._over = True
            raise

    async def aclose(self) -> None:
        """Cancels the call unless it is over."""
        if not self._over:
            self._over = True
            # Cancelling looks at the call's outcome and raises that if it failed meanwhile: then it is over, too.
            with suppress(Exception):
                self._response.cancel()


def _lost(error: Exception) -> WorkerLost:
    """Ray's error in the service's own words."""
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else error
        return WorkerLost(f"{type(cause).__name__}: {cause}")
    return WorkerLost(type(error).__name__)


def behind_haproxy() -> bool:
    """Whether Serve's HAProxy stands in front: it does not say whom it speaks for."""
    return bool(serve_constants.RAY_SERVE_ENABLE_HA_PROXY)


def in_fresh_context(call: Callable[[], Any]) -> Any:
    """Runs ``call`` under a request id of its own, the rest of Serve's request context kept."""

    def run() -> Any:
        # Without an internal id Serve makes a new one for the call.
        current: contextvars.ContextVar[Any] = serve_context._serve_request_context
        current.set(replace(serve_context._get_serve_request_context(), _internal_request_id=""))
        # A copied context shares this list: one call's span would be given another's name and attributes.
        tracing_utils.TRACE_STACK.set(list(tracing_utils.TRACE_STACK.get([])))
        return call()

    return contextvars.copy_context().run(run)


def versions() -> tuple[str, str, str]:
    """Of this service, Python and Ray."""
    try:
        own = metadata.version("headroom")
    except metadata.PackageNotFoundError:  # run from a source folder
        own = "unknown"
    return own, platform.python_version(), ray.__version__


def own_replica_id() -> str:
    """Serve's name of the replica that asks, as :class:`PinnedRouter` compares it."""
    name: str = serve.get_replica_context().replica_id.unique_id
    return name


def replica_lives(deployment: str, name: str) -> bool:
    """Whether that replica of the own application has a living process; blocks for a moment."""
    owner = DeploymentID(name=deployment, app_name=serve.get_replica_context().app_name)
    try:
        ray.get_actor(ReplicaID(name, owner).to_full_id_str(), namespace=serve_constants.SERVE_NAMESPACE)
    except ValueError:  # no such actor
        return False
    return True


NOBODY = ""
"""Stands for answers that did not come in time, of receivers that there are."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Who took a push: their answers, none if there was nobody to send to; ``by_all``: every one of them did."""

    answers: tuple[Any, ...]
    by_all: bool


class Broadcast:
    """Calls one method on all replicas of a deployment of the own application."""

    def __init__(self, deployment: str, method: str, timeout_s: float = 1.0) -> None:
        self._deployment = deployment
        self._method = method
        self._timeout_s = timeout_s
        self._handle: DeploymentHandle[Any] | None = None

    async def send(self, *values: Any) -> Heard:
        """Sends ``values``. Receivers that fail are no error: the next push follows."""
        if self._handle is None:
            self._handle = serve.get_deployment_handle(self._deployment, serve.get_replica_context().app_name)
        response = self._handle.broadcast(self._method, *values)
        try:
            results = await response.results_async(timeout_s=self._timeout_s, return_exceptions=True)
        except DeploymentUnavailableError:
            return Heard((), False)
        except TimeoutError:
            return Heard((NOBODY,), False)
        answers = tuple(result for result in results if not isinstance(result, BaseException))
        return Heard(answers or (NOBODY,), len(answers) == len(results))
