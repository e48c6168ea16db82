"""Checks a Serve configuration file before it is deployed: ``python -m serve_app.check FILE``.

Serve ignores keys of a deployment's entry that it does not know, and finds what is wrong with the arguments only on
the cluster. Here every unknown key and every wrong option is named, each in a sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from serve_app.build import deployment_names
from serve_app.config import AppArgs, unknown_name
from worker.errors import ConfigError

IMPORT_PATH = "serve_app:app"


def problems_of(content: Any) -> list[str]:
    """What is wrong with a file's content; empty for a good one."""
    if not isinstance(content, Mapping) or not isinstance(content.get("applications"), list):
        return ["the file must be a map with a list of `applications`"]
    found = _unknown(content, ServeDeploySchema, "the file")
    if isinstance(content.get("http_options"), Mapping):
        found += _unknown(content["http_options"], HTTPOptionsSchema, "http_options")
    for index, entry in enumerate(content["applications"]):
        found += _application_problems(entry, f"applications.{index}")
    if not found:
        try:
            ServeDeploySchema.model_validate(content)
        except ValidationError as error:
            found += [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return found


def _application_problems(entry: Any, where: str) -> list[str]:
    if not isinstance(entry, Mapping):
        return [f"{where} must be a map"]
    found = _unknown(entry, ServeApplicationSchema, where)
    if entry.get("import_path") != IMPORT_PATH:
        return found  # not ours: its arguments are not known here
    known: list[str] = []
    try:
        args = AppArgs.model_validate(entry.get("args") or {})
        known = deployment_names(args)
    except ValidationError as error:
        found += [f"{where}.args: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
    except ConfigError as error:
        found += [f"{where}.args: {problem}" for problem in error.problems]
    for number, deployment in enumerate(entry.get("deployments") or []):
        found += _deployment_problems(deployment, f"{where}.deployments.{number}", known)
    return found


def _deployment_problems(entry: Any, where: str, known: list[str]) -> list[str]:
    if not isinstance(entry, Mapping):
        return [f"{where} must be a map"]
    found = _unknown(entry, DeploymentSchema, where)
    if known and entry.get("name") not in known:
        found.append(f"{where}: there is no deployment {entry.get('name')!r}, only {', '.join(known)}")
    if isinstance(entry.get("ray_actor_options"), Mapping):
        options = entry["ray_actor_options"]
        found += _unknown(options, RayActorOptionsSchema, f"{where}.ray_actor_options")
    return found


def _unknown(given: Mapping[Any, Any], schema: type[BaseModel], where: str) -> list[str]:
    known = [*schema.model_fields, *(f.alias for f in schema.model_fields.values() if f.alias)]
    return [f"{where}: {unknown_name(str(name), known, 'key')}" for name in given if name not in known]


def main(arguments: list[str]) -> int:
    """Prints what is wrong; 1 if anything is."""
    if len(arguments) != 1:
        print("usage: python -m serve_app.check FILE", file=sys.stderr)
        return 2
    try:
        content = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    found = problems_of(content)
    for problem in found:
        print(f"{arguments[0]}: {problem}", file=sys.stderr)
    if not found:
        print(f"{arguments[0]} is sound")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
