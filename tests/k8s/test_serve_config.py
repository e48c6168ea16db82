"""The very options that the overlays deploy, through the application's own builder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.tokenizers import write_model_folder
from tests.k8s.deployed import OVERLAYS, ROOT, Deployed
from tests.k8s.kustomize import Document

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_builder_takes_an_overlays_options(
    rendered: Callable[[str], list[Document]], name: str, tmp_path: Any
) -> None:
    from serve_app.build import app

    given = dict(Deployed(rendered(name)).config["applications"][0]["args"])
    # As deployed, but for files that lie elsewhere here.
    if name == "demo-cpu":
        given["model"] = str(ROOT / given["model"].removeprefix("/app/"))
    else:
        given["model"] = str(write_model_folder(tmp_path / "model"))
        keys = tmp_path / "keys.json"
        keys.write_text('{"keys": []}')
        given["api_keys_file"] = str(keys)
    args = Deployed(rendered(name)).args.model_validate(given)
    made = app(args)._bound_deployment
    [worker] = [entry._bound_deployment for entry in made.init_args[1:]]
    assert made.ray_actor_options["num_cpus"] == worker.ray_actor_options["num_cpus"] == 1
    assert worker.ray_actor_options.get("num_gpus", 0) == (0 if name == "demo-cpu" else 1)
    scaling = worker._deployment_config.autoscaling_config
    bounds = None if scaling is None else (scaling.min_replicas, scaling.max_replicas)
    assert bounds == ((1, 8) if name == "autoscale" else None)
