"""Names a checkpoint's experts by content, so that replicas of a host find each other's store."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from worker.config import WorkerConfig

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_BLOCKS_VERSION = 1
"""Raised when blocks of any format are laid out anew."""


def shared_name(config: WorkerConfig) -> str | None:
    """The name of the shared host store for ``config``, None for a private one.

    A hash over config.json, the dtype, and of each weight file its size, the time it was written, its head (tensor
    names, shapes, offsets) and 16 samples of 64 KiB: reading 30 GB in full would take as long as loading them, and a
    few tensors written anew in their places may lie between the samples.
    """
    if config.host_store != "shared":
        return None
    folder = Path(config.model)
    digest = blake2b(f"{_BLOCKS_VERSION} {config.dtype} {config.device} {config.load} {config.seed}".encode())
    digest.update((folder / "config.json").read_bytes())
    if config.load == "checkpoint":
        for path in sorted(folder.glob("*.safetensors")):
            facts = path.stat()
            size = facts.st_size
            digest.update(f"{path.name} {size} {facts.st_mtime_ns}".encode())
            with path.open("rb") as file:
                for sample in range(_SAMPLES + 1):
                    file.seek(sample * max(size - _SAMPLE_BYTES, 0) // _SAMPLES, os.SEEK_SET)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
