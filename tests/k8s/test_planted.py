"""Every check of k8s/ notices what it is there for: one fault at a time in manifests that are sound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import yaml

from tests.k8s import pod_checks, wiring_checks
from tests.k8s.checks import CHECKS, CRD, problems, schema_problems
from tests.k8s.deployed import Deployed
from tests.k8s.kustomize import Document

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

GONE = object()
"""In place of a value: takes the key away."""
SERVICE = "RayService headroom"
HEAD = "spec.rayClusterConfig.headGroupSpec.template"
GROUP = "spec.rayClusterConfig.workerGroupSpecs.0"
POD = f"{GROUP}.template"
CONTAINER = f"{POD}.spec.containers.0"
RESOURCES = f"{CONTAINER}.resources"
ENV = "ConfigMap headroom-env"
POLICY = "NetworkPolicy headroom"
ARGS = "applications.0.args"
ROUTER = "applications.0.deployments.0"

Check = Callable[[Any], Iterable[str]]
Plant = tuple[str, str, str, Any, str]
"""Overlay; document, or ``config`` for the Serve configuration; path, whose last key may be new; value; the answer."""

FAULTS: dict[Check, list[Plant]] = {
    pod_checks.images: [
        ("single", SERVICE, f"{CONTAINER}.image", "headroom:latest", "no fixed tag"),
        ("single", SERVICE, f"{CONTAINER}.image", "headroom", "no fixed tag"),
        ("single", SERVICE, f"{CONTAINER}.image", "headroom:0.0.9", "image tag 0.0.9, but the project is"),
        ("single", SERVICE, f"{CONTAINER}.image", "headroom:0.1.0-demo", "pods run different images"),
        ("single", SERVICE, "spec.rayClusterConfig.rayVersion", "2.59.0", "but the image has 2.60"),
    ],
    pod_checks.resources: [
        ("single", SERVICE, f"{RESOURCES}.limits.memory", GONE, "must be set"),
        ("single", SERVICE, f"{RESOURCES}.requests.cpu", GONE, "must be set"),
        ("single", SERVICE, f"{RESOURCES}.requests.memory", "1Gi", "memory request and limit differ"),
        ("single", SERVICE, f"{RESOURCES}.limits.cpu", "4", "a CPU limit throttles"),
        ("single", SERVICE, f"{RESOURCES}.requests.nvidia%com/gpu", "2", "GPU request and limit differ"),
        ("single", SERVICE, f"{GROUP}.rayStartParams.num-cpus", "64", "more CPUs than are requested"),
        ("single", SERVICE, f"{POD}.spec.tolerations", [], "does not tolerate"),
    ],
    pod_checks.memory: [
        ("single", SERVICE, f"{POD}.spec.volumes.0.emptyDir.sizeLimit", "8Gi", "does not hold"),
        ("single", SERVICE, f"{POD}.metadata.annotations.headroom/pinned", "40Gi", "does not hold"),
        ("single", SERVICE, f"{POD}.metadata.annotations.headroom/heap", GONE, "headroom/heap is missing"),
        ("single", SERVICE, f"{POD}.metadata.annotations.headroom/pinned", "0", "has no room for them"),
        ("single", SERVICE, f"{POD}.spec.volumes.0.emptyDir.medium", GONE, "must be a Memory volume"),
        (
            "single",
            SERVICE,
            f"{POD}.spec.volumes.0.emptyDir.sizeLimit",
            "64Mi",
            "smaller than Ray's object store",
        ),
        ("single", "config", f"{ARGS}.host_tier_bytes", 64 * 2**30, "does not hold host_tier_bytes"),
        (
            "shared-host",
            SERVICE,
            f"{POD}.spec.volumes.0.emptyDir.sizeLimit",
            "512Mi",
            "no room for the experts",
        ),
        ("shared-host", "config", f"{ARGS}.host_store", "private", "hold the experts 8 times"),
    ],
    pod_checks.probes: [
        ("single", SERVICE, f"{CONTAINER}.readinessProbe.httpGet.path", "/redy", "asks /redy at serve"),
        ("single", SERVICE, f"{CONTAINER}.livenessProbe.httpGet.path", "/ready", "asks /ready at 52365"),
        ("single", SERVICE, f"{CONTAINER}.livenessProbe.httpGet.port", 52366, "which nobody answers"),
        ("single", SERVICE, f"{HEAD}.spec.containers.0.livenessProbe", GONE, "no livenessProbe"),
    ],
    pod_checks.grace_periods: [
        ("single", "config", f"{ARGS}.request_timeout_s", 601, "request_timeout_s (601 s) outlasts"),
        ("single", "config", f"{ARGS}.graceful_shutdown_timeout_s", 700, "outlasts HAProxy's hard stop"),
        (
            "single",
            ENV,
            "data.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
            GONE,
            "outlasts HAProxy's hard stop (120 s)",
        ),
        ("single", ENV, "data.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "730", "outlasts the preStop hook"),
        (
            "single",
            SERVICE,
            f"{CONTAINER}.lifecycle.preStop.exec.command.2",
            "800",
            "outlasts terminationGrace",
        ),
        (
            "single",
            SERVICE,
            f"{POD}.spec.terminationGracePeriodSeconds",
            30,
            "outlasts terminationGracePeriodSeconds",
        ),
        ("single", SERVICE, f"{CONTAINER}.lifecycle", GONE, "no preStop hook"),
        ("single", SERVICE, "spec.rayClusterDeletionDelaySeconds", 60, "cuts streams"),
        (
            "autoscale",
            SERVICE,
            "spec.rayClusterConfig.autoscalerOptions.idleTimeoutSeconds",
            60,
            "cuts streams",
        ),
    ],
    pod_checks.environment: [
        (
            "single",
            SERVICE,
            f"{HEAD}.spec.containers.0.envFrom",
            GONE,
            "head: its environment is not the shared one",
        ),
        (
            "single",
            SERVICE,
            f"{CONTAINER}.env",
            [{"name": "RAY_SERVE_X", "value": "1"}],
            "variables of its own",
        ),
        ("single", ENV, "data.RAY_SERVE_THROUGHPUT_OPTIMIZED", "0", "go together"),
        ("single", ENV, "metadata.name", "headroom-environment", "no ConfigMap headroom-env"),
    ],
    pod_checks.security: [
        ("single", SERVICE, "spec.rayClusterConfig.authOptions.mode", "disabled", "without its token"),
        ("single", SERVICE, f"{POD}.spec.securityContext.runAsNonRoot", False, "may run as root"),
        ("single", SERVICE, f"{POD}.spec.securityContext.seccompProfile", GONE, "no seccomp profile"),
        ("single", SERVICE, f"{POD}.spec.hostIPC", True, "shares a namespace of the host"),
        (
            "single",
            SERVICE,
            f"{POD}.spec.volumes.1",
            {"name": "models", "hostPath": {"path": "/m"}},
            "mounts a path of the host",
        ),
        (
            "single",
            SERVICE,
            f"{CONTAINER}.securityContext.allowPrivilegeEscalation",
            True,
            "may gain privileges",
        ),
        (
            "single",
            SERVICE,
            f"{CONTAINER}.securityContext.capabilities",
            {"add": ["IPC_LOCK"]},
            "keeps capabilities",
        ),
        (
            "single",
            SERVICE,
            f"{POD}.spec.automountServiceAccountToken",
            True,
            "automountServiceAccountToken must be f",
        ),
        ("autoscale", SERVICE, f"{HEAD}.spec.automountServiceAccountToken", False, "Token must be true"),
        ("single", ENV, "data.RAY_AUTH_TOKEN", "abc", "RAY_AUTH_TOKEN is a secret"),
        (
            "everything",
            "StatefulSet headroom-redis",
            "spec.template.spec.containers.0.env.0",
            {"name": "REDIS_PASSWORD", "value": "abc"},
            "the secret REDIS_PASSWORD is inline",
        ),
        ("single", ENV, "kind", "Secret", "a Secret headroom-env is inline"),
    ],
    wiring_checks.selectors: [
        (
            "single",
            "PodDisruptionBudget headroom-head",
            "spec.selector.matchLabels",
            {"a": "b"},
            "selects no pod",
        ),
        ("single", POLICY, "spec.podSelector.matchLabels.headroom/service", "headrom", "selects no pod"),
        ("single", SERVICE, f"{POD}.metadata.labels.headroom/part", "wroker", "selects no pod"),
        (
            "single",
            SERVICE,
            f"{POD}.metadata.labels.app%kubernetes%io/name",
            "headroom",
            "that KubeRay sets itself",
        ),
        (
            "everything",
            "Service headroom-redis",
            "spec.selector",
            {"headroom/part": "rediss"},
            "selects no pod",
        ),
        ("everything", "PodMonitor headroom-head", "spec.selector.matchLabels", {"x": "y"}, "selects no pod"),
        (
            "autoscale",
            SERVICE,
            f"{POD}.spec.topologySpreadConstraints.0.labelSelector.matchLabels",
            {"headroom/part": "router"},
            "spread away from others",
        ),
    ],
    wiring_checks.ports: [
        ("single", "config", "http_options.host", "127.0.0.1", "must be 0.0.0.0"),
        ("single", "config", "http_options.port", 8001, "port serve is 8000, http_options.port 8001"),
        ("single", SERVICE, f"{CONTAINER}.ports.0.name", "http", "port serve is None"),
        ("single", SERVICE, f"{CONTAINER}.ports.1.containerPort", 9090, "exports metrics at 8080"),
        (
            "everything",
            "PodMonitor headroom-workers",
            "spec.podMetricsEndpoints.0.port",
            "metric",
            "has no port metric",
        ),
        (
            "everything",
            "PodMonitor headroom-head",
            "spec.podMetricsEndpoints.0.path",
            "/metric",
            "no route /metric",
        ),
        (
            "everything",
            "PodMonitor headroom-workers",
            "spec.podMetricsEndpoints.0",
            {"port": "serve", "path": "/metrics"},
            "once for each pod",
        ),
        (
            "everything",
            "Ingress headroom",
            "spec.rules.0.http.paths.0.backend.service.name",
            "headroom-serve-svc",
            "not to port serve of headroom",
        ),
        ("everything", "Ingress headroom", "spec.rules.0.http.paths.0.path", "/v2", "no route at /v2"),
        ("everything", "Ingress headroom", "spec.rules.0.http.paths.0.path", "/", "opens operators' routes"),
        (
            "everything",
            "Ingress headroom",
            "spec.rules.0.http.paths.0.path",
            "/admin",
            "opens operators' routes",
        ),
    ],
    wiring_checks.serve_config: [
        (
            "single",
            "config",
            f"{ARGS}.max_runing",
            3,
            "there is no option 'max_runing'; did you mean 'max_running'",
        ),
        ("single", "config", f"{ARGS}.experts", "payed", "experts='payed' must be one of"),
        ("single", "config", "applications.0.route_prefx", "/", "did you mean 'route_prefix'"),
        ("autoscale", "config", f"{ROUTER}.name", "Ruter", "there is no deployment 'Ruter'"),
        ("autoscale", "config", f"{ROUTER}.num_replica", 2, "did you mean 'num_replicas'"),
        ("single", "config", f"{ARGS}.model", "/model/x", "nothing is mounted at model=/model/x"),
        ("single", "config", f"{ARGS}.model", "models/x", "is no full path"),
        (
            "single",
            SERVICE,
            f"{HEAD}.spec.containers.0.volumeMounts.1",
            GONE,
            "head: nothing is mounted at model=",
        ),
        ("single", "config", f"{ARGS}.api_keys_file", "/models/keys.json", "is in no Secret"),
        ("single", "config", f"{ARGS}.api_keys_file", GONE, "no API keys"),
    ],
    wiring_checks.capacity: [
        ("single", "config", f"{ARGS}.gpus_per_worker", GONE, "say it"),
        ("single", "config", f"{ARGS}.gpus_per_worker", 0, "no pod for workers that ask for 0 GPUs"),
        ("single", "config", f"{ARGS}.cpus_per_worker", 0, "or the head takes them in"),
        ("single", "config", f"{ARGS}.cpus_per_router", 8, "CPUs do not hold its workers"),
        ("single", "config", f"{ARGS}.replicas", 2, "at most 1 workers fit, and max_replicas is 2"),
        (
            "single",
            SERVICE,
            "spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus",
            "2",
            "the head offers CPUs",
        ),
        ("autoscale", SERVICE, f"{GROUP}.maxReplicas", 4, "at most 4 workers fit, and max_replicas is 8"),
        ("autoscale", SERVICE, f"{GROUP}.minReplicas", 2, "at least 2 workers fit, and min_replicas is 1"),
        (
            "autoscale",
            "config",
            f"{ROUTER}.ray_actor_options.resources",
            {"ruoter": 1},
            "no room for 2 Routers",
        ),
        ("autoscale", "config", f"{ARGS}.router_replicas", 5, "no room for 5 Routers"),
        ("autoscale", SERVICE, "spec.rayClusterConfig.enableInTreeAutoscaling", False, "go together"),
        ("autoscale", SERVICE, "spec.rayClusterConfig.autoscalerOptions.version", "v1", "must be v2"),
    ],
    wiring_checks.budgets: [
        ("single", "PodDisruptionBudget headroom-workers", "spec.minAvailable", 2, "is more than there are"),
        ("single", "PodDisruptionBudget headroom-workers", "spec.minAvailable", "50%", "a whole number"),
        ("single", "PodDisruptionBudget headroom-workers", "spec", {"maxUnavailable": 1}, "a whole number"),
    ],
    wiring_checks.upgrades: [
        ("single", SERVICE, "spec.upgradeStrategy.type", "Rolling", "upgradeStrategy.type is 'Rolling'"),
        ("single", SERVICE, "spec.excludeHeadPodFromServeSvc", False, "the head carries clients' streams"),
    ],
    wiring_checks.network: [
        ("single", POLICY, "spec.ingress.1.from", [], "from anyone: serve need not be open"),
        (
            "single",
            POLICY,
            "spec.ingress.1.from.0",
            {"ipBlock": {"cidr": "0.0.0.0/0"}},
            "from anyone: serve need not",
        ),
        ("single", POLICY, "spec.ingress.1.ports", GONE, "every port need not be open"),
        ("single", POLICY, "spec.ingress.2", GONE, "kuberay-operator: 8265, serve must be open"),
        ("single", POLICY, "spec.egress", [{}], "to anyone: every port need not be open"),
        ("single", POLICY, "spec.policyTypes", ["Ingress"], "one way is not closed"),
        ("single", POLICY, "spec.ingress.1.ports.0.port", "server", "no pod has a port server"),
        (
            "single",
            POLICY,
            "spec.podSelector.matchLabels",
            {"headroom/part": "worker"},
            "is the whole service's",
        ),
        (
            "single",
            SERVICE,
            f"{POD}.metadata.labels.headroom/service",
            GONE,
            "workers: no NetworkPolicy holds for it",
        ),
        (
            "autoscale",
            "NetworkPolicy headroom-autoscaler",
            "metadata.name",
            "headroom-api",
            "needs the API server",
        ),
    ],
    schema_problems: [
        ("single", POLICY, "spec.podSelectr", {}, "podSelectr"),
        ("single", "PodDisruptionBudget headroom-head", "apiVersion", "policy/v1beta1", "no policy/v1beta1"),
        ("single", SERVICE, f"{CONTAINER}.volumeMount", [], "volumeMount"),
        ("single", SERVICE, f"{CONTAINER}.ports.0.containerPort", "8000", "8000"),
    ],
}
OF_KUBERAY: list[Plant] = [
    ("single", SERVICE, f"{GROUP}.maxReplica", 3, "maxReplica"),
    ("single", SERVICE, f"{GROUP}.groupName", GONE, "groupName"),
    ("single", SERVICE, "spec.rayClusterConfig.authOptions.mode", "tokens", "tokens"),
    ("single", SERVICE, "spec.serveConfigV3", "x", "serveConfigV3"),
    ("autoscale", SERVICE, "spec.rayClusterConfig.autoscalerOptions.version", "v3", "v3"),
]


def plant(documents: list[Document], where: str, path: str, value: Any) -> None:
    """Makes the change; a ``%`` in a path stands for a dot inside a key."""
    if where == "config":
        [service] = [document for document in documents if document["kind"] == "RayService"]
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        _set(config, path, value)
        service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
        return
    kind, name = where.split()
    [document] = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    _set(document, path, value)


def _set(inner: Any, path: str, value: Any) -> None:
    *way, last = [int(key) if key.isdigit() else key.replace("%", ".") for key in path.split(".")]
    for key in way:
        inner = inner[key]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value


def test_every_check_has_faults() -> None:
    assert set(FAULTS) == {*CHECKS, schema_problems}
    assert all(FAULTS.values())


@pytest.mark.parametrize(
    ("check", "fault"),
    [(check, fault) for check, faults in FAULTS.items() for fault in faults],
    ids=lambda value: value.__name__ if callable(value) else f"{value[2].split('.')[-1]}, {value[4]}",
)
def test_a_fault_is_named(rendered: Callable[[str], list[Document]], check: Check, fault: Plant) -> None:
    overlay, where, path, value, sentence = fault
    documents = rendered(overlay)
    plant(documents, where, path, value)
    found = [*check(documents if check is schema_problems else Deployed(documents))]
    assert any(sentence in problem for problem in found), found


@pytest.mark.skipif(not CRD.is_file(), reason="needs KubeRay's definition of a RayService")
@pytest.mark.parametrize("fault", OF_KUBERAY, ids=lambda fault: fault[4])
def test_what_kuberay_does_not_know_is_named(rendered: Callable[[str], list[Document]], fault: Plant) -> None:
    test_a_fault_is_named(rendered, schema_problems, fault)


def test_options_that_are_wrong_are_all_that_is_said(rendered: Callable[[str], list[Document]]) -> None:
    documents = rendered("single")
    plant(documents, "config", f"{ARGS}.max_runing", 3)
    [problem] = problems(documents)
    assert "did you mean 'max_running'" in problem
