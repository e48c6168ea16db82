"""A model without weights whose tokens depend on every byte of memory that a real one would read.

It keeps one value per token slot in a real buffer, laid out as the arena's grids lie, and draws each new token from
what it reads back there: all earlier tokens from FULL pages, the last ``window`` from WINDOW pages, a running hash
from the STATE page. A wrong page, count, table or order gives a wrong token; :func:`expected_tokens` says the right
ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memory.api import LayerRows, PageKind, PageSpec, Row, StepCommands
from worker.api import ModelInfo, SamplingParams, TokenLogprobs
from worker.scheduling.step import StartedRow, StepPlan, StepResult

Values = npt.NDArray[np.uint64]
FACTOR = np.uint64(0x9E3779B97F4A7C15)
STATE_FACTOR = np.uint64(0xD1342543DE82EF95)
STATE_START = np.uint64(0x243F6A8885A308D3)
GARBAGE = 0xAB
MAX_LEN = 1 << 15
VOCAB_SIZE = 251
END_TOKEN_ID = 3


def full_spec(page_tokens: int = 16) -> PageSpec:
    return PageSpec("full", PageKind.FULL, page_tokens, (LayerRows(0, (Row("k", (1,), "int64"),)),))


def window_spec(window: int, page_tokens: int = 16) -> PageSpec:
    layer = LayerRows(1, (Row("k", (1,), "int64"),))
    return PageSpec(f"window{window}", PageKind.WINDOW, page_tokens, (layer,), window)


def expert_spec(num_bytes: int = 640) -> PageSpec:
    layer = LayerRows(0, (Row("block", (num_bytes,), "uint8"),))
    return PageSpec("expert", PageKind.EXPERT, 1, (layer,))


def state_spec(num_bytes: int = 512) -> PageSpec:
    return PageSpec("state", PageKind.STATE, 1, (LayerRows(2, (Row("s", (num_bytes // 8,), "int64"),)),))


def _powers(factor: np.uint64) -> Values:
    return np.cumprod(np.full(MAX_LEN, factor, dtype=np.uint64))


POWERS = _powers(FACTOR)
STATE_POWERS = _powers(STATE_FACTOR)


def _mix(values: Values) -> Values:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def token_values(token_ids: npt.NDArray[np.int64], first_position: int) -> Values:
    positions = np.arange(first_position, first_position + len(token_ids), dtype=np.uint64)
    return _mix(token_ids.astype(np.uint64) * FACTOR + positions + np.uint64(1))


def _advance(state: np.uint64, values: Values) -> np.uint64:
    count = len(values)
    factors = np.concatenate([STATE_POWERS[:count][::-1], np.ones(1, dtype=np.uint64)])
    return np.uint64((np.append(state, values) * factors).sum())


def _draw(found: Sequence[np.uint64], seed: int, position: int) -> int:
    mixed = np.array([seed & (2**63 - 1), position], dtype=np.uint64)
    for part in found:
        mixed = _mix(mixed * FACTOR + part)
    return int(_mix(mixed)[0] ^ _mix(mixed)[1]) % VOCAB_SIZE


def _allowed(token: int, sampling: SamplingParams, num_generated: int, end_ids: tuple[int, ...]) -> int:
    """A bias of 100 forces a token, -100 forbids it; end tokens are forbidden before ``min_tokens``."""
    banned = {*sampling.stop_token_ids, *end_ids} if num_generated < sampling.min_tokens else set()
    banned |= {biased for biased, bias in sampling.logit_bias if bias <= -100.0}
    forced = [biased for biased, bias in sampling.logit_bias if bias >= 100.0 and biased not in banned]
    token = forced[0] if forced else token
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def expected_tokens(
    specs: Sequence[PageSpec],
    prompt: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    end_ids: tuple[int, ...] = (END_TOKEN_ID,),
) -> list[int]:
    """The right answer to a request, computed from its tokens alone."""
    known = list(prompt)
    state = STATE_START
    values = np.zeros(0, dtype=np.uint64)
    computed = 0
    for generated in range(sampling.max_tokens):
        fresh = token_values(np.array(known[computed:], dtype=np.int64), computed)
        values, state, computed = np.append(values, fresh), _advance(state, fresh), len(known)
        found = []
        for spec in specs:
            if spec.kind is PageKind.FULL:
                found.append((values * POWERS[:computed]).sum())
            elif spec.kind is PageKind.WINDOW:
                start = max(0, computed - (spec.window or 0))
                found.append((values[start:] * POWERS[start:computed]).sum())
            elif spec.kind is PageKind.STATE:
                found.append(state)
        greedy = sampling.temperature == 0.0
        token = _allowed(_draw(found, 0 if greedy else seed, computed), sampling, generated, end_ids)
        known.append(token)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_ids)}
        if generated >= sampling.min_tokens and token in ends:
            break
    return known[len(prompt) :]


@dataclass(slots=True)
class _Slot:
    row: StartedRow
    num_generated: int
    last_token: int = -1


class FakeRunner:
    """Carries plans out on a byte buffer. ``launch`` computes at once, as work in stream order would."""

    def __init__(self, specs: Sequence[PageSpec], end_ids: tuple[int, ...] = (END_TOKEN_ID,)) -> None:
        self.page_specs = tuple(specs)
        self.model_info = ModelInfo("fake-runner", "", "Fake", VOCAB_SIZE, 8192, end_ids, 1)
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self._end_ids = end_ids
        self._slots: dict[int, _Slot] = {}
        self._views: dict[str, Values] = {}
        self._usable: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.place_bytes = 0
        self._host: dict[tuple[str, int], Values] = {}
        self.num_from_host = 0
        """pages that came back from the host tier"""
        self.tables: dict[str, npt.NDArray[np.int64]] = {}

    @property
    def figures(self) -> Mapping[str, float]:
        return {}

    @property
    def pager(self) -> None:
        return None

    @property
    def passes(self) -> None:
        return None

    def measure_arena_bytes(self) -> int:
        raise AssertionError("a fake device has no memory to measure: give the engine its arena_bytes")

    def capture_graphs(self) -> None:
        """There is no device to capture on."""

    def attach_memory(self, specs: Sequence[PageSpec], arena_bytes: int) -> None:
        buffer = self.buffer = np.full(arena_bytes, GARBAGE, dtype=np.uint8)
        for spec in specs:
            if spec.kind is PageKind.EXPERT:
                self.place_bytes = spec.page_bytes
                self._usable = np.zeros(arena_bytes // spec.page_bytes, dtype=np.bool_)
                continue
            num_pages = arena_bytes // spec.page_bytes
            anchor = arena_bytes % spec.page_bytes if spec.kind is PageKind.FULL else 0
            self._views[spec.name] = np.ndarray(
                (num_pages, spec.page_tokens), np.uint64, buffer, anchor, (spec.page_bytes, 8)
            )
            self.tables[spec.name] = np.full(num_pages * 4, -1, dtype=np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        self._views.clear()

    def launch(self, plan: StepPlan) -> StepResult:
        if self.keep_plans:
            self.plans.append(plan)
        self.obey(plan.commands)
        self._scribble()
        return self.compute(plan, self.tables)

    def compute(self, plan: StepPlan, tables: Mapping[str, npt.NDArray[np.int64]]) -> StepResult:
        """Computes a plan's rows over pages that lie where ``tables`` say."""
        check_order(plan)
        for started in plan.started:
            generated = len(started.known_token_ids) - started.num_prompt_tokens
            self._slots[started.slot] = _Slot(started, generated)
        starts = np.cumsum(plan.query_len) - plan.query_len
        token_ids = np.full((plan.num_rows, 1), -1, dtype=np.int64)
        for row in range(plan.num_rows):
            slot = self._slots[int(plan.slots[row])]
            assert slot.row.request == plan.requests[row], "a slot's request never started there"
            tokens = plan.token_ids[starts[row] : starts[row] + plan.query_len[row]].copy()
            tokens[tokens == -1] = slot.last_token
            found = self._compute(plan, row, tokens, tables)
            if plan.samples[row]:
                position = int(plan.num_computed[row] + plan.query_len[row])
                token_ids[row, 0] = self._sample(slot, found, position, plan.token_masks.get(row))
        logprobs = tuple(self._logprobs(plan, row, int(token_ids[row, 0])) for row in range(plan.num_rows))
        return StepResult(
            plan.step,
            token_ids,
            plan.samples.astype(np.int64),
            logprobs if any(logprobs) else (),
            seconds=1e-4,
        )

    def _logprobs(self, plan: StepPlan, row: int, token: int) -> tuple[TokenLogprobs, ...]:
        asked = self._slots[int(plan.slots[row])].row.sampling.logprobs
        if asked is None or not plan.samples[row]:
            return ()
        top = tuple(((token + other) % VOCAB_SIZE, -0.5 - other) for other in range(asked))
        return (TokenLogprobs(token, -0.5, top),)

    def _sample(
        self, slot: _Slot, found: list[np.uint64], position: int, mask: npt.NDArray[np.int32] | None
    ) -> int:
        greedy = slot.row.sampling.temperature == 0.0
        token = _draw(found, 0 if greedy else slot.row.seed, position)
        token = _allowed(token, slot.row.sampling, slot.num_generated, self._end_ids)
        while mask is not None and not (int(mask[token // 32]) >> (token % 32)) & 1:
            token = (token + 1) % VOCAB_SIZE
        slot.num_generated += 1
        slot.last_token = token
        return token

    def _compute(
        self,
        plan: StepPlan,
        row: int,
        tokens: npt.NDArray[np.int64],
        tables: Mapping[str, npt.NDArray[np.int64]],
    ) -> list[np.uint64]:
        """Writes a row's new values, then reads what its last query sees, group by group."""
        start = int(plan.num_computed[row])
        end = start + len(tokens)
        fresh = token_values(tokens, start)
        found: list[np.uint64] = []
        for spec in self.page_specs:
            if spec.kind is PageKind.EXPERT:
                continue
            group = plan.groups[spec.name]
            virtual, first_page = group.tables[row], int(group.first_page[row])
            view, table = self._views[spec.name], tables[spec.name]
            if spec.kind is PageKind.STATE:
                page = table[virtual[0]]
                state = STATE_START if start == 0 else view[page, 0]
                view[page, 0] = _advance(state, fresh)
                found.append(view[page, 0].copy())
                continue
            positions = np.arange(start, end)
            columns = positions // spec.page_tokens - first_page
            assert columns.min() >= 0, "a token's page was let go"
            assert virtual[columns].min() >= 0, "a token has no page"
            view[table[virtual[columns]], positions % spec.page_tokens] = fresh
            seen = 0 if spec.window is None else max(0, end - spec.window)
            positions = np.arange(seen, end)
            columns = positions // spec.page_tokens - first_page
            assert columns.min() >= 0, "a visible page was let go"
            values = view[table[virtual[columns]], positions % spec.page_tokens]
            found.append((values * POWERS[seen:end]).sum())
        return found

    def _scribble(self) -> None:
        """Experts may be anywhere in the usable places at any time."""
        for place in np.flatnonzero(self._usable).tolist():
            self.buffer[place * self.place_bytes : (place + 1) * self.place_bytes] = GARBAGE

    @property
    def num_usable_places(self) -> int:
        """Expert places that may be used now."""
        return int(self._usable.sum())

    def obey(self, commands: StepCommands) -> None:
        """Carries a step's memory commands out."""
        for banned in commands.ban:
            self._usable[banned.first : banned.last] = False
        for move in commands.moves:
            self._views[move.group][move.target] = self._views[move.group][move.source]
        for copy in commands.copies:
            view = self._views[copy.group]
            if copy.to_host:
                self._host[copy.group, copy.target] = view[copy.source].copy()
            elif copy.from_host:
                view[copy.target] = self._host[copy.group, copy.source]
                self.num_from_host += 1
            else:
                view[copy.target] = view[copy.source]
        for update in commands.table:
            table = self.tables[update.group]
            if max(update.virtual) >= len(table):
                grown = np.full(2 * max(update.virtual) + 2, -1, dtype=np.int64)
                grown[: len(table)] = table
                table = self.tables[update.group] = grown
            table[list(update.virtual)] = update.physical
        for allowed in commands.allow:
            self._usable[allowed.first : allowed.last] = True


class FailingRunner(FakeRunner):
    """Raises once ``num_tokens`` tokens were generated in all."""

    def __init__(self, specs: Sequence[PageSpec], num_tokens: int) -> None:
        super().__init__(specs)
        self._left = num_tokens

    def launch(self, plan: StepPlan) -> StepResult:
        if self._left <= 0:
            raise RuntimeError("planted failure")
        self._left -= int(plan.samples.sum())
        return super().launch(plan)


def check_order(plan: StepPlan) -> None:
    """What every plan must keep to."""
    assert len(set(plan.slots.tolist())) == plan.num_rows, "a slot occurs twice"
    assert int(plan.query_len.sum()) == plan.num_tokens
    assert (plan.query_len[: plan.num_decode_rows] == 1).all()
    assert (plan.query_len[plan.num_decode_rows :] > 1).all()
    _check_tables(plan.groups, plan.num_rows)


def _check_tables(groups: Mapping[str, object], num_rows: int) -> None:
    for group in groups.values():
        assert len(group.tables) == num_rows == len(group.first_page)  # type: ignore[attr-defined]
