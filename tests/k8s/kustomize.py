"""Renders the part of kustomize that k8s/ uses, and refuses all else; so that no test needs a kustomize binary.

Where ``kubectl`` is at hand, a test compares the two. In the order kustomize has: resources, components (each with its
own generators and patches), generators, then patches, labels, namespace, images, replacements; documents marked as
local configuration are left out at the end.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
LOCAL = "config.kubernetes.io/local-config"
KEYS = {
    "apiVersion", "kind", "resources", "components", "configMapGenerator", "generatorOptions", "labels", "namespace",
    "patches", "images", "replacements",
}  # fmt: skip
UNNAMESPACED = {"Namespace"}


class KustomizeError(ValueError):
    """What this renderer, or kustomize itself, would not take; names the file."""


def render(folder: Path) -> list[Document]:
    """The documents of a kustomization, as ``kubectl kustomize`` prints them but for their order."""
    return [document for document in _build(folder, []) if not _is_local(document)]


def load(path: Path) -> list[Document]:
    """The documents of a file; KustomizeError where a key stands twice in a map."""
    found = [document for document in yaml.load_all(path.read_text(), _Strict) if document is not None]
    # An alias is the same object twice; a patch of the one must not reach the other.
    return [json.loads(json.dumps(document)) for document in found]


class _Strict(yaml.SafeLoader):
    """Takes no key twice: YAML keeps the second without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise KustomizeError(f"{node.start_mark}: {', '.join(sorted(twice))} stands twice")
        return super().construct_mapping(node, deep)


def _build(folder: Path, documents: list[Document]) -> list[Document]:
    [content] = load(folder / "kustomization.yaml")
    unknown = set(content) - KEYS
    if unknown:
        raise KustomizeError(f"{folder}: {', '.join(sorted(unknown))} is not rendered here")
    kinds = {
        "Kustomization": "kustomize.config.k8s.io/v1beta1",
        "Component": "kustomize.config.k8s.io/v1alpha1",
    }
    if kinds.get(content.get("kind", "")) != content.get("apiVersion"):
        raise KustomizeError(
            f"{folder}: kind {content.get('kind')!r} of version {content.get('apiVersion')!r}"
        )
    for entry in content.get("resources", []):
        path = folder / entry
        if path.is_dir():
            documents = [*documents, *_build(path, [])]
        else:
            _check_inside(path, folder)
            documents = [*documents, *load(path)]
    for entry in content.get("components", []):
        documents = _build(folder / entry, documents)
    for entry in content.get("configMapGenerator", []):
        _generate(folder, entry, content.get("generatorOptions", {}), documents)
    _check_unique(folder, documents)
    for entry in content.get("patches", []):
        _patch(folder, entry, documents)
    _transform(content, documents)
    return documents


def _transform(content: Mapping[str, Any], documents: list[Document]) -> None:
    for entry in content.get("labels", []):
        if set(entry) != {"pairs"}:
            raise KustomizeError("labels: pairs alone are rendered here")
        for document in documents:
            document["metadata"].setdefault("labels", {}).update(entry["pairs"])
    for document in documents:
        if "namespace" in content and document["kind"] not in UNNAMESPACED:
            document["metadata"]["namespace"] = content["namespace"]
    for entry in content.get("images", []):
        for document in documents:
            _set_image(document, entry)
    for entry in content.get("replacements", []):
        _replace(entry, documents)


def _check_inside(path: Path, folder: Path) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise KustomizeError(f"{path} is outside {folder}: kustomize reads no such file")
    if not path.is_file():
        raise KustomizeError(f"{path} is missing")


