"""Padded inputs of steps with chunks say what freshly built ones say, and their padding is inert."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
import torch

from tests.helpers.plans import PlanDriver
from tests.helpers.tiny import tiny_folder
from tests.worker.models.test_families import random_prompt
from worker.attention.base import AttentionPlan, AttentionShape, PagedGeometry
from worker.config import WorkerConfig
from worker.execution import graphs
from worker.execution.batch import BatchBuilder
from worker.execution.context import ForwardContext, StateGroup, TokenGroup
from worker.execution.mixed import MixedKey, MixedSizes, MixedSteps
from worker.execution.runner import ModelRunner
from worker.execution.staging import HostUploads
from worker.layers.delta_net import DeltaNetLayer
from worker.scheduling.step import StepPlan


class Geometries:
    """An attention backend whose plans are the geometries themselves."""

    name, capturable = "geometries", True

    def unusable_reason(self, shape: AttentionShape, device: torch.device) -> None:
        return None

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> AttentionPlan:
        return geometry

    def run(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is computed here")


def some_plan(driver: PlanDriver, lengths: list[int]) -> StepPlan:
    """A step in which the first rows decode and others bring chunks of which the last is not the prompt's end."""
    rng = random.Random(3)
    rows = []
    for length in lengths:
        request = driver.add(random_prompt(rng, length + 70))
        row = driver.rows[request]
        row.num_computed = 0 if length == lengths[-1] else 70 if length == 1 else rng.choice([0, 33, 64])
        if row.num_computed == 70 and length == 1:
            row.tokens = row.tokens[:71]
        rows.append(row)
    plan = driver._plan(rows, lengths, {})
    plan.token_ids[0] = -1  # still on the device
    return plan


@pytest.mark.parametrize("lengths", [[1, 1, 1, 30, 64, 100], [129], [1, 2], [1, 300]])
def test_what_is_filled_is_what_is_built(lengths: list[int]) -> None:
    folder = tiny_folder("qwen3_5_moe", window=48)
    runner = ModelRunner(WorkerConfig(model=str(folder), device="cpu", page_tokens=16, max_running=16))
    driver = PlanDriver(runner, arena_bytes=1 << 24)
    sizes = MixedSizes.of(16, 512, 4096, recurrent=True)
    backend = Geometries()
    steps = MixedSteps(
        runner._model.decoder, runner.arena, runner._shapes, backend, runner._last_tokens, sizes
    )
    steps._values.fill_(-7)  # what an earlier step left
    plan = some_plan(driver, lengths)
    decode = plan.num_decode_rows
    key = sizes.find(plan)
    assert key is not None
    rows, tokens, bound = key
    slots = steps.fill(plan, key, HostUploads())
    assert slots.tolist() == plan.slots[plan.samples].tolist()
    parts, context = steps.context(key)
    built = BatchBuilder(runner.arena, runner._shapes, backend, runner._model.conv_width).build(
        plan, runner._last_tokens, HostUploads()
    )
    at = torch.arange(plan.num_tokens)
    at[decode:] += rows - decode
    padding = torch.ones(rows + tokens, dtype=torch.bool)
    padding[at] = False
    held = runner._last_tokens.index_select(0, parts["slot"])
    token_ids = torch.where(parts["token"] < 0, held, parts["token"])
    assert torch.equal(token_ids[at], built.token_ids)
    assert torch.equal(context.positions[at], built.context.positions)
    assert context.live is not None
    assert torch.equal(context.live, ~padding)
    assert parts["sample"][: len(slots)].tolist() == at[built.sample_index].tolist()
    row_at = torch.arange(plan.num_rows)
    row_at[decode:] += rows - decode
    for name in runner._shapes:
        ours, theirs = context.groups[name], built.context.groups[name]
        assert torch.equal(ours.page[at], theirs.page)
        assert torch.equal(ours.offset[at], theirs.offset)
        assert (ours.page[padding] == -1).all()
        wanted = theirs.plan
        assert isinstance(wanted, PagedGeometry)
        first = 0
        for geometry, count, size in planned(ours, decode, plan.num_rows, rows):
            assert geometry.kv_len.shape[0] == size
            part = slice(first, first + count)
            lens = geometry.query_start.diff()
            assert torch.equal(lens[:count], wanted.query_start.diff()[part])
            assert geometry.query_start[0] == 0
            assert torch.equal(geometry.kv_len[:count], wanted.kv_len[part])
            assert (geometry.kv_len[count:] == 0).all()
            assert torch.equal(geometry.first_page[:count], wanted.first_page[part])
            assert torch.equal(geometry.tables[:count, : wanted.tables.shape[1]], wanted.tables[part])
            assert geometry.max_kv_len == bound
            first += count
        chunks = ours.plan if ours.chunk_plan is None else ours.chunk_plan
        assert isinstance(chunks, PagedGeometry)
        assert (chunks.num_decode_rows, chunks.max_query_len) == (0, tokens)
        assert chunks.query_start[-1] == plan.num_tokens - decode
    check_states(context.state, built.context.state, decode, rows, tokens)


