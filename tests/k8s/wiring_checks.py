"""Checks of how documents fit together: selectors, ports, options, scaling, network. They answer sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from serve_app.http.admin import ADMIN_PATHS
from tests.k8s.deployed import Deployed, Pods, quantity
from tests.k8s.kustomize import Document
from tests.k8s.pod_checks import app_routes

ANYONE = "anyone"
OPEN_INSIDE = {
    # who: which ports of the pods
    ("from", "headroom/service=headroom"): {"every port"},
    ("from", "namespace headroom-client=true"): {"serve"},
    ("from", "headroom-client=true"): {"serve"},
    ("from", "app.kubernetes.io/name=kuberay-operator"): {"8265", "serve"},
    ("to", "headroom/service=headroom"): {"every port"},
    ("to", "namespace kubernetes.io/metadata.name=kube-system"): {"53"},
}
"""What must be open, of the service's pods, and nothing beside it but what a component adds."""
OPEN_FOR = {
    "headroom-autoscaler": {("to", ANYONE): {"443", "6443"}},
    "headroom-scrape": {
        ("from", "app.kubernetes.io/name=prometheus"): {"metrics", "as-metrics", "dash-metrics", "serve"}
    },
    "headroom-to-collector": {("to", "app.kubernetes.io/name=opentelemetry-collector"): {"4318"}},
    "headroom-redis": {
        ("from", "headroom/part=head"): {"redis"},
        ("from", "ray.io/node-type=redis-cleanup"): {"redis"},
    },
    "headroom-head-to-redis": {("to", "headroom/part=redis"): {"redis"}},
}


def selectors(deployed: Deployed) -> Iterator[str]:
    """Whatever selects pods selects some."""
    for document in deployed.documents:
        spec = document.get("spec", {})
        where = f"{document['kind']} {document['metadata']['name']}"
        found = [spec.get("podSelector")] if document["kind"] == "NetworkPolicy" else []
        if document["kind"] in ("PodDisruptionBudget", "PodMonitor", "StatefulSet"):
            found.append(spec.get("selector"))
        if document["kind"] == "Service":
            found.append({"matchLabels": spec.get("selector")})
        for selector in found:
            if not selector or not deployed.selected(selector.get("matchLabels") or {"none": "given"}):
                yield f"{where} selects no pod: {selector}"
    for name, template in deployed.templates():
        for constraint in template["spec"].get("topologySpreadConstraints", []):
            labels = constraint["labelSelector"]["matchLabels"]
            if not labels.items() <= template["metadata"]["labels"].items():
                yield f"{name}: its pods spread away from others than themselves"
    for pods in deployed.pods:
        if any(key.startswith(("ray.io/", "app.kubernetes.io/")) for key in pods.labels):
            yield f"{pods.name}: a label that KubeRay sets itself"


def ports(deployed: Deployed) -> Iterator[str]:
    """Port names and numbers agree wherever one is named."""
    http = deployed.config.get("http_options", {})
    if http.get("host") != "0.0.0.0":
        yield "http_options.host must be 0.0.0.0: nobody outside a pod reaches another"
    for pods in deployed.pods:
        if pods.ports.get("serve") != http.get("port"):
            yield f"{pods.name}: port serve is {pods.ports.get('serve')}, http_options.port {http.get('port')}"
        if pods.ports.get("metrics") != 8080:
            yield f"{pods.name}: KubeRay exports metrics at 8080"
    for document in deployed.of_kind("PodMonitor"):
        chosen = _monitored(deployed, document)
        for endpoint in document["spec"]["podMetricsEndpoints"]:
            for name, template in chosen:
                if endpoint["port"] not in _port_names(template):
                    yield f"{document['metadata']['name']}: {name} has no port {endpoint['port']}"
            if endpoint["port"] == "serve":
                if endpoint.get("path") not in app_routes():
                    yield f"{document['metadata']['name']}: no route {endpoint.get('path')}"
                if [name for name, _ in chosen] != ["head"]:
                    yield f"{document['metadata']['name']}: the application's figures, once for each pod"
    service = (
        deployed.service["spec"].get("serveService", {}).get("metadata", {}).get("name", "headroom-serve-svc")
    )
    for document in deployed.of_kind("Ingress"):
        yield from _ingress(document, service)


