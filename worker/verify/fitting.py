"""Decides whether a verification can hold the whole reference model on the device beside the paged one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from memory.api import DTYPE_BYTES
from worker.advise.named import find_geometry
from worker.config import WorkerConfig
from worker.execution.loading import open_model
from worker.probe import pinnable_bytes
from worker.verify.reference import Reference, ResidentReference, dequantized_experts
from worker.verify.streamed import StreamedReference

KINDS = ("auto", "resident", "streamed")
_USABLE_SHARE = 0.9
"""Of the free memory; kernels' workspaces and activations get the rest."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on the device while a resident reference and the paged model are compared: all weights dequantised, the
    paged model's dense part, two arenas, and on a CPU the host store."""

    reference: int
    beside: int

    def fits(self, free_bytes: int) -> bool:
        """Whether ``free_bytes`` of the device are enough."""
        return self.reference + self.beside <= _USABLE_SHARE * free_bytes


def resident_need(folder: Path, dtype: str, arena_bytes: int, on_cpu: bool) -> Need:
    """What comparing the model in ``folder``, computed in ``dtype``, takes. ModelLoadError for an unknown model."""
    geometry = find_geometry(str(folder))
    size = DTYPE_BYTES[dtype]
    store = geometry.all_experts_bytes(geometry.checkpoint_format) if on_cpu else 0
    return Need(geometry.num_params * size, geometry.num_dense_params * size + 2 * arena_bytes + store)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return pinnable_bytes()[0]


def choose_reference(kind: str, config: WorkerConfig, arena_bytes: int) -> tuple[Reference, str]:
    """The reference of ``kind`` (``auto``: resident where it fits) and a sentence that says which and why."""
    if kind == "auto":
        opened = open_model(config, dequantized_experts)
        need = resident_need(
            Path(config.model), opened.options.dtype, arena_bytes, opened.device.type == "cpu"
        )
        free = free_bytes(opened.device)
        kind = "resident" if need.fits(free) else "streamed"
        why = (
            f"the whole model takes {need.reference / 1e9:.2f} GB, what runs beside it {need.beside / 1e9:.2f} GB;"
            f" {free / 1e9:.2f} GB are free"
        )
    else:
        why = "as asked"
    if kind == "resident":
        return ResidentReference(config, arena_bytes), f"reference: resident ({why})"
    return StreamedReference(config, arena_bytes), f"reference: streamed layer by layer ({why})"