def planned(
    group: TokenGroup, decode: int, num_rows: int, rows: int
) -> Iterator[tuple[PagedGeometry, int, int]]:
    """The geometries of a group, how many rows each really has, and padded."""
    chunks = group.plan
    if rows:
        assert isinstance(group.plan, PagedGeometry)
        assert (group.plan.num_decode_rows, group.plan.max_query_len) == (rows, 1)
        assert group.plan.query_start.tolist() == list(range(rows + 1))
        yield group.plan, decode, rows
        chunks = group.chunk_plan
    assert isinstance(chunks, PagedGeometry)
    yield chunks, num_rows - decode, chunks.kv_len.shape[0]


def check_states(ours: object, theirs: object, decode: int, rows: int, tokens: int) -> None:
    from kernels.recurrent import PaddedLayout

    assert isinstance(ours, StateGroup)
    assert isinstance(theirs, StateGroup)
    layout, wanted = ours.layout, theirs.layout
    assert isinstance(layout, PaddedLayout)
    assert wanted is not None
    assert torch.equal(ours.decode_page[:decode], theirs.decode_page)
    assert (ours.decode_page[decode:] == -1).all()
    count, total = len(theirs.chunk_page), len(wanted.token_row)
    assert torch.equal(ours.chunk_page[:count], theirs.chunk_page)
    assert (ours.chunk_page[count:] == -1).all()
    assert torch.equal(layout.token_row[:total], wanted.token_row)
    assert (layout.token_row[total:] == -1).all()
    assert torch.equal(layout.query_start[: count + 1], wanted.query_start)
    assert (layout.query_start[count:] == total).all()
    pieces = len(wanted.chunk_index)
    assert torch.equal(layout.chunk_index[:pieces], wanted.chunk_index)
    assert torch.equal(layout.first_chunk[:count], wanted.first_chunk)
    # Behind the real ones: past the end of the row they name.
    row, number = layout.chunk_index[pieces:].unbind(1)
    assert (number * 64 >= layout.query_start.diff()[row]).all()
    assert ours.longest == tokens


