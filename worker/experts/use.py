"""Counts, for each row slot, which experts its decode steps chose: what placement predicts the next turn by.

A bitmap of everything that an answer ever chose says little: after some forty tokens nearly every expert has been
chosen once. So choices are counted, and what goes out are the experts that were chosen at least half as often as the
layer's experts were on average. Prompts are left out: a chunk of a hundred tokens chooses nearly all.

On a GPU a step costs two launches beside its own, one of them captured, and one small copy to the host that nobody
waits for: it is read with the step's tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.expert_use import count_use
from worker.execution.staging import Uploads, fetch
from worker.scheduling.step import StepPlan


class ExpertUse:
    """Counts of one model's rows. A step: :meth:`begin_step`, behind the next flush :meth:`clear_started`, for each
    layer in order :meth:`take`, and behind the last one :meth:`count`."""

    def __init__(
        self, num_slots: int, num_layers: int, num_experts: int, experts_per_token: int, device: torch.device
    ) -> None:
        """``num_layers``: those with routed experts."""
        self._num_experts = num_experts
        self._num_layers = num_layers
        self._counts = torch.zeros(num_slots, num_layers, num_experts, dtype=torch.int16, device=device)
        self._chosen = torch.full((num_slots, num_layers, experts_per_token), -1, device=device)
        self._layers: list[torch.Tensor] = []
        self._slots: torch.Tensor | None = None
        self._started: torch.Tensor | None = None

    def begin_step(self, plan: StepPlan, uploads: Uploads) -> None:
        """Puts what the device must know of a step's rows."""
        started = np.array([row.slot for row in plan.started], dtype=np.int64)
        self._started = uploads.put(started) if len(started) else None
        decoding = 0 if plan.staged else plan.num_decode_rows
        self._slots = uploads.put(plan.slots[:decoding]) if decoding else None

    def clear_started(self) -> None:
        """Slots that begin with this step have chosen nothing so far."""
        if self._started is not None:
            self._counts.index_fill_(0, self._started, 0)

    def take(self, row: int, experts: torch.Tensor) -> None:
        """One layer's choices, [tokens, experts_per_token] int64, decode rows first. The last layer's brings all of
        them to where :meth:`count` looks; captured with the step."""
        if row == 0:
            self._layers.clear()
        self._layers.append(experts[: len(self._chosen)])
        if row == self._num_layers - 1:
            torch.stack(self._layers, 1, out=self._chosen[: len(self._layers[0])])
            self._layers.clear()

    def count(self) -> torch.Tensor | None:
        """Counts the step's decode rows; [rows, layers, bytes] uint8 on its way to the host (see :func:`used_bits`),
        None where there are none."""
        return None if self._slots is None else fetch(count_use(self._counts, self._chosen, self._slots))

    def used_bits(self, leaning: torch.Tensor) -> npt.NDArray[np.uint8]:
        """What :meth:`count` brought, whole now, as [rows, bytes], each row in the order of
        :class:`worker.api.ExpertResidency`'s bits."""
        found: npt.NDArray[np.uint8] = leaning.numpy()
        if self._num_experts % 8:
            flags = np.unpackbits(found, axis=2, bitorder="little")[:, :, : self._num_experts]
            return np.packbits(flags.reshape(len(found), -1), axis=1, bitorder="little")
        return found.reshape(len(found), -1)
