"""Checks of pods: images, resources, memory, probes, grace periods, security, environment. They answer sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from serve_app.http.routes import create_app
from tests.k8s.deployed import GPU, Deployed, Pods, locked, project, quantity
from tests.k8s.kustomize import each_container
from worker.advise.pods import RAY_KILLS_AT

AGENT_PORT = 52365
"""Of Ray's agent on every node."""
AGENT_PATHS = {"/api/healthz", "/api/local_raylet_healthz"}
SERVE_PATHS = {"/-/healthz", "/-/routes"}
SECRET_NAME = re.compile(r"(^|_)(TOKEN|PASSWORD|SECRET|KEY)$", re.IGNORECASE)


@cache
def app_routes() -> frozenset[str]:
    """Paths of the application, operators' included."""
    app = create_app(backend=None, operations=object())
    return frozenset(getattr(route, "path", "") for route in app.routes)


def images(deployed: Deployed) -> Iterator[str]:
    """Pinned, ours of this version, the same everywhere; Ray's version is the lock file's."""
    ours = set()
    for name, template in deployed.templates():
        for container in template["spec"]["containers"]:
            image, _, tag = container["image"].rpartition(":")
            if not image or tag == "latest":
                yield f"{name}: image {container['image']} has no fixed tag"
            if image.split("/")[-1] == "headroom":
                ours.add(tag)
                if tag.removesuffix("-demo") != project()["version"]:
                    yield f"{name}: image tag {tag}, but the project is {project()['version']}"
    if len(ours) != 1:
        yield f"pods run different images of headroom: {sorted(ours)}"
    if deployed.cluster["rayVersion"] != locked("ray"):
        yield f"rayVersion {deployed.cluster['rayVersion']}, but the image has {locked('ray')}"


def resources(deployed: Deployed) -> Iterator[str]:
    """Requests and limits are there, memory is guaranteed, CPUs are not limited, Ray is told no more than there is."""
    for name, template in deployed.templates():
        for container in template["spec"]["containers"]:
            requests = container.get("resources", {}).get("requests", {})
            limits = container.get("resources", {}).get("limits", {})
            if not {"cpu", "memory"} <= set(requests) or "memory" not in limits:
                yield f"{name}: requests of cpu and memory, and a memory limit, must be set"
    for pods in deployed.pods:
        requests, limits = pods.container["resources"]["requests"], pods.container["resources"]["limits"]
        if requests.get("memory") != limits.get("memory"):
            yield f"{pods.name}: memory request and limit differ: pinned pages cannot be given back"
        if "cpu" in limits:
            yield f"{pods.name}: a CPU limit throttles the step loop"
        if requests.get(GPU) != limits.get(GPU):
            yield f"{pods.name}: GPU request and limit differ"
        if quantity(pods.start.get("num-cpus")) > quantity(requests.get("cpu")):
            yield f"{pods.name}: Ray is told of more CPUs than are requested"
        if pods.num_gpus and not any(t.get("key") == GPU for t in pods.spec.get("tolerations", [])):
            yield f"{pods.name}: GPU nodes are tainted, and this does not tolerate it"


def memory(deployed: Deployed) -> Iterator[str]:
    """The limit holds /dev/shm, what is pinned, and the heap, below the share at which Ray ends processes."""
    args = deployed.args
    for pods in deployed.pods:
        volume = pods.mounted("/dev/shm") or {}
        shm = volume.get("emptyDir", {})
        if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
            yield f"{pods.name}: /dev/shm must be a Memory volume with a sizeLimit"
            continue
        size = quantity(shm["sizeLimit"])
        if size < quantity(pods.start.get("object-store-memory", "1Ti")):
            yield f"{pods.name}: /dev/shm is smaller than Ray's object store"
        limit = quantity(pods.container["resources"]["limits"].get("memory"))
        need = size + pods.stated("heap") + pods.stated("pinned")
        if limit * RAY_KILLS_AT < need:
            yield f"{pods.name}: memory limit {limit / 2**20:.0f} Mi does not hold {need / 2**20:.0f} Mi"
        if not pods.stated("heap"):
            yield f"{pods.name}: the annotation headroom/heap is missing"
        if pods.num_gpus:
            yield from _pinned(pods, size, args.worker.experts, args.worker.host_store)
            if args.worker.host_tier_bytes * pods.num_gpus > pods.stated("pinned"):
                yield f"{pods.name}: headroom/pinned does not hold host_tier_bytes of {pods.num_gpus} workers"


def _pinned(pods: Pods, shm_bytes: float, experts: str, host_store: str) -> Iterator[str]:
    if experts == "paged" and host_store == "private" and not pods.stated("pinned"):
        yield f"{pods.name}: experts=paged, and headroom/pinned has no room for them"
    if host_store == "shared" and shm_bytes <= 2**30:
        yield f"{pods.name}: host_store=shared, and /dev/shm has no room for the experts"
    if pods.num_gpus > 1 and experts == "paged" and host_store != "shared":
        yield f"{pods.name}: {pods.num_gpus} workers of a pod hold the experts {pods.num_gpus} times; host_store=shared"