def test_every_plan_that_fits_finds_the_smallest_sizes() -> None:
    for most, tokens, longest in ((1, 16, 128), (8, 100, 4096), (64, 2048, 262144), (600, 8192, 40960)):
        sizes = MixedSizes.of(most, tokens, longest, recurrent=most != 64)
        assert sizes.rows[0] == 0
        assert sizes.rows[-1] == most
        assert sizes.bounds[-1] == longest
        for found in (sizes.rows, sizes.alone, sizes.beside, sizes.bounds):
            assert all(small < large for small, large in pairwise(found))
        assert sizes.alone[-1] >= min(tokens, 2048)
        assert sizes.beside[-1] >= min(tokens - 1, 1984)
        assert len(sizes.keys) <= 80
        assert len(set(sizes.keys)) == len(sizes.keys)
        assert all(1 <= sizes.chunk_rows(size) <= most for size in sizes.alone + sizes.beside)
        rng = random.Random(most)
        for _ in range(60):
            lengths = [
                rng.choice([2, 17, 64, 65, 300, tokens]) for _ in range(rng.choice([1, 1, 2, min(9, most)]))
            ]
            decode = rng.choice([0, rng.randint(0, max(0, most - len(lengths)))])
            check_smallest(sizes, plan_of([1] * decode + lengths), lengths)


