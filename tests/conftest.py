"""Settings that must stand before anything imports Triton or torch."""

from __future__ import annotations

import os

import torch

# Triton reads this when a kernel is defined: without a GPU its interpreter runs the kernels on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