def _check_unique(folder: Path, documents: list[Document]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise KustomizeError(f"{folder}: {twice} twice")


def _generate(
    folder: Path, entry: Mapping[str, Any], common: Mapping[str, Any], documents: list[Document]
) -> None:
    unknown = set(entry) - {"name", "files", "literals", "envs", "behavior", "options"}
    options = {**common, **entry.get("options", {})}
    unknown |= set(options) - {"disableNameSuffixHash", "labels", "annotations"}
    if unknown or not options.get("disableNameSuffixHash"):
        raise KustomizeError(
            f"{folder}: configMapGenerator of {entry.get('name')}: {unknown or 'hashed names'}"
        )
    data: dict[str, str] = {}
    for name in entry.get("files", []):
        _check_inside(folder / name, folder)
        data[Path(name).name] = (folder / name).read_text()
    lines = [*entry.get("literals", [])]
    for name in entry.get("envs", []):
        _check_inside(folder / name, folder)
        found = (folder / name).read_text().splitlines()
        lines += [line for line in found if line and not line.startswith("#")]
    for line in lines:
        key, equals, value = line.partition("=")
        if not equals:
            raise KustomizeError(f"{folder}: {line!r} is no NAME=VALUE")
        data[key] = value
    if entry.get("behavior") == "merge":
        _named(documents, "ConfigMap", entry["name"])["data"].update(data)
        return
    metadata: Document = {"name": entry["name"]}
    metadata |= {key: dict(options[key]) for key in ("labels", "annotations") if key in options}
    documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _patch(folder: Path, entry: Mapping[str, Any], documents: list[Document]) -> None:
    if set(entry) not in ({"target", "path"}, {"target", "patch"}) or set(entry["target"]) != {
        "kind",
        "name",
    }:
        raise KustomizeError(f"{folder}: a patch has a target (kind, name), and a path or itself: {entry}")
    document = _named(documents, entry["target"]["kind"], entry["target"]["name"])
    if "path" in entry:
        _check_inside(folder / entry["path"], folder)
        [operations] = load(folder / entry["path"])
    else:
        operations = yaml.load(entry["patch"], _Strict)
    if not isinstance(operations, list):
        raise KustomizeError(
            f"{folder}: only JSON patches are rendered here: lists of a custom resource cannot be merged"
        )
    for operation in operations:
        _apply(document, operation, folder)


def _apply(document: Document, operation: Mapping[str, Any], folder: Path) -> None:
    verb, pointer = operation["op"], operation["path"]
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    inner: Any = document
    try:
        for part in way:
            inner = inner[int(part)] if isinstance(inner, list) else inner[part]
        key: Any = len(inner) if last == "-" else int(last) if isinstance(inner, list) else last
        if verb == "add":
            value = copy.deepcopy(operation["value"])
            inner.insert(key, value) if isinstance(inner, list) else inner.__setitem__(key, value)
            return
        found = inner[key]
    except (KeyError, IndexError, TypeError) as error:
        raise KustomizeError(f"{folder}: nothing at {pointer}: {error}") from error
    if verb == "replace":
        inner[key] = copy.deepcopy(operation["value"])
    elif verb == "remove":
        del inner[key]
    elif verb == "test":
        if found != operation["value"]:
            raise KustomizeError(f"{folder}: {pointer} is {found!r}, not {operation['value']!r}")
    else:
        raise KustomizeError(f"{folder}: {verb} is not rendered here")


def _named(documents: list[Document], kind: str, name: str) -> Document:
    found = [entry for entry in documents if (entry["kind"], entry["metadata"]["name"]) == (kind, name)]
    if len(found) != 1:
        raise KustomizeError(f"there is no {kind} {name}")
    return found[0]


def _set_image(document: Document, entry: Mapping[str, Any]) -> None:
    if set(entry) - {"name", "newName", "newTag"}:
        raise KustomizeError(f"images: {entry} is not rendered here")

    def visit(container: Document) -> None:
        name, _, tag = container["image"].rpartition(":")
        if name == entry["name"]:
            container["image"] = f"{entry.get('newName', name)}:{entry.get('newTag', tag)}"

    each_container(document, visit)


def each_container(value: Any, visit: Callable[[Document], None]) -> None:
    """Calls ``visit`` for every container anywhere in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("containers", "initContainers"):
                for container in inner:
                    visit(container)
            else:
                each_container(inner, visit)
    elif isinstance(value, list):
        for inner in value:
            each_container(inner, visit)


def _replace(entry: Mapping[str, Any], documents: list[Document]) -> None:
    source = entry["source"]
    found = re.fullmatch(r"data\.\[(.+)\]", source["fieldPath"])
    if found is None:
        raise KustomizeError(f"replacements: {source['fieldPath']} is not rendered here")
    value = _named(documents, source["kind"], source["name"])["data"][found[1]]
    for target in entry["targets"]:
        document = _named(documents, **target["select"])
        for path in target["fieldPaths"]:
            *way, last = path.split(".")
            inner = document
            for part in way:
                inner = inner[part]
            if last not in inner and target.get("options") != {"create": True}:
                raise KustomizeError(f"replacements: nothing at {path}")
            inner[last] = value


def _is_local(document: Document) -> bool:
    return document["metadata"].get("annotations", {}).get(LOCAL) == "true"
