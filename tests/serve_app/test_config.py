"""Options: typed, unknown ones refused by name, the environment as a fallback, and nothing of a worker forgotten."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_app.config import AppArgs, option_names
from worker.config import WorkerConfig
from worker.errors import ConfigError


def test_strings_from_a_command_line_become_values() -> None:
    args = AppArgs.model_validate(
        {"engine": "fake", "replicas": "2", "deterministic": "true", "split_ratio": "0.25"}
    )
    assert (args.replicas, args.worker.deterministic, args.worker.split_ratio) == (2, True, 0.25)


def test_sizes_may_be_written_with_units() -> None:
    sizes = {"arena_bytes": "1.5 GiB", "host_tier_bytes": "2e9", "max_body_bytes": "5MB"}
    args = AppArgs.model_validate({"engine": "fake", **sizes})
    assert (args.worker.arena_bytes, args.worker.host_tier_bytes) == (3 << 29, 2_000_000_000)
    assert args.max_body_bytes == 5_000_000
    with pytest.raises(
        ValidationError, match="expert_bytes: '4 pages' is no number of bytes: write 24e9, 24GB"
    ):
        AppArgs.model_validate({"engine": "fake", "experts": "paged", "expert_bytes": "4 pages"})


def test_every_option_of_a_worker_is_an_option_here_with_the_same_default() -> None:
    assert {entry.name for entry in fields(WorkerConfig)} <= set(option_names())
    assert AppArgs(engine="fake").worker == WorkerConfig(model="", engine="fake")
    config = AppArgs(model="/models/zebra/", max_running=3).worker_config()
    assert (config.model, config.served_name, config.max_running) == ("/models/zebra/", "zebra", 3)


def test_an_unknown_option_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(ValidationError, match="there is no option 'replica'; did you mean 'replicas'"):
        AppArgs.model_validate({"engine": "fake", "replica": "2"})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"engine": "native", "dtype": "int3", "page_tokens": "3", "log_level": "loud"})
    for word in ("model=", "dtype='int3'", "page_tokens=3", "log_level='loud'"):
        assert word in str(caught.value)


def test_the_environment_fills_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_MAX_QUEUE", "7")
    monkeypatch.setenv("HEADROOM_REPLICAS", "3")
    monkeypatch.setenv("HEADROOM_SOMETHING_ELSE", "x")
    args = AppArgs.model_validate({"engine": "fake", "replicas": "2"})
    assert (args.max_queue, args.replicas) == (7, 2)


@pytest.mark.parametrize("module", ["serve_app", "serve_app.http.routes", "serve_app.deployments.backend"])
def test_the_service_without_its_deployments_needs_neither_ray_nor_torch(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_builder_starts_without_torch_and_transformers() -> None:
    code = "import serve_app, sys; serve_app.app; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_several_models_share_options_and_have_their_own(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("small: {model: /m/a, max_running: 4}\nlarge:\n  model: /m/b\n  replicas: 2\n")
    args = AppArgs.model_validate({"models_file": str(file), "engine": "fake", "max_running": "9"})
    small, large = args.per_model()
    assert (small.name, small.model, small.worker.max_running, small.replicas) == ("small", "/m/a", 4, 1)
    assert (large.name, large.model, large.worker.max_running, large.replicas) == ("large", "/m/b", 9, 2)
    assert large.worker.engine == "fake"
    assert AppArgs(engine="fake").per_model()[0].name == "fake"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "must map"),
        ("a: 1", "must map"),
        ("", "must map"),
        ("a: {model: x, replica: 2}", "model 'a'.*did you mean 'replicas'"),
        ("a: {served_name: b}", "own key"),
        ("a: {", "models_file"),
    ],
)
def test_a_wrong_file_of_models_is_refused_by_name(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"(?s){reason}"):
        AppArgs(models_file=str(file), engine="fake").per_model()


def test_one_model_and_a_file_of_models_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        AppArgs(models_file="x", model="y")


def test_scaling_rules_come_as_json_and_are_checked() -> None:
    args = AppArgs.model_validate(
        {"engine": "fake", "max_replicas": "3", "scaling_rules": '{"up_factor": 2}'}
    )
    assert args.scaling_rules == {"up_factor": 2.0}
    for wrong, reason in (
        ({"max_replicas": 3, "scaling_rules": '{"up_facto": 2}'}, "did you mean 'up_factor'"),
        ({"max_replicas": 3, "scaling_rules": "{"}, "scaling_rules"),
        ({"scaling_rules": '{"up_factor": 2}'}, "needs max_replicas"),
        ({"max_replicas": 2, "replicas": 3}, "must lie between"),
        ({"replicas": 0}, "replicas=0 needs max_replicas="),
        ({"max_replicas": 2, "min_replicas": 2}, "must lie between"),
    ):
        with pytest.raises(ValidationError, match=reason):
            AppArgs.model_validate({"engine": "fake", **wrong})


def test_with_max_replicas_serve_gets_the_scaling_policy() -> None:
    # In a process of its own, so that these tests need no Ray.
    code = (
        "from serve_app.build import worker_deployment as make; from serve_app.config import AppArgs as A;"
        "d = make(A(engine='fake', max_replicas=3, scaling_rules={'up_factor': 2.0}, scaling_interval_s=0.5), 'W');"
        "s = d._deployment_config.autoscaling_config;"
        "print(s.min_replicas, s.max_replicas, s.policy.policy_kwargs, s.policy.get_policy().__name__);"
        "print(s.metrics_interval_s, s.look_back_period_s > s.metrics_interval_s);"
        "print(make(A(engine='fake', replicas=2), 'W').num_replicas)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "1 3 {'up_factor': 2.0} ScalingPolicy",
        "0.5 True",
        "2",
    ], done.stderr
