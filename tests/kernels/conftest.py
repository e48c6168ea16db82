"""Lets kernel tests run twice: with the compiled CPU kernels and with their plain torch twins."""

from __future__ import annotations

import pytest
import torch

from kernels._native import ops as native


@pytest.fixture(params=["compiled", "plain"])
def twins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two serves float32 tensors on the CPU in this run of the test."""
    if request.param == "plain":
        monkeypatch.setattr(native, "serves", lambda x: False)
    else:
        assert native.serves(torch.zeros(1)), (
            "this machine has no C compiler: the compiled kernels are untested"
        )
    return str(request.param)
