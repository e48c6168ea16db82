"""Keeps the shipped weights in version control at two thirds of their size, and restores them bit for bit.

    python -m demo.packing                # restore demo/model/model.safetensors if it is missing or older
    python -m demo.packing pack FOLDER    # write FOLDER/model.safetensors.planes from FOLDER/model.safetensors

A packed file is one line that says what it is, one line of JSON (size and SHA-256 of the restored file, length and
coding of each plane), then the planes: every even byte of the file, and every odd byte. In bf16 the odd bytes hold
sign and exponent, which compress well; the even ones hold the mantissa, which does not. The standard library suffices.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "model"
WEIGHTS = "model.safetensors"
PACKED = "model.safetensors.planes"
_MAGIC = b"Headroom weights in byte planes, version 1\n"
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]
_LARGEST_HEADER = 4096


class PackedFileError(ValueError):
    """A packed file that cannot be restored exactly; the sentence names it and says what to do."""


@dataclass(frozen=True)
class _Header:
    size: int
    sha256: str
    planes: tuple[tuple[str, int], ...]
    """Coding (``raw`` or ``xz``) and length in bytes of the even and of the odd plane."""


def pack(data: bytes) -> bytes:
    """The packed form of any bytes; best for bf16."""
    planes = []
    for plane in (data[0::2], data[1::2]):
        small = lzma.compress(plane, format=lzma.FORMAT_XZ, filters=_FILTERS)
        planes.append(("xz", small) if len(small) < len(plane) else ("raw", plane))
    header = {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "planes": [[coding, len(stored)] for coding, stored in planes],
    }
    return b"".join((_MAGIC, json.dumps(header).encode(), b"\n", *(stored for _, stored in planes)))


def unpack(packed: bytes, name: str = PACKED) -> bytes:
    """Inverse of :func:`pack`. PackedFileError, naming ``name``, unless the very bytes come back."""
    try:
        header, at = _parse(packed)
        out = bytearray(header.size)
        for first, (coding, length) in enumerate(header.planes):
            stored = packed[at : at + length]
            out[first::2] = lzma.decompress(stored, format=lzma.FORMAT_XZ) if coding == "xz" else stored
            at += length
        if at != len(packed):
            raise ValueError(f"{len(packed) - at} bytes more than its header says")
        if hashlib.sha256(out).hexdigest() != header.sha256:
            raise ValueError("what it holds has another SHA-256 than its header says")
    except (ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise PackedFileError(
            f"{name} is damaged ({error}): fetch it again (git checkout -- {name})"
        ) from error
    return bytes(out)


def _parse(packed: bytes) -> tuple[_Header, int]:
    """The header, and where the first plane begins."""
    if not packed.startswith(_MAGIC):
        raise ValueError("it does not begin as a packed file does")
    end = packed.index(b"\n", len(_MAGIC), len(_MAGIC) + _LARGEST_HEADER)
    found = json.loads(packed[len(_MAGIC) : end])
    (even, odd), size = found["planes"], int(found["size"])
    header = _Header(size, found["sha256"], ((even[0], int(even[1])), (odd[0], int(odd[1]))))
    if any(coding not in ("raw", "xz") for coding, _ in header.planes):
        raise ValueError("its planes are in an unknown coding")
    if not 0 <= size <= 1 << 32:
        raise ValueError(f"a restored size of {size} bytes is not possible")
    return header, end + 1


def restore(folder: str | Path = MODEL) -> Path:
    """``folder``, with its weights in place: unpacked if they are missing or older than the packed file.

    A folder without a packed file is answered as it is. Any number of processes may do this at once: each writes a
    file of its own and renames it.

    Raises:
        PackedFileError: the packed file is damaged, or the folder cannot be written.
    """
    folder = Path(folder)
    packed, weights = folder / PACKED, folder / WEIGHTS
    if not packed.is_file():
        return folder
    if weights.is_file() and weights.stat().st_mtime_ns >= packed.stat().st_mtime_ns:
        return folder
    try:
        _write(weights, unpack(packed.read_bytes(), str(packed)))
    except OSError as error:
        raise PackedFileError(
            f"{weights} must be restored from {PACKED}, and cannot be written ({error.strerror}): run "
            "`python -m demo.packing` as a user who may write there"
        ) from error
    print(f"{weights} restored from {PACKED}", file=sys.stderr)
    return folder


def pack_folder(folder: Path) -> Path:
    """Packs the weights in ``folder`` beside them and answers the packed file; the weights stay current."""
    weights = folder / WEIGHTS
    _write(folder / PACKED, pack(weights.read_bytes()))
    weights.touch()
    return folder / PACKED


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: a reader sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=("restore", "pack"), default="restore")
    parser.add_argument("folder", nargs="?", type=Path, default=MODEL)
    args = parser.parse_args()
    try:
        if args.action == "pack":
            print(pack_folder(args.folder))
        else:
            restore(args.folder)
    except (PackedFileError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
