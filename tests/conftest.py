"""Settings that must stand before anything imports Triton or torch, and marks that follow from the machine."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from demo.packing import restore

ON_GPU = torch.cuda.is_available()

# Triton reads this when a kernel is defined: without a GPU its interpreter runs the kernels on CPU tensors.
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A bound by the clock fails on a busy machine, and draws that differ from run to run fail by chance: soak runs and
# --hypothesis-profile=default draw anew. Machines that run GPU tests alone need not have the library.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")


def pytest_configure() -> None:
    """The demo model's weights lie packed in a fresh tree; a machine that ran no set-up has them from here on."""
    restore()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernel tests run in the interpreter on a CPU and, compiled, as GPU tests where there is one."""
    if not ON_GPU:
        return
    for item in items:
        if item.path.name.startswith("test_triton_"):
            item.add_marker(pytest.mark.gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests recorded as ``figure``: errors and counts that a reader wants to see beside "passed"."""
    lines = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.section("figures")
        for line in sorted(lines):
            terminalreporter.write_line(line)
