"""Compiles the C files beside it for this processor, keeps the result in the user's cache folder, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("dense.c", "experts.c", "mixers.c", "sublayers.c"))
HEADERS = tuple(FOLDER / name for name in ("kernels.h", "vectors.h"))
# NaN and infinity keep their meaning, and sums their order: a row's bits may not depend on what the compiler regroups.
FLAGS = (
    "-O3", "-march=native", "-shared", "-fPIC", "-std=gnu11", "-Wno-psabi",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
)  # fmt: skip
COMPILE_TIMEOUT_S = 120


def _members(kind: Any, names: str) -> list[Any]:
    return [(name, kind) for name in names.split()]


class Bank(Structure):
    """``bank_t``: one layer's experts."""

    _fields_ = [
        *_members(c_int64, "hidden inner experts"),
        *_members(c_void_p, "gate_up down gate_up_bias down_bias"),
        *_members(c_float, "limit alpha"),
        *_members(c_int, "half"),
    ]


class Layer(Structure):
    """``linear_t``: a packed linear layer."""

    _fields_ = [*_members(c_void_p, "weight bias"), *_members(c_int64, "columns depth"), ("half", c_int)]


class Moe(Structure):
    """``moe_t``: a router, its experts, a shared expert."""

    _fields_ = [
        *_members(Layer, "router shared_down"),
        ("bank", Bank),
        *_members(c_int64, "k shared"),
        ("renormalise", c_int),
    ]


class DeltaNet(Structure):
    """``delta_net_t``: a Gated DeltaNet layer."""

    _fields_ = [
        *_members(Layer, "inner outer"),
        *_members(c_void_p, "conv decay_rate decay_bias norm"),
        *_members(c_int64, "k_heads v_heads d_k d_v conv_width"),
        *_members(c_float, "query_scale l2_eps eps"),
    ]


class AttentionProjections(Structure):
    """``attention_layer_t``: what stands before and behind attention."""

    _fields_ = [
        *_members(Layer, "inner outer"),
        ("head_norm", c_void_p),
        *_members(c_int64, "heads kv_heads dim"),
        ("eps", c_float),
        ("gated", c_int),
    ]


class Attention(Structure):
    """``attention_t``: rows, their pages, and strides in elements."""

    _fields_ = [
        *_members(c_int64, "rows heads kv_heads dim page_tokens max_pages window"),
        *_members(c_void_p, "tables first_page kv_len"),
        *_members(c_int64, "query_stride key_page key_token key_head value_page value_token value_head"),
        *_members(c_float, "scale"),
    ]


_P, _N = c_void_p, c_int64
_ROWS = (_P, _N, _N)
"""Rows, their stride, how many."""
_PAGES = (_P, _N, _N)
"""Pages, strides of a page and of a token."""
_SIGNATURES = {
    "linear": (_P, _N, _N, _N, _P, c_int, _N, _P, _P),
    "normalise": (_P, _N, _N, _N, _N, _P, _N, c_float, c_int, _P),
    "rotate": (_P, _N, _N, _N, _N, _P, _P, _N),
    "silu_and_mul": (_P, _P, _N, _N, _N, _P, _P),
    "mul_sigmoid": (_P, _P, _N, _N, _N),
    "gated_norm": (_P, _P, _N, _N, _N, _N, _P, c_float),
    "add_norm": (_P, _P, _N, _N, _P, c_float, _P),
    "write_rows": (_P, _N, _N, _N, _P, _N, _N, _P, _P),
    "greedy": (_P, _N, _N, _N, _P),
    "route": (_P, _N, _N, _N, _N, c_int, _P, _P),
    "experts": (POINTER(Bank), _P, _N, _N, _P, _P, _P),
    "conv_rows": (_P, _N, _N, _P, _N, _N, _P, _P, _N, _P, _P),
    "delta_gates": (_P, _N, _N, _N, _P, _P, _P, _P, _P),
    "delta_rows": (_P, _N, _P, _N, _P, _N, _P, c_int, _N, _P, _N, _N, _P, _N, _N, _N, _N, _P, _N, _P, _P),
    "moe_step": (POINTER(Moe), _P, _N, _P, _P),
    "delta_net_step": (POINTER(DeltaNet), _P, _N, _P, _N, _P, _N, _P, _P, _P),
    "attention_front": (POINTER(AttentionProjections), *_ROWS, _P, _P, _N, *_PAGES, *_PAGES, _P, _P, _P, _P),
    "attention_back": (POINTER(AttentionProjections), _P, _P, _N, _P),
    "paged_decode": (POINTER(Attention), _P, _P, _P, _P, _P, _P),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled kernels, called in two ways: ``quick`` keeps Python's lock, which short calls would only lose time
    handing over and back; ``long`` lets other threads run meanwhile."""

    quick: ctypes.PyDLL
    long: ctypes.CDLL


@cache
def library() -> Library | None:
    """The compiled kernels; None where they cannot be had, which is logged once."""
    try:
        path = str(_compiled())
        found = Library(ctypes.PyDLL(path), ctypes.CDLL(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU runs without compiled kernels, at a third of the speed: %s", error)
        return None
    for loaded in (found.quick, found.long):
        for name, signature in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = signature
            function.restype = None
    return found


def _compiled() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc, clang) on the path")
    target = _cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if not target.is_file():
        # Built under a name of its own and then renamed: several workers may start at once.
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        command = [compiler, *FLAGS, "-o", scratch, *map(str, SOURCES), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
            if done.returncode:
                raise OSError(f"{compiler} failed: {done.stderr.strip()[:500]}")
            os.replace(scratch, target)
        finally:
            Path(scratch).unlink(missing_ok=True)
    return target


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "headroom"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="headroom-"))


def _fingerprint(compiler: str) -> str:
    """Of all that decides the machine code: source, flags, compiler, processor."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*HEADERS, *SOURCES)))
    digest.update(repr((FLAGS, compiler, platform.machine())).encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))]
        digest.update("".join(flags[:1]).encode())
    return digest.hexdigest()[:16]
