"""Prints what the project depends on, a line each, with the extras named: ``python dependencies.py [EXTRA ...]``.

An image installs these before it has the sources. KeyError for an extra that pyproject.toml does not have.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def dependencies(project_file: Path, extras: list[str]) -> list[str]:
    """Requirements of the project and of its extras."""
    project = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(dependencies(Path("pyproject.toml"), sys.argv[1:])))
