"""Asks Linux for huge pages behind a large host buffer: rows lie far apart, and address look-ups cost time."""

from __future__ import annotations

import ctypes
import sys

import torch

HUGE_PAGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14


def ask_for_huge_pages(buffer: torch.Tensor) -> bool:
    """Advises the kernel about the whole huge pages inside ``buffer`` (contiguous, on the host); whether it took the
    advice. Elsewhere than on Linux, or in small buffers, nothing happens."""
    first = -(-buffer.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (buffer.data_ptr() + buffer.numel() * buffer.element_size()) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if sys.platform != "linux" or last <= first:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, last - first, _MADV_HUGEPAGE) == 0)
