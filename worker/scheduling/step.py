"""The values that cross between deciding a step and running it: StepPlan out, StepResult back.

Both are plain (numpy arrays, tuples), so that plans can be recorded, replayed and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memory.api import PlaceRange, StepCommands
from worker.api import SamplingParams, TokenLogprobs

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A request that takes a row slot with this step (anew, or again after a retraction).

    ``known_token_ids`` are all tokens known so far, of which the first ``num_prompt_tokens`` are the prompt: the
    sampler's penalties need them. ``seed`` is resolved: noise is a hash of (seed, position).
    """

    slot: int
    request: int
    sampling: SamplingParams
    seed: int
    known_token_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class GroupTables:
    """One page group's tables for the rows of a step.

    ``tables`` is [rows, max_pages] of *virtual* ids, -1 beyond a row's pages; column j is logical page
    ``first_page[row] + j``. STATE groups have one column.
    """

    tables: IntArray
    first_page: IntArray


@dataclass(frozen=True)
class StepPlan:
    """One step, decided. Rows are ordered: first the rows with exactly one query token, then the longer chunks.

    Attributes:
        step: number of the step.
        requests: [rows] the scheduler's request numbers.
        slots: [rows] row slots (0 <= slot < max_running): where the runner keeps per-request sampling state.
        query_len: [rows] tokens computed in this step.
        num_computed: [rows] tokens computed before it; a row's tokens have positions num_computed + 0, 1, ...
        token_ids: [sum of query_len] flat tokens in row order; -1 stands for the row's last sampled token, which
            is still on the device.
        samples: [rows] whether the row's last token yields a new token (its chunk reaches the known end).
        num_decode_rows: how many leading rows have one query token.
        groups: tables by page group name.
        started: rows whose slot begins with this step.
        token_masks: row -> int32 bit mask over the vocabulary (bit set: allowed), for rows bound by a grammar.
        commands: what memory must do ahead of the step.
        staged: a prefill pass: chunks of prompts alone, which the runner carries out layer by layer while the steps
            planned behind it run. Nobody else touches its rows' pages meanwhile.
        ring: the expert places through which the pass streams what is not resident; None: it is read in place.
    """

    step: int
    requests: IntArray
    slots: IntArray
    query_len: IntArray
    num_computed: IntArray
    token_ids: IntArray
    samples: BoolArray
    num_decode_rows: int
    groups: Mapping[str, GroupTables]
    commands: StepCommands
    started: tuple[StartedRow, ...] = ()
    token_masks: Mapping[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    staged: bool = False
    ring: PlaceRange | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the step; 0 for a step that only carries memory commands."""
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return len(self.token_ids)


@dataclass(frozen=True)
class StepResult:
    """What a step brought.

    Attributes:
        step: number of the step.
        token_ids: [rows, n] new tokens, -1 behind a row's last.
        num_new: [rows] how many of them are real (0 for rows that did not sample).
        logprobs: per row its new tokens' log-probabilities; empty tuple where none were asked for; () if no row did.
        seconds: wall time of the step on the device side.
        used_experts: [decode rows, bytes] the experts that each request has used so far, as ``TokenEvent`` has them;
            None where that is not counted.
    """

    step: int
    token_ids: IntArray
    num_new: IntArray
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    seconds: float = 0.0
    used_experts: npt.NDArray[np.uint8] | None = None
