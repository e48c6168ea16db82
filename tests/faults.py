"""Plants known faults, one at a time; the suite must fail under each.

A fault is a small edit of one module's source, made in memory while a forked child imports it, and the tests that
must notice. Each room lists its own in ``tests/faults_<room>.py``::

    FAULTS = [Fault("double free", "memory.ledger.page_pool", old="raise LedgerError(", new="print(",
                    tests=("tests/memory/test_page_pool.py::test_double_free_raises",))]

``old`` must occur exactly once in the module, so that a fault cannot go stale unseen. Run ``python -m tests.faults``
(all), or with names to run some. Exit code 0: every fault was caught.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parent.parent
WORKERS = (os.cpu_count() or 1) + 1
"""Children at a time: one more than there are cores, for some tests wait for what never comes."""
LIBRARIES = (
    "_hypothesis_pytestplugin",
    "fastapi.testclient",
    "httpx",
    "hypothesis.stateful",
    "jinja2",
    "jsonschema",
    "llguidance",
    "numpy",
    "opentelemetry.exporter.prometheus",
    "pydantic",
    "pytest_timeout",
    "safetensors.torch",
    "schemathesis",
    "tokenizers",
    "torch._dynamo",
    "transformers.modeling_utils",
    "triton.language",
)
CAUGHT = 1
"""pytest's exit code for "tests ran and some failed"; anything else means the fault was not really tried."""


@dataclass(frozen=True)
class Fault:
    """One planted fault: in ``module``, ``old`` becomes ``new``; ``tests`` are pytest node ids that must then fail."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


class _EditedLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, fault: Fault, path: str) -> None:
        super().__init__(fault.module, path)
        self._fault = fault

    def get_code(self, fullname: str) -> CodeType:
        # Compiled afresh: a cached .pyc would hold the sound source.
        return compile(edited_source(self._fault, self.get_filename(fullname)), self.path, "exec")


class _EditedFinder(importlib.abc.MetaPathFinder):
    def __init__(self, fault: Fault, path: str) -> None:
        self._fault = fault
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._fault.module:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=_EditedLoader(self._fault, self._path)
        )


def edited_source(fault: Fault, path: str) -> str:
    """The module's source with the fault in it; raises ValueError where ``old`` is not there exactly once."""
    source = Path(path).read_text()
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"fault {fault.name!r}: its text occurs {count} times in {fault.module}, not once")
    return source.replace(fault.old, fault.new)


def module_path(name: str) -> str:
    """The source file of one of our modules, found without importing it."""
    base = ROOT.joinpath(*name.split("."))
    return str(base / "__init__.py" if base.is_dir() else base.with_suffix(".py"))


def all_faults() -> list[Fault]:
    """Every fault of every ``tests/faults_*.py``, in order; names are unique."""
    found: list[Fault] = []
    for path in sorted(Path(__file__).parent.glob("faults_*.py")):
        found += importlib.import_module(f"tests.{path.stem}").FAULTS
    names = [fault.name for fault in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"fault names used twice: {sorted(twice)}")
    return found


def _run_planted(fault: Fault, log: Path) -> int:
    """In a forked child: plants the fault, runs its tests, answers pytest's exit code."""
    import pytest

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    path = module_path(fault.module)
    edited_source(fault, path)
    sys.meta_path.insert(0, _EditedFinder(fault, path))
    # Plugins that are found by themselves are left out: importing them took a third of a child's time.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # What a fault keeps from coming true is not waited for as long as a busy machine may need for it.
    os.environ["TEST_PATIENCE_S"] = "6"
    plugins = ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
    arguments = ["-x", "-q", *plugins, "--timeout", "60", *fault.tests]
    return int(pytest.main(arguments))


def _start(fault: Fault, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        code = _run_planted(fault, log)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_faults(faults: Sequence[Fault], log_folder: Path) -> Iterator[tuple[Fault, int, float, str]]:
    """Yields (fault, exit code, seconds, log) as children end, at most :data:`WORKERS` at a time."""
    queue = list(faults)
    running: dict[int, tuple[Fault, float, Path]] = {}
    while queue or running:
        while queue and len(running) < WORKERS:
            fault = queue.pop(0)
            log = log_folder / f"{len(queue)}.log"
            running[_start(fault, log)] = (fault, time.monotonic(), log)
        child, status = os.wait()
        fault, started, log = running.pop(child)
        yield fault, os.waitstatus_to_exitcode(status), time.monotonic() - started, log.read_text()


def _load_libraries() -> None:
    """Loads what tests import, once, in the parent, so that children start at once; none of our own modules may be
    among them. As :file:`tests/conftest.py` does, Triton is told of its interpreter first."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    # Pytest collects garbage twice at its end: with these libraries' objects in it that took half of a child's time.
    gc.collect()
    gc.freeze()


def _report(faults: Sequence[Fault], folder: Path, *, is_last: bool) -> list[Fault]:
    """Runs them, prints a line each, and answers those that no test noticed."""
    missed = []
    for fault, code, seconds, log in run_faults(faults, folder):
        word = "caught" if code == CAUGHT else "MISSED" if is_last else "again"
        print(f"{word:7} {seconds:5.1f} s  {fault.module}: {fault.name}", flush=True)
        if code != CAUGHT:
            missed.append(fault)
            print(f"pytest ended with {code}:\n{log[-4000:]}", flush=True)
    return missed


def main(names: Sequence[str]) -> int:
    """Runs the named faults (all without names) and prints a line each; 0 if every one was caught."""
    _load_libraries()

    faults = [fault for fault in all_faults() if not names or fault.name in names]
    if ours := [
        name for name in sys.modules if name.split(".")[0] in ("memory", "worker", "serve_app", "kernels")
    ]:
        raise RuntimeError(f"loaded before planting: {ours}")
    with tempfile.TemporaryDirectory() as folder:
        again = _report(faults, Path(folder), is_last=False)
        # What others took of the machine can hide a pace that a fault breaks: each has a second go, alone.
        missed = sum(len(_report([fault], Path(folder), is_last=True)) for fault in again)
    print(f"{len(faults) - missed} passed, {missed} failed", flush=True)
    return 1 if missed or not faults else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Without an interpreter's end: extension modules would list at length all that was loaded for children.
    os._exit(code)
