"""The image: what its file copies is there, what it installs is locked, it holds no model, and it starts as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.deployed import K8S, ROOT, locked, project
from tests.k8s.loading import script

DOCKERFILE = K8S / "Dockerfile"
IGNORED = K8S / "Dockerfile.dockerignore"
LEAST_PINNED = re.compile(r"^[\w.-]+==[\w.]+$")


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each instruction, continued lines joined, comments gone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def problems(text: str, ignored: str) -> Iterator[str]:
    """What is wrong with a Dockerfile and its list of what is sent to the builder."""
    found = instructions(text)
    stages: list[list[tuple[str, str]]] = []
    for name, rest in found:
        if name == "FROM":
            stages.append([])
        if stages:
            stages[-1].append((name, rest))
    sent = [line.removeprefix("!") for line in ignored.splitlines() if line.startswith("!")]
    if "*" not in ignored.splitlines():
        yield "the builder gets everything, models and keys too"
    for name, rest in found:
        if name in ("COPY", "ADD"):
            yield from _copied(rest, sent)
        if name == "ADD":
            yield "ADD fetches and unpacks; COPY does not"
        if name == "ARG" and rest.startswith("BASE=") and not re.search(r":[\w.-]*\d", rest):
            yield f"the base {rest} has no fixed tag"
        if name == "RUN":
            yield from _run(rest)
    for stage in stages:
        users = [rest for name, rest in stage if name == "USER"]
        if (users or len(stage) > 1) and users[-1:] != ["1000:1000"]:
            yield f"a stage ends as user {users[-1:]}"
    if stages[-1] != [("FROM", "runtime")]:
        yield "the image that no --target names is not the one without a model"
    runtime = stages[0]
    if any(name == "COPY" and rest.split()[0].startswith("demo") for name, rest in runtime):
        yield "a model in the image"
    if not any(name == "ENV" and "NVIDIA_VISIBLE_DEVICES=void" in rest.split() for name, rest in runtime):
        yield "pods that asked for no GPU see all of their node"
    if not any(name == "ENTRYPOINT" and rest.startswith('["/usr/bin/tini"') for name, rest in runtime):
        yield "nobody reaps what Ray leaves behind"


def _copied(rest: str, sent: list[str]) -> Iterator[str]:
    for source in [word for word in rest.split() if not word.startswith("--")][:-1]:
        if not (ROOT / source).exists():
            yield f"COPY of {source}, which does not exist"
        elif not any(source == entry or source.startswith(entry + "/") for entry in sent):
            yield f"COPY of {source}, which .dockerignore keeps back"


def _run(rest: str) -> Iterator[str]:
    for command in re.split(r"&&|\|\|", rest):
        words = command.split()
        if words[:2] == ["pip", "install"]:
            if "--no-cache-dir" not in words:
                yield f"a cache stays in the image: {command.strip()}"
            if not {"--constraint", "--no-deps"} & set(words):
                yield f"versions are left open: {command.strip()}"
        if "apt-get" in words and "install" in words and "--no-install-recommends" not in words:
            yield "apt-get installs what is only recommended"
    if "apt-get" in rest and "rm -rf /var/lib/apt/lists" not in rest:
        yield "lists of packages stay in the image"


def test_the_dockerfile_is_sound() -> None:
    assert [*problems(DOCKERFILE.read_text(), IGNORED.read_text())] == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("COPY memory memory", "COPY memry memory", "memry, which does not exist"),
        ("COPY memory memory", "COPY docs docs", "docs, which .dockerignore keeps back"),
        ("COPY memory memory", "ADD memory memory", "ADD fetches"),
        ("COPY memory memory", "COPY demo demo", "a model in the image"),
        ("nvidia/cuda:13.0.2-base-ubuntu24.04", "nvidia/cuda:latest", "no fixed tag"),
        ("USER 1000:1000\nEXPOSE", "EXPOSE", "a stage ends as user"),
        ("USER 1000:1000\nCMD", "CMD", "a stage ends as user"),
        ("--no-cache-dir --no-deps", "--no-deps", "a cache stays"),
        ("--constraint /tmp/versions.txt --requirement", "--requirement", "versions are left open"),
        ("--no-install-recommends", "", "only recommended"),
        ("&& rm -rf /var/lib/apt/lists/* ", "", "lists of packages"),
        ('["/usr/bin/tini", "-g", "--", ', "[", "nobody reaps"),
        ("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=all", "see all of their node"),
        ("\nFROM runtime\n", "\n", "not the one without a model"),
    ],
)
def test_a_fault_of_the_dockerfile_is_named(old: str, new: str, sentence: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    found = [*problems(text.replace(old, new), IGNORED.read_text())]
    assert any(sentence in problem for problem in found), found


def test_the_builder_gets_no_more_than_it_needs() -> None:
    everything = IGNORED.read_text().replace("*\n", "", 1)
    assert "the builder gets everything, models and keys too" in [
        *problems(DOCKERFILE.read_text(), everything)
    ]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="where hadolint is installed")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_image_installs_is_what_the_project_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("dependencies")
    found = module.dependencies(ROOT / "pyproject.toml", ["gpu"])
    assert found[: len(project()["dependencies"])] == project()["dependencies"]
    names = {re.split(r"[\[<>=;]", entry)[0].strip().lower() for entry in found}
    gpu = [line for line in (K8S / "image" / "gpu.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(LEAST_PINNED.match(line) for line in gpu)
    for name in names - {line.split("==")[0] for line in gpu}:
        assert name == "triton" or locked(name)
    with pytest.raises(KeyError):
        module.dependencies(ROOT / "pyproject.toml", ["gpus"])


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        (["model=/models/a", "replicas=2"], "serve run serve_app:app model=/models/a replicas=2 at 0.0.0.0"),
        (["ray", "status"], "ray status at "),
    ],
)
def test_the_entrypoint_serves_options_and_runs_commands(
    tmp_path: Path, arguments: list[str], ran: str
) -> None:
    for name in ("serve", "ray"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\necho "${0##*/} $* at $RAY_SERVE_DEFAULT_HTTP_HOST"\n')
        program.chmod(0o755)
    command = [str(K8S / "image" / "entrypoint.sh"), *arguments]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == ran.strip()
