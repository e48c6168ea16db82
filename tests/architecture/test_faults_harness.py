"""The fault harness itself: a fault that nobody notices is reported, and a stale fault cannot go unseen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import faults

TARGET = "tests/architecture/test_faults_harness.py::test_an_error_names_its_option"


def test_an_error_names_its_option() -> None:
    from worker.errors import ConfigError
    from worker.registry import Registry

    with pytest.raises(ConfigError, match="engine='x'"):
        Registry("engine", "engine", {"fake": "a:b"}).load("x")


def run(fault: faults.Fault) -> tuple[int, str]:
    # In a process of its own: planting needs that none of our modules is loaded yet.
    program = (
        f"import sys; sys.path.insert(0, '.'); from pathlib import Path; from tests import faults\n{CHILD}"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, repr(fault)],
        cwd=faults.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    code, _, log = ran.stdout.partition("\n")
    return int(code), log


CHILD = """
import tempfile
from tests.faults import Fault
fault = eval(sys.argv[1])
for _, code, _, log in faults.run_faults([fault], Path(tempfile.mkdtemp())):
    print(code)
    print(log)
"""


def test_a_fault_that_matters_is_caught() -> None:
    fault = faults.Fault(
        "t", "worker.registry", old="{self._option}={name!r}: no such", new="no", tests=(TARGET,)
    )
    code, log = run(fault)
    assert code == faults.CAUGHT, log


def test_an_edit_that_changes_nothing_is_not_caught() -> None:
    fault = faults.Fault(
        "t", "worker.registry", old='"""A registry names', new='"""The registry names', tests=(TARGET,)
    )
    code, log = run(fault)
    assert code == 0, log


def test_a_stale_fault_is_no_success() -> None:
    code, _ = run(faults.Fault("t", "worker.registry", old="not in the source", new="", tests=(TARGET,)))
    assert code not in (0, faults.CAUGHT)


def test_every_listed_fault_still_fits_its_source() -> None:
    for fault in faults.all_faults():
        faults.edited_source(fault, faults.module_path(fault.module))
        assert fault.old != fault.new
        for node in fault.tests:
            assert (Path(faults.ROOT) / node.split("::")[0]).is_file(), node