def _ingress(document: Document, service: str) -> Iterator[str]:
    routes = app_routes()
    for rule in document["spec"]["rules"]:
        for path in rule["http"]["paths"]:
            asked, backend = path["path"], path["backend"]["service"]
            if (backend["name"], backend["port"].get("name")) != (service, "serve"):
                yield f"Ingress: {asked} goes to {backend}, not to port serve of {service}"
            exact = path["pathType"] == "Exact"
            covered = {
                r
                for r in routes
                if r == asked or (not exact and (r + "/").startswith(asked.rstrip("/") + "/"))
            }
            if not covered:
                yield f"Ingress: no route at {asked}"
            if any(r.startswith((*ADMIN_PATHS, "/metrics")) for r in covered):
                yield f"Ingress: {asked} opens operators' routes"


def _monitored(deployed: Deployed, document: Document) -> list[tuple[str, Document]]:
    selector = document["spec"]["selector"]
    found = deployed.selected(selector["matchLabels"])
    for entry in selector.get("matchExpressions", []):
        assert entry["operator"] == "NotIn"
        found = [f for f in found if f[1]["metadata"]["labels"].get(entry["key"]) not in entry["values"]]
    return found


def _port_names(template: Document) -> set[str]:
    containers = template["spec"]["containers"]
    return {port["name"] for container in containers for port in container.get("ports", [])}


def serve_config(deployed: Deployed) -> Iterator[str]:
    """The application's own check of it; and every file that it names lies in every pod, keys in a Secret."""
    from serve_app.check import problems_of  # warns of Ray's own while it is imported

    found = problems_of(deployed.config)
    yield from found
    if found:
        return
    args = deployed.args
    for pods in deployed.pods:
        for option in ("model", "models_file", "api_keys_file", "chat_template"):
            path = getattr(args, option)
            volume = pods.mounted(path) if path else None
            if path and not path.startswith("/"):
                yield f"{option}={path} is no full path"
            elif path and volume is None and not path.startswith("/app/"):
                yield f"{pods.name}: nothing is mounted at {option}={path}"
            elif option == "api_keys_file" and path and "secret" not in (volume or {}):
                yield f"{pods.name}: {option}={path} is in no Secret"
    if any(pods.num_gpus for pods in deployed.pods) and not args.api_keys_file:
        yield "no API keys: everybody who gets in is served, and no operator is"


