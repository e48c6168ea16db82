"""Programmatic dependent launch: a kernel may begin while the one before it ends, and waits before it reads results.

A kernel that is launched so calls ``gdc_wait`` ahead of its first read of what an earlier kernel wrote and of its
first write; what it reads before are weights. It calls ``gdc_launch_dependents`` first of all, so that the next can
begin.
"""

from __future__ import annotations

from functools import cache

import torch
from triton import knobs


@cache
def _can_overlap(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether kernels on the tensor's device can be launched so."""
    return tensor.is_cuda and not knobs.runtime.interpret and _can_overlap(tensor.get_device())
