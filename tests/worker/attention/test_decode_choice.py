"""Which backend serves decode steps of each size: by given times, by what was asked for, and where none is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.attention import BACKENDS, decode_times, flash, triton_backend
from worker.attention.base import AttentionBackend, AttentionShape, KvPages, PagedGeometry
from worker.attention.choice import choose_backend, choose_decode_backend
from worker.attention.decode_choice import SWITCH, DecodeChoice, DecodeTimes, choose_decode, measured_rows
from worker.attention.decode_times import DecodeGroup, _geometry, _layers, _times, measure_decode
from worker.attention.flash_library import FlashLibrary
from worker.attention.sized import SizedAttention, SizedPlan
from worker.config import WorkerConfig

GPU = torch.device("cuda:0")
FULL = AttentionShape(8, 2, 64, 0.125)
WINDOW = replace(FULL, window=128)
GROUPS = {"full": DecodeGroup(FULL, 12, 64, "bfloat16"), "window": DecodeGroup(WINDOW, 12, 32, "bfloat16")}
ROWS = (1, 2, 4, 8, 16)


def times(
    triton: Sequence[float], flash_s: Sequence[float] | None = None, bound: int = 4096
) -> list[DecodeTimes]:
    """Of Triton beside flash's, which are 1 where none are given."""
    base = flash_s or [1.0] * len(triton)
    return [
        DecodeTimes(rows, bound, bound // 4, {"flash": ours, "triton": theirs})
        for rows, ours, theirs in zip(ROWS, base, triton, strict=False)
    ]


@pytest.mark.parametrize(
    ("triton", "names"),
    [
        # What was measured: ahead with few rows, behind with many.
        ([0.7, 0.75, 0.8, 1.1, 1.3], "t t t f f"),
        # Ties, and what is noise, stay with the one that serves all other steps.
        ([1.0, 1.0, 1.0, 1.0, 1.0], "f f f f f"),
        ([0.985, 1.01, 0.985, 1.0, 0.99], "f f f f f"),
        # One size that gains less than leaving and coming back costs.
        ([1.0, 1.0, 1.0 - 1.5 * SWITCH, 1.0, 1.0], "f f f f f"),
        ([1.0, 1.0, 1.0 - 3 * SWITCH, 1.0, 1.0], "f f t f f"),
        # A size amid others that gain is not left for a hair.
        ([0.8, 0.8, 1.01, 0.8, 0.8], "t t t t t"),
        ([0.8, 0.8, 1.5, 0.8, 0.8], "t t f t t"),
        # A little at every size is worth one change.
        ([0.975] * 5, "t t t t t"),
        ([0.985] * 5, "f f f f f"),
    ],
)
def test_each_size_takes_the_fastest_unless_a_change_gains_too_little(
    triton: list[float], names: str
) -> None:
    choice = choose_decode(times(triton), "flash")
    assert [name[0] for name in choice.names] == names.split()


def test_a_backend_that_failed_at_a_size_is_not_chosen_there() -> None:
    given = times([0.5, 0.5, 0.5])
    given[1] = replace(given[1], seconds={"flash": 1.0})
    assert choose_decode(given, "flash").names == ("triton", "flash", "triton")
    with pytest.raises(ValueError, match="flash was not measured at 2 rows"):
        choose_decode([given[0], replace(given[1], seconds={"triton": 1.0})], "flash")


def test_a_size_that_was_not_measured_takes_the_next_larger_one() -> None:
    given = times([0.5, 0.5, 2.0, 2.0], bound=32768) + times([2.0, 2.0, 2.0, 0.5])
    choice = choose_decode(given, "flash")
    assert [choice.name(rows, 4096) for rows in (1, 4, 5, 8, 300)] == [
        "flash",
        "flash",
        "triton",
        "triton",
        "triton",
    ]
    assert [choice.name(rows, 32768) for rows in (1, 2, 3, 8, 300)] == [
        "triton",
        "triton",
        "flash",
        "flash",
        "flash",
    ]
    assert choice.name(1, 8192) == "triton"
    assert choice.name(1, 1 << 20) == "triton"
    assert DecodeChoice("flash").name(7, 4096) == "flash"
    assert "triton at 1 x 8192 of 32768 (500000 us, flash 1000000)" in choice.line()


def test_rows_that_are_measured_reach_what_runs() -> None:
    assert measured_rows(1) == (1,)
    assert measured_rows(10) == (1, 2, 4, 8, 10)
    assert measured_rows(64) == (1, 2, 4, 8, 16, 32, 64)
    assert measured_rows(1000)[-1] == 256


class Measuring:
    """Answers given times, and keeps what was asked."""

    def __init__(self, triton_s: Callable[[DecodeGroup, int, int], float]) -> None:
        self.asked: list[tuple[DecodeGroup, tuple[str, ...], tuple[tuple[int, int], ...]]] = []
        self._triton_s = triton_s

    def __call__(
        self,
        device: torch.device,
        group: DecodeGroup,
        names: tuple[str, ...],
        sizes: tuple[tuple[int, int], ...],
    ) -> tuple[DecodeTimes, ...]:
        self.asked.append((group, names, sizes))
        return tuple(
            DecodeTimes(
                rows,
                bound,
                bound // 4,
                {n: self._triton_s(group, rows, bound) if n == "triton" else 1.0 for n in names},
            )
            for rows, bound in sizes
        )


@pytest.fixture
def with_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that has all it takes."""
    schema = SimpleNamespace(arguments=[SimpleNamespace(name="s_aux")])
    operator = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(flash, "find_library", lambda device: FlashLibrary(3, Path("lib.so"), operator, None))


SIZES = tuple((rows, bound) for bound in (4096, 16384) for rows in (1, 8, 64))


def chosen(
    measure: Measuring, shapes: Sequence[AttentionShape] = (FULL, WINDOW), **settings: Any
) -> AttentionBackend:
    config = WorkerConfig(model="any", **settings)
    base = choose_backend(config, shapes, GPU)
    groups = {name: group for name, group in GROUPS.items() if group.shape in shapes}
    return choose_decode_backend(config, base, groups, SIZES, GPU, measure)


def few_rows_of_full(group: DecodeGroup, rows: int, bound: int) -> float:
    return 0.5 if group.shape.window is None and rows < 64 and bound == 4096 else 1.5


@pytest.mark.usefixtures("with_flash")
def test_auto_serves_decode_steps_by_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    measure = Measuring(few_rows_of_full)
    with caplog.at_level("INFO"):
        backend = chosen(measure)
    assert isinstance(backend, SizedAttention)
    assert [names for _, names, _ in measure.asked] == [("flash", "triton", "triton_few")] * 2
    # A window is read alike in every longer context.
    assert [sizes for *_, sizes in measure.asked] == [SIZES, SIZES[3:]]
    assert backend.names(1, 4096) == ("triton", "flash")
    assert backend.names(48, 4096) == backend.names(1, 16384) == ("flash", "flash")
    assert "attention_backend=flash" in caplog.text
    assert (
        "group full: triton at 1 x 1024 of 4096 (500000 us, flash 1000000, triton_few 1000000); triton at"
        in caplog.text
    )
    assert backend.unusable_reason(FULL, GPU) is None
    assert "not measured" in str(backend.unusable_reason(replace(FULL, head_dim=32), GPU))


@pytest.mark.usefixtures("with_flash")
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"deterministic": True}, "triton"),
        ({"attention_backend": "flash"}, "flash"),
        ({"attention_backend": "triton"}, "triton"),
        ({"attention_backend": "torch"}, "torch"),
    ],
)
def test_nothing_is_measured_where_the_choice_is_fixed(settings: dict[str, Any], name: str) -> None:
    measure = Measuring(few_rows_of_full)
    assert chosen(measure, **settings).name == name
    assert measure.asked == []


@pytest.mark.usefixtures("with_flash")
@pytest.mark.parametrize(
    ("shape", "device", "base", "names"),
    [
        (replace(FULL, kv_dtype="float8_e4m3fn"), "cuda:0", "triton", ("triton", "triton_few")),
        (replace(FULL, head_dim=96), "cuda:0", "flash", None),
        (FULL, "cpu", "torch", None),
    ],
)
def test_only_what_can_serve_is_measured(
    shape: AttentionShape, device: str, base: str, names: tuple[str, ...] | None
) -> None:
    measure = Measuring(lambda group, rows, bound: 1.0)
    config = WorkerConfig(model="any")
    backend = choose_backend(config, (shape,), torch.device(device))
    groups = {"full": replace(GROUPS["full"], shape=shape)}
    assert choose_decode_backend(config, backend, groups, SIZES, torch.device(device), measure) is backend
    assert backend.name == base
    assert [asked for _, asked, _ in measure.asked] == ([] if names is None else [names])


@pytest.mark.usefixtures("with_flash")
def test_one_backend_for_all_sizes_stays_by_itself() -> None:
    measure = Measuring(lambda group, rows, bound: 1.0)
    assert chosen(measure).name == "flash"
    assert len(measure.asked) == 2


@pytest.mark.parametrize(("name", "split"), [("triton", None), ("triton_few", 128)])
def test_each_kind_of_triton_has_its_splits(
    name: str, split: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_backend, "paged_attention", lambda *given: calls.append(given))
    backend: AttentionBackend = BACKENDS.load(name)()
    query = torch.zeros(1, 8, 64)
    geometry = SimpleNamespace(**dict.fromkeys(PagedGeometry.__slots__))
    plan = backend.plan(geometry, FULL)  # type: ignore[arg-type]
    assert backend.run(plan, query, KvPages(query, query), None, query) is query
    assert [given[-1] for given in calls] == [split]


def test_a_step_goes_to_the_backend_of_its_size_and_shape() -> None:
    backends: dict[str, AttentionBackend] = {name: BACKENDS.load(name)() for name in ("torch", "triton")}
    given = [
        replace(entry, seconds={"torch": 1.0, "triton": entry.seconds["triton"]})
        for entry in times([0.5, 2.0])
    ]
    sized = SizedAttention(backends, {FULL: choose_decode(given, "torch"), WINDOW: DecodeChoice("torch")})

    def planned(rows: int, shape: AttentionShape) -> str:
        numbers = torch.ones(rows, dtype=torch.int32)
        geometry = PagedGeometry(
            torch.arange(rows + 1, dtype=torch.int32),
            numbers,
            numbers[:, None].long(),
            numbers,
            16,
            1,
            4096,
            rows,
        )
        plan = sized.plan(geometry, shape)
        assert isinstance(plan, SizedPlan)
        return plan.backend.name

    assert [planned(1, FULL), planned(2, FULL), planned(1, WINDOW)] == ["triton", "torch", "torch"]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("rows", "bound"), [(1, 4096), (3, 4096), (64, 32768)])
def test_measured_steps_read_what_a_step_does_and_no_more_than_there_is(
    name: str, rows: int, bound: int
) -> None:
    group = GROUPS[name]
    scratch = torch.zeros(1 << 22, dtype=torch.bfloat16)
    geometry, length, num_pages = _geometry(
        group, rows, bound, scratch.nbytes // group.token_bytes, scratch.device
    )
    layers = _layers(group, scratch, num_pages)
    page, window = group.page_tokens, group.shape.window
    seen = length if window is None else min(length, window)
    assert length == bound // 4 or rows * (seen + 2 * page) * group.token_bytes > scratch.nbytes
    tables = geometry.tables
    assert tables.shape == (rows, -(-bound // page) + 1)
    assert sorted(tables[tables >= 0].tolist()) == list(range(num_pages))
    held = (tables >= 0).sum(1)
    low, high = geometry.first_page * page, (geometry.first_page + held) * page
    assert ((low <= length - seen) & (high >= length)).all()
    assert layers[0].key.shape == (num_pages, page, 2, 64)
    assert len(layers) == group.num_layers
    assert all(layer.value.untyped_storage().data_ptr() == scratch.data_ptr() for layer in layers)
    starts = {layer.key.data_ptr() for layer in layers}
    assert len(starts) == min(group.num_layers, scratch.nbytes // (num_pages * page * group.token_bytes))


class Broken:
    """A backend whose kernels do not fit the device."""

    name, capturable = "broken", True

    def plan(self, geometry: PagedGeometry, shape: AttentionShape) -> None:
        raise RuntimeError("out of resource: shared memory")


def test_each_backend_runs_the_same_step_and_one_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where what would be captured runs at once."""
    launched: list[int] = []

    def captured(run: Callable[[], None]) -> int:
        run()
        launched.append(1)
        return len(launched)

    def replayed(graphs: dict[str, int], flushed: torch.Tensor) -> dict[str, float]:
        return {name: 1e-3 * number for name, number in graphs.items()}

    class Known:
        def load(self, name: str) -> Callable[[], Any]:
            return Broken if name == "broken" else BACKENDS.load(name)

    monkeypatch.setattr(decode_times, "BACKENDS", Known())
    monkeypatch.setattr(decode_times, "_captured", captured)
    monkeypatch.setattr(decode_times, "_replayed", replayed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    scratch = torch.zeros(1 << 20, dtype=torch.bfloat16)
    shape = replace(FULL, has_sinks=True, kv_dtype="float32")
    group = DecodeGroup(shape, 6, 16, "float32")
    found = _times(group, ("torch", "broken", "triton"), 3, 256, scratch, scratch)
    assert (found.rows, found.bound, found.context) == (3, 256, 64)
    assert found.seconds == pytest.approx({"torch": 1e-3, "triton": 2e-3})
    assert "broken cannot serve decode steps of 3 rows up to 256: out of resource" in caplog.text
    with pytest.raises(RuntimeError, match="shared memory"):
        _times(group, ("broken", "torch"), 3, 256, scratch, scratch)


def test_a_size_that_memory_is_too_short_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU; an engine that could serve must not end because a measurement could not be made."""

    def timed(
        group: DecodeGroup, names: tuple[str, ...], rows: int, bound: int, *_: torch.Tensor
    ) -> DecodeTimes:
        if rows == 4:
            raise torch.OutOfMemoryError("tried to allocate 1.07 GiB")
        return DecodeTimes(rows, bound, 1, dict.fromkeys(names, 1.0))

    monkeypatch.setattr(decode_times, "_times", timed)
    monkeypatch.setattr(decode_times, "SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(decode_times, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 22, 1 << 22))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sizes = ((1, 64), (4, 64), (8, 64))
    group = replace(GROUPS["full"], page_tokens=16)
    found = measure_decode.__wrapped__(torch.device("cpu"), group, ("torch",), sizes)
    assert [entry.rows for entry in found] == [1, 8]
    assert "decode steps of 4 rows up to 64 were not measured: tried to allocate" in caplog.text
