"""The arena's grids and views lie where the page specs say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory.api import LayerRows, PageKind, PageSpec, Row, TableUpdate
from memory.device.arena import Arena, page_anchor
from memory.device.huge_pages import HUGE_PAGE_BYTES, ask_for_huge_pages
from memory.device.tables import PageTables

FULL = PageSpec(
    "full",
    PageKind.FULL,
    4,
    (
        LayerRows(1, (Row("k", (2, 5), "float32"), Row("v", (2, 5), "bfloat16"))),
        LayerRows(3, (Row("k", (1, 3), "float32"),)),
    ),
)
STATE = PageSpec(
    "state",
    PageKind.STATE,
    1,
    (LayerRows(0, (Row("conv", (3, 7), "bfloat16"), Row("state", (2, 4), "float32"))),),
)
EXPERT = PageSpec("expert", PageKind.EXPERT, 1, (LayerRows(0, (Row("block", (640,), "uint8"),)),))


@pytest.fixture
def arena() -> Arena:
    return Arena([FULL, STATE, EXPERT], 10_001, torch.device("cpu"))


def test_grids_cover_the_arena_and_full_ends_where_it_does(arena: Arena) -> None:
    assert arena.num_bytes == 9984
    assert FULL.page_bytes == 256 + 128 + 128
    assert arena.grids["full"].shape == (19, 512)
    assert page_anchor(FULL, arena.num_bytes) == 256
    assert arena.grids["full"][-1].data_ptr() + 512 == arena.buffer.data_ptr() + arena.num_bytes
    assert arena.grids["state"].data_ptr() == arena.buffer.data_ptr()
    assert arena.grids["expert"].shape == (15, 640)


def test_views_start_at_their_blocks(arena: Arena) -> None:
    assert set(arena.views) == {(1, "k"), (1, "v"), (3, "k"), (0, "conv"), (0, "state")}
    assert arena.views[1, "k"].shape == (19, 4, 2, 5)
    assert arena.views[0, "conv"].shape == (39, 3, 7)
    for spec in (FULL, STATE):
        for block in spec.blocks:
            view = arena.views[block.layer, block.row.name]
            expected = arena.grids[spec.name][7].data_ptr() + block.offset_bytes
            assert view[7].data_ptr() == expected
            assert view.stride(0) * view.element_size() == spec.page_bytes
    arena.views[1, "v"][7, 3] = 2.0
    page = arena.grids["full"][7].clone()
    arena.views[1, "v"][7, 3] = 0.0
    changed = (page != arena.grids["full"][7]).nonzero().flatten()
    start = 256 + 3 * 20
    assert changed.min() >= start
    assert changed.max() < start + 20


def test_tables_translate_and_refuse() -> None:
    tables = PageTables()
    virtual = np.array([[4, 0], [2, -1]])
    assert tables.physical("full", virtual) is virtual
    tables.apply([TableUpdate("full", (0, 2, 4), (9, 8, 7)), TableUpdate("state", (5000,), (1,))])
    assert tables.physical("full", virtual).tolist() == [[7, 9], [8, -1]]
    assert tables.physical("state", np.array([5000])).tolist() == [1]
    tables.apply([TableUpdate("full", (2, 0), (-1, 3))])
    assert tables.physical("full", np.array([0])).tolist() == [3]
    for page in (2, 3, 1_000_000):
        with pytest.raises(LookupError, match=f"virtual page {page} is bound to nothing"):
            tables.physical("full", np.array([0, page]))


def test_advice_on_huge_pages_leaves_the_bytes_alone() -> None:
    buffer = torch.zeros(3 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    buffer[::4096] = 7
    ask_for_huge_pages(buffer)
    assert int(buffer.sum()) == 7 * 3 * HUGE_PAGE_BYTES // 4096
    assert not ask_for_huge_pages(buffer[:4096])
