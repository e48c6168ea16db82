"""Rooms and arrows are checked by machine: each planted violation is caught, and the tree as it stands is clean."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("serve_app", "worker", "memory", "kernels")
PURE = (
    "memory.ledger",
    "memory.api",
    "worker.api",
    "worker.config",
    "worker.scheduling",
    "serve_app.policies",
)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {program}", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the rooms and their contracts, to plant violations in."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("memory/planted.py", "import worker.api", "Rooms import downwards only"),
        ("memory/ledger/planted.py", "import torch", "The ledger and memory's face are pure"),
        (
            "worker/scheduling/planted.py",
            "import torch",
            "Scheduling, the advisor and worker's face are pure",
        ),
        ("serve_app/policies/planted.py", "import ray", "Policies are pure"),
        ("worker/planted.py", "import ray", "Only serve_app knows Ray, HTTP and tracing"),
        (
            "serve_app/planted.py",
            "import worker.scheduling.step",
            "serve_app sees worker's face and no torch",
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(tree: Path, module: str, line: str, contract: str) -> None:
    (tree / module).write_text(f'"""Planted."""\n{line}\n')
    checked = lint_imports(tree)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    broken = [row for row in checked.stdout.splitlines() if row.startswith(contract)]
    assert any(row.endswith("BROKEN") for row in broken), checked.stdout


def test_pure_halves_load_neither_torch_nor_ray() -> None:
    program = "\n".join(
        [
            "import importlib, pkgutil, sys",
            f"for name in {PURE!r}:",
            "    module = importlib.import_module(name)",
            "    for found in pkgutil.walk_packages(getattr(module, '__path__', []), name + '.'):",
            "        importlib.import_module(found.name)",
            "print(sorted({'torch', 'ray', 'triton', 'transformers'} & set(sys.modules)))",
        ]
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


CHECK_KERNELS = (
    "import kernels, pathlib, sys; "
    "sys.exit(pathlib.Path(kernels.__file__).parent.parent != pathlib.Path({root!r}))"
)


def run_kernels_check(path: str) -> int:
    program = CHECK_KERNELS.format(root=str(ROOT))
    return subprocess.run(
        [sys.executable, "-P", "-c", program], cwd="/", env={"PYTHONPATH": path}, timeout=60
    ).returncode


def test_the_kernels_package_is_ours() -> None:
    assert run_kernels_check(str(ROOT)) == 0


def test_no_installed_distribution_brings_a_kernels_package() -> None:
    from importlib.metadata import packages_distributions

    owners = set(packages_distributions().get("kernels", ())) - {"headroom"}
    assert not owners, f"these distributions install a top-level `kernels`: {owners}"


def test_a_foreign_kernels_package_is_caught(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text('"""Planted."""\n')
    assert run_kernels_check(f"{tmp_path}:{ROOT}") == 1