def check_smallest(sizes: MixedSizes, plan: StepPlan, lengths: list[int]) -> None:
    """No smaller sizes hold the plan's rows, tokens, pieces of 64 tokens, and longest row."""
    decode, pieces = plan.num_decode_rows, sum(-(-length // 64) for length in lengths)
    fitting = [
        (rows, tokens, bound)
        for rows, tokens, bound in sizes.keys
        if (rows > 0) == (decode > 0)
        and rows >= decode
        and tokens >= sum(lengths)
        and sizes.num_chunks(tokens) >= pieces
        and bound >= max(lengths)
    ]
    found = sizes.find(plan)
    assert found == min(fitting, default=None)
    assert found is None or sizes.chunk_rows(found[1]) >= len(lengths)


def plan_of(lengths: list[int], computed: int = 0) -> StepPlan:
    from memory.api import StepCommands

    count = len(lengths)
    ints = np.arange(count, dtype=np.int64)
    return StepPlan(
        step=0,
        requests=ints,
        slots=ints,
        query_len=np.array(lengths, dtype=np.int64),
        num_computed=np.full(count, computed, dtype=np.int64),
        token_ids=np.zeros(sum(lengths), dtype=np.int64),
        samples=np.ones(count, dtype=np.bool_),
        num_decode_rows=sum(n == 1 for n in lengths),
        groups={},
        commands=StepCommands(0),
        started=(),
    )


def test_sizes_of_single_plans() -> None:
    sizes = MixedSizes.of(64, 2048, 40960, recurrent=True)
    assert sizes.find(plan_of([16])) == (0, 16, 16384)
    assert sizes.find(plan_of([16], 20000)) == (0, 16, 40960)
    assert sizes.find(plan_of([1] * 63 + [17])) == (64, 64, 16384)
    assert sizes.find(plan_of([2] * 30)) == (0, 64, 16384)
    # Above 64 tokens chunks that may come take time: so few of them are provided for.
    assert sizes.find(plan_of([15] * 6)) == (0, 128, 16384)
    assert sizes.find(plan_of([15] * 7)) == (0, 256, 16384)
    assert sizes.find(plan_of([65] * 3)) == (0, 256, 16384)
    assert sizes.find(plan_of([65] * 6)) == (0, 512, 16384)
    assert sizes.find(plan_of([1] * 2 + [960])) == (64, 960, 16384)
    assert sizes.find(plan_of([1] * 2 + [1985])) is None
    assert sizes.find(plan_of([2049])) is None
    assert sizes.find(plan_of([20] * 40)) is None
    assert sizes.find(plan_of([1] * 8)) is None
    others = MixedSizes.of(64, 2048, 40960, recurrent=False)
    assert others.find(plan_of([40] * 20)) == (0, 1024, 16384)
    assert others.find(plan_of([2049])) is None
    # A whole step of one row, as memory is measured, is more than a short context.
    short = MixedSizes.of(64, 2048, 1024, recurrent=True)
    assert short.find(plan_of([1024])) == (0, 1024, 1024)
    assert short.find(plan_of([2048])) is None
    assert short.find(plan_of([1, 500], 600)) is None


def test_a_rehearsal_fills_a_step_and_has_no_pages() -> None:
    runner = ModelRunner(
        WorkerConfig(model=str(tiny_folder("qwen3_5_moe", window=48)), device="cpu", max_running=16)
    )
    runner.attach_memory(runner.page_specs, 1 << 24)
    sizes = MixedSizes.of(16, 512, 4096, recurrent=True)
    steps = MixedSteps(
        runner._model.decoder, runner.arena, runner._shapes, Geometries(), runner._last_tokens, sizes
    )
    steps._values.fill_(1 << 40)  # what steps of other sizes left: no token, no slot
    for key in sizes.keys:
        steps.rehearse(key)
        parts, context = steps.context(key)
        _, tokens, _ = key
        assert (parts["slot"] == 0).all()
        assert (parts["token"] == 0).all()
        assert context.live is not None
        assert not context.live.any()
        for group in context.groups.values():
            assert (group.page == -1).all()
            for plan in (group.plan, group.chunk_plan):
                assert plan is None or isinstance(plan, PagedGeometry)
                assert plan is None or (plan.kv_len == 0).all()
        state = context.state
        assert state is not None
        assert (state.decode_page == -1).all()
        assert (state.chunk_page == -1).all()
        assert state.layout is not None
        lengths = state.layout.query_start.diff()
        assert lengths.tolist() == [tokens] + [0] * (len(lengths) - 1)
        row, number = state.layout.chunk_index.unbind(1)
        assert int((number * 64 < lengths[row]).sum()) == -(-tokens // 64)


def test_every_size_runs_on_its_rehearsal_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled or loaded within a capture may end it, and kernels differ by the longest context too."""
    sizes = MixedSizes.of(16, 100, 50000, recurrent=True)
    ran: list[tuple[str, MixedKey]] = []

    class Steps:
        def __init__(self) -> None:
            self.sizes = sizes

        def rehearse(self, key: MixedKey) -> None:
            ran.append(("rehearse", key))

        def forward(self, key: MixedKey) -> None:
            ran.append(("run", key))

    class Pool:
        def capture(self, run: Callable[[], None], warm_ups: int) -> object:
            for _ in range(warm_ups):
                run()
            ran.append(("capture", ran[-1][1]))
            return object()

    monkeypatch.setattr(graphs, "_told", lambda *_: nullcontext())
    mixed = graphs.MixedGraphs(cast("MixedSteps", Steps()))
    mixed.capture(cast("graphs.GraphPool", Pool()))
    assert len(sizes.bounds) == 2
    assert ran == [(what, key) for key in sizes.keys for what in ("rehearse", "run", "capture")]


@pytest.mark.parametrize("fused", [False, True])
def test_only_what_was_launched_beside_is_waited_for(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture in which somebody waits for a stream that was not forked from it ends with an error."""
    folder = tiny_folder("qwen3_5_moe", window=48)
    runner = ModelRunner(WorkerConfig(model=str(folder), device="cpu", page_tokens=16, max_running=16))
    driver = PlanDriver(runner, arena_bytes=1 << 24)
    forks, joins = [0], [0]

    def fork(context: ForwardContext) -> AbstractContextManager[object]:
        forks[0] += 1
        return nullcontext()

    def join(context: ForwardContext) -> None:
        joins[0] += 1
        assert joins == forks

    def advance(inner: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return given[-1].zero_()

    monkeypatch.setattr(ForwardContext, "beside", fork)
    monkeypatch.setattr(ForwardContext, "join", join)
    layers = [
        layer.mixer for layer in runner._model.decoder._layers if isinstance(layer.mixer, DeltaNetLayer)
    ]
    for layer in layers:
        layer._fused = advance if fused else None
    requests = [driver.add(random_prompt(random.Random(n), n)) for n in (1, 30, 90)]
    driver.step({requests[0]: 1, requests[1]: 30, requests[2]: 90})
    assert forks == joins == [len(layers) if fused else 0]
