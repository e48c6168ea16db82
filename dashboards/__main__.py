"""Writes the dashboards and the alert rules into this folder, or, with ``--check``, says which of them are stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from dashboards import alerts, experts, memory, serving
from dashboards.grafana import as_json

FOLDER = Path(__file__).resolve().parent
HEAD = "# Written by `python -m dashboards`; see dashboards/alerts.py.\n"


def files() -> dict[str, str]:
    """Each file's text, by its name."""
    found = {
        f"{name}.json": json.dumps(as_json(module.DASHBOARD), indent=1) + "\n"
        for name, module in (("serving", serving), ("memory", memory), ("experts", experts))
    }
    found["alerts.yaml"] = HEAD + yaml.safe_dump(alerts.as_yaml(), sort_keys=False, width=120)
    # The same for the Prometheus operator, which kustomization.yaml beside it deploys.
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "headroom"},
        "spec": alerts.as_yaml(),
    }
    found["prometheus-rule.yaml"] = HEAD + yaml.safe_dump(rule, sort_keys=False, width=120)
    return found


def main(arguments: list[str]) -> int:
    """The exit code: 1 where ``--check`` finds a file that is not what would be written."""
    stale = [name for name, text in files().items() if _read(FOLDER / name) != text]
    if "--check" in arguments:
        print("\n".join(f"dashboards/{name} is stale: run python -m dashboards" for name in stale))
        return int(bool(stale))
    for name in stale:
        (FOLDER / name).write_text(files()[name])
        print(f"wrote dashboards/{name}")
    return 0


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
