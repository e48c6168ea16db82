"""Reads a checkpoint's tensors onto a GPU through two pinned buffers, however large the files are."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from worker.errors import ModelLoadError

CHUNK_BYTES = 32 << 20
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


class SafetensorsFile:
    """One file's header: where each tensor's bytes are."""

    def __init__(self, path: Path) -> None:
        """Opens the file. ModelLoadError where its header is broken."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            size = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
            self._header = json.loads(os.pread(self._descriptor, size, 8))
        except ValueError as error:
            raise ModelLoadError(f"{path}: not a readable safetensors file ({error})") from error
        self._first = 8 + size

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def place(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        """Dtype and shape of a tensor, and the byte at which it begins."""
        entry = self._header[name]
        if entry["dtype"] not in _DTYPES:
            raise ModelLoadError(f"{self._path}: {name} is stored as {entry['dtype']}, which is not read")
        dtype: torch.dtype = getattr(torch, _DTYPES[entry["dtype"]])
        return dtype, tuple(entry["shape"]), self._first + entry["data_offsets"][0]

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` from byte ``offset`` on; ModelLoadError where the file is too short."""
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise ModelLoadError(f"{self._path}: ends {len(view) - done} bytes early")
            done += count

    def close(self) -> None:
        """No read may follow."""
        os.close(self._descriptor)


class PinnedReader:
    """File to device: while one buffer crosses, the other is filled. Host memory stays at two buffers."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def read(self, file: SafetensorsFile, name: str) -> torch.Tensor:
        """The tensor on the device."""
        dtype, shape, offset = file.place(name)
        target = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8, device=self._device)
        for start in range(0, len(target), len(self._buffers[0])):
            part = target[start : start + len(self._buffers[0])]
            self._turn = 1 - self._turn
            buffer, sent = self._buffers[self._turn][: len(part)], self._sent[self._turn]
            sent.synchronize()
            file.read_into(buffer.numpy().data, offset + start)
            part.copy_(buffer, non_blocking=True)
            sent.record()
        return target.view(dtype).view(shape)