def capacity(deployed: Deployed) -> Iterator[str]:
    """Every Router and Worker finds a pod, none finds the head, and the two scalers have the same bounds."""
    args = deployed.args
    if args.gpus_per_worker < 0:
        yield "gpus_per_worker is left to what the cluster has when the configuration comes: say it"
    if not args.cpus_per_worker or not args.cpus_per_router:
        yield "cpus_per_worker and cpus_per_router must be above 0, or the head takes them in"
    if quantity(deployed.pods[0].start.get("num-cpus", 1)):
        yield "the head offers CPUs"
    routers = _router_options(deployed)
    for name, each in routers.items():
        room = sum(_resources(pods).get(name, 0) // each * pods.least for pods in deployed.pods)
        if room < args.router_replicas:
            yield f"no room for {args.router_replicas} Routers that ask for {routers}"
    workers = [pods for pods in deployed.pods[1:] if bool(pods.num_gpus) == bool(args.gpus_per_worker)][:1]
    if not workers:
        yield f"no pod for workers that ask for {args.gpus_per_worker:g} GPUs"
        return
    [group] = workers
    yield from _bounds(deployed, group, group.num_gpus if args.gpus_per_worker else 1)
    cpus = quantity(group.start["num-cpus"])
    beside = 0 if routers else args.router_replicas * args.cpus_per_router
    if cpus < max(1, group.num_gpus) * args.cpus_per_worker + beside:
        yield f"{group.name}: {cpus:g} CPUs do not hold its workers and {beside:g} Routers"


def _bounds(deployed: Deployed, group: Pods, each: int) -> Iterator[str]:
    args = deployed.args
    most = args.max_replicas or args.replicas
    least = args.min_replicas if args.max_replicas else args.replicas
    if group.most * each != most:
        yield f"{group.name}: at most {group.most * each} workers fit, and max_replicas is {most}"
    if group.least * each != least:
        yield f"{group.name}: at least {group.least * each} workers fit, and min_replicas is {least}"
    scales = bool(deployed.cluster.get("enableInTreeAutoscaling"))
    if scales != (group.least < group.most) or scales != bool(args.max_replicas):
        yield "Ray's autoscaler and the application's scaling go together"
    if scales and deployed.cluster["autoscalerOptions"].get("version") != "v2":
        yield "the autoscaler must be v2"


def _router_options(deployed: Deployed) -> dict[str, float]:
    """The custom resources that Routers ask for."""
    for entry in deployed.config["applications"][0].get("deployments", []):
        if entry["name"] == "Router":
            found: dict[str, float] = entry.get("ray_actor_options", {}).get("resources", {})
            return found
    return {}


def _resources(pods: Pods) -> dict[str, Any]:
    text = pods.start.get("resources", '"{}"')
    # KubeRay hands it to a shell as it is: quotes around, and a backslash before each inside.
    found: dict[str, Any] = json.loads(json.loads(text))
    return found


def budgets(deployed: Deployed) -> Iterator[str]:
    """Budgets of the kind that pods of a custom resource can have, and none that no number of pods could meet."""
    for document in deployed.of_kind("PodDisruptionBudget"):
        name, spec = document["metadata"]["name"], document["spec"]
        least = spec.get("minAvailable")
        if "maxUnavailable" in spec or not isinstance(least, int):
            yield f"{name}: pods of a custom resource take a whole number of minAvailable only"
            continue
        labels = spec["selector"]["matchLabels"]
        pods = [entry for entry in deployed.pods if labels.items() <= entry.labels.items()]
        if least > sum(entry.least for entry in pods):
            yield f"{name}: minAvailable {least} is more than there are"


def upgrades(deployed: Deployed) -> Iterator[str]:
    """A strategy that KubeRay knows."""
    kind = deployed.service["spec"].get("upgradeStrategy", {}).get("type")
    if kind not in ("None", "NewCluster"):
        yield f"upgradeStrategy.type is {kind!r}"
    if deployed.service["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "the head carries clients' streams"


def network(deployed: Deployed) -> Iterator[str]:
    """Exactly what is needed is open."""
    policies = {d["metadata"]["name"]: d["spec"] for d in deployed.of_kind("NetworkPolicy")}
    for name, spec in policies.items():
        expected = OPEN_INSIDE if name == "headroom" else OPEN_FOR.get(name, {})
        found = _opened(spec)
        for key in sorted({*expected, *found}):
            much, less = (
                found.get(key, set()) - expected.get(key, set()),
                expected.get(key, set()) - found.get(key, set()),
            )
            if much:
                yield f"NetworkPolicy {name}: {' '.join(key)}: {', '.join(sorted(much))} need not be open"
            if less:
                yield f"NetworkPolicy {name}: {' '.join(key)}: {', '.join(sorted(less))} must be open"
        yield from _named_ports(deployed, name, spec)
    own = policies.get("headroom", {})
    if own.get("podSelector") != {"matchLabels": {"headroom/service": "headroom"}}:
        yield "no NetworkPolicy is the whole service's"
    if set(own.get("policyTypes", [])) != {"Ingress", "Egress"}:
        yield "NetworkPolicy headroom: one way is not closed"
    for pods in deployed.pods:
        if pods.labels.get("headroom/service") != "headroom":
            yield f"{pods.name}: no NetworkPolicy holds for it"
    if bool(deployed.cluster.get("enableInTreeAutoscaling")) != ("headroom-autoscaler" in policies):
        yield "the autoscaler alone needs the API server, and needs it"


def _opened(spec: Document) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for way, key in (("from", "ingress"), ("to", "egress")):
        for rule in spec.get(key, []):
            opened = {str(entry.get("port", "every port")) for entry in rule.get("ports", [{}])}
            for peer in rule.get(way) or [{}]:
                found.setdefault((way, _who(peer)), set()).update(opened)
    return found


def _who(peer: Document) -> str:
    if set(peer) == {"podSelector"} or (
        set(peer) == {"podSelector", "namespaceSelector"} and not peer["namespaceSelector"]
    ):
        return _labels(peer["podSelector"]) or ANYONE
    if set(peer) == {"namespaceSelector"} and peer["namespaceSelector"]:
        return f"namespace {_labels(peer['namespaceSelector'])}"
    return ANYONE


def _labels(selector: Document) -> str:
    return ",".join(f"{key}={value}" for key, value in selector.get("matchLabels", {}).items())


def _named_ports(deployed: Deployed, name: str, spec: Document) -> Iterator[str]:
    chosen = deployed.selected(spec["podSelector"].get("matchLabels", {}))
    known = {port for _, template in chosen for port in _port_names(template)}
    for rule in spec.get("ingress", []):
        for entry in rule.get("ports", []):
            if isinstance(entry.get("port"), str) and entry["port"] not in known:
                yield f"NetworkPolicy {name}: no pod has a port {entry['port']}"