def probes(deployed: Deployed) -> Iterator[str]:
    """Every probe asks a port and a path that exist."""
    routes = app_routes()
    for pods in deployed.pods:
        for kind in ("readinessProbe", "livenessProbe"):
            asked = pods.container.get(kind, {}).get("httpGet")
            if asked is None:
                yield f"{pods.name}: no {kind} over HTTP"
                continue
            port = pods.ports.get(asked["port"], asked["port"])
            if port == pods.ports.get("serve"):
                known = SERVE_PATHS | routes
            else:
                known = AGENT_PATHS if port == AGENT_PORT else set()
            if asked["path"] not in known:
                yield f"{pods.name}: {kind} asks {asked['path']} at {asked['port']}, which nobody answers"


def grace_periods(deployed: Deployed) -> Iterator[str]:
    """Each wait outlasts the one inside it."""
    args, environment = deployed.args, deployed.environment
    waits = [
        ("request_timeout_s", args.request_timeout_s),
        ("graceful_shutdown_timeout_s", args.graceful_shutdown_timeout_s),
    ]
    if environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        hard_stop = float(environment.get("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", 120))
        waits.append(("HAProxy's hard stop", hard_stop))
    for pods in deployed.pods:
        if pods.is_head:
            continue
        hook = pods.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook[:2] != ["python", "/app/k8s/image/leave_node.py"]:
            yield f"{pods.name}: no preStop hook that empties the pod"
            continue
        inside = [("the preStop hook", float(hook[2]))]
        inside.append(("terminationGracePeriodSeconds", float(pods.spec["terminationGracePeriodSeconds"])))
        chain = [*waits, *inside]
        for (first, shorter), (second, longer) in pairwise(chain):
            if shorter > longer:
                yield f"{pods.name}: {first} ({shorter:g} s) outlasts {second} ({longer:g} s)"
    others = {
        "rayClusterDeletionDelaySeconds": deployed.service["spec"].get("rayClusterDeletionDelaySeconds", 60)
    }
    if deployed.cluster.get("enableInTreeAutoscaling"):
        options = deployed.cluster.get("autoscalerOptions", {})
        others["idleTimeoutSeconds"] = options.get("idleTimeoutSeconds", 60)
    for name, seconds in others.items():
        if seconds < args.request_timeout_s:
            yield f"{name} ({seconds} s) cuts streams of up to request_timeout_s"


def environment(deployed: Deployed) -> Iterator[str]:
    """All of Ray's containers have the same environment, and all of it from the ConfigMap."""
    expected = [{"configMapRef": {"name": "headroom-env"}}]
    if not deployed.environment:
        yield "there is no ConfigMap headroom-env"
    for pods in deployed.pods:
        if pods.container.get("envFrom") != expected:
            yield f"{pods.name}: its environment is not the shared one"
        if pods.container.get("env"):
            yield f"{pods.name}: variables of its own; all belong into base/ray.env"
    proxies = {
        deployed.environment.get(f"RAY_SERVE_{name}") for name in ("ENABLE_HA_PROXY", "THROUGHPUT_OPTIMIZED")
    }
    if len(proxies) != 1:
        yield "RAY_SERVE_ENABLE_HA_PROXY and RAY_SERVE_THROUGHPUT_OPTIMIZED go together"


def security(deployed: Deployed) -> Iterator[str]:
    """What the restricted profile of pod security asks for; Ray's token; no secret in a manifest."""
    if deployed.cluster.get("authOptions", {}).get("mode") != "token":
        yield "Ray runs without its token"
    for name, template in deployed.templates():
        spec = template["spec"]
        pod = spec.get("securityContext", {})
        if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
            yield f"{name}: may run as root"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name}: no seccomp profile"
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{name}: shares a namespace of the host"
        if any("hostPath" in volume for volume in spec.get("volumes", [])):
            yield f"{name}: mounts a path of the host"
        for container in spec["containers"]:
            own = container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{name}: may gain privileges"
            if own.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{name}: keeps capabilities"
        automount = bool(deployed.cluster.get("enableInTreeAutoscaling")) and name == "head"
        if spec.get("automountServiceAccountToken") is not automount:
            yield f"{name}: automountServiceAccountToken must be {str(automount).lower()}"
    yield from _secrets(deployed)


def _secrets(deployed: Deployed) -> Iterator[str]:
    found: list[str] = [
        f"a {d['kind']} {d['metadata']['name']} is inline" for d in deployed.of_kind("Secret")
    ]
    for document in deployed.of_kind("ConfigMap"):
        found += [f"ConfigMap: {key} is a secret" for key in document["data"] if SECRET_NAME.search(key)]

    def visit(container: dict[str, object]) -> None:
        entries = container.get("env", [])
        assert isinstance(entries, list)
        for entry in entries:
            if "value" in entry and SECRET_NAME.search(entry["name"]):
                found.append(f"the secret {entry['name']} is inline")

    for document in deployed.documents:
        each_container(document, visit)
    yield from found
