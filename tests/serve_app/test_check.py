"""The check of a Serve configuration: the one in the manual is sound, and every wrong key is named in a sentence."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GOOD = ROOT / "docs" / "serve.yaml"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def good() -> Any:
    """The file in the manual."""
    return yaml.safe_load(GOOD.read_text())


def test_the_manuals_file_is_sound(good: Any) -> None:
    from serve_app.check import problems_of

    assert problems_of(good) == []


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("aplications",), [], "the file: there is no key 'aplications'; did you mean 'applications'"),
        (("http_options", "prot"), 1, "http_options: there is no key 'prot'; did you mean 'port'"),
        (("applications", 0, "route_prefx"), "/", "did you mean 'route_prefix'"),
        (("applications", 0, "args", "replica"), 2, "there is no option 'replica'; did you mean 'replicas'"),
        (("applications", 0, "args", "dtype"), "int3", "dtype='int3' must be one of"),
        (("applications", 0, "deployments", 1, "num_replica"), 2, "did you mean 'num_replicas'"),
        (
            ("applications", 0, "deployments", 1, "name"),
            "Wroker",
            "no deployment 'Wroker', only Router, Worker",
        ),
        (
            ("applications", 0, "deployments", 1, "ray_actor_options", "num_gpu"),
            1,
            "ray_actor_options: there is no key 'num_gpu'; did you mean 'num_gpus'",
        ),
        (("applications", 0, "deployments", 1, "max_ongoing_requests"), "many", "max_ongoing_requests"),
    ],
)
def test_what_is_wrong_is_named(good: Any, path: tuple[Any, ...], value: Any, sentence: str) -> None:
    from serve_app.check import problems_of

    content = copy.deepcopy(good)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert any(sentence in problem for problem in problems_of(content)), problems_of(content)


@pytest.mark.parametrize("content", [None, [], {"applications": 3}, {"applications": [3]}])
def test_what_is_no_configuration_is_said_to_be_none(content: Any) -> None:
    from serve_app.check import problems_of

    assert problems_of(content)


def test_the_command_fails_for_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(GOOD.read_text().replace("max_running:", "max_runing:"))
    command = [sys.executable, "-W", "ignore", "-m", "serve_app.check"]
    done = subprocess.run([*command, str(wrong)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no option 'max_runing'; did you mean 'max_running'" in done.stderr
