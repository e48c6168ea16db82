"""Every geometry is rows and bytes: sizes of published models, layout inside a page, grids, visible windows."""

from __future__ import annotations

import pytest

from memory.api import Grant, LayerRows, PageAsk, PageKind, Row
from memory.ledger.ledger import ArenaLedger
from memory.ledger.specs import (
    Grid,
    attention_spec,
    expert_spec,
    first_visible_page,
    latent_spec,
    most_pages,
    pages_for,
    state_spec,
    with_draft,
)
from tests.memory.geometries import full_spec, window_spec


def test_full_attention_of_qwen3_30b_takes_98304_bytes_a_token() -> None:
    spec = attention_spec("full", range(48), 4, 128, "bfloat16", 64)
    assert spec.page_bytes == 64 * 98_304
    assert spec.kind is PageKind.FULL


def test_fp8_keys_and_values_bring_a_scale_per_head() -> None:
    spec = attention_spec("full", [5], 4, 128, "float8_e4m3fn", 64, scales=True)
    assert [(b.row.name, b.offset_bytes) for b in spec.blocks] == [
        ("k", 0),
        ("v", 64 * 512),
        ("k_scale", 2 * 64 * 512),
        ("v_scale", 2 * 64 * 512 + 64 * 16),
    ]
    assert spec.page_bytes == 64 * (2 * 512 + 2 * 16)


def test_several_windows_are_groups_of_their_own() -> None:
    near = attention_spec("window128", range(0, 24, 2), 8, 64, "bfloat16", 16, window=128)
    far = attention_spec("window1024", range(1, 24, 2), 8, 64, "bfloat16", 64, window=1024)
    assert near.kind is far.kind is PageKind.WINDOW
    assert near.page_bytes == 16 * 24_576
    assert (near.window, far.window) == (128, 1024)


def test_latents_carry_index_keys_in_the_same_entry() -> None:
    spec = latent_spec("full", range(61), 576, "bfloat16", 64, index_dim=128, index_scale=True)
    assert spec.page_bytes == 61 * 64 * (576 * 2 + 128 + 4)
    assert latent_spec("full", range(61), 576, "bfloat16", 64).page_bytes == 64 * 70_272


def test_states_mix_dtypes_and_match_the_published_bytes() -> None:
    parts = [Row("s", (32, 128, 128), "float32"), Row("conv", (8192, 3), "bfloat16")]
    spec = state_spec("state", range(24), parts)
    assert spec.page_bytes == 50_331_648 + 1_179_648
    assert (spec.page_tokens, pages_for(spec, 10_000)) == (1, 1)


def test_a_draft_rides_in_the_entries_of_the_model() -> None:
    spec = attention_spec("full", range(4), 2, 64, "bfloat16", 16)
    draft = LayerRows(100, (Row("k", (2, 64), "bfloat16"), Row("v", (2, 64), "bfloat16")))
    both = with_draft(spec, [draft])
    assert both.page_bytes == spec.page_bytes * 5 // 4
    assert both.blocks[: len(spec.blocks)] == spec.blocks
    with pytest.raises(ValueError, match=r"\[2\]"):
        with_draft(spec, [LayerRows(2, draft.rows)])


def test_blocks_are_aligned_apart_and_grouped_by_layer() -> None:
    spec = attention_spec("full", [3, 7], 1, 5, "float16", 16, scales=True)
    blocks = spec.blocks
    assert [block.layer for block in blocks] == [3] * 4 + [7] * 4
    ends = [block.offset_bytes + block.row.num_bytes * 16 for block in blocks]
    assert all(block.offset_bytes % 128 == 0 for block in blocks)
    assert all(end <= later.offset_bytes for end, later in zip(ends, blocks[1:], strict=False))
    assert ends[-1] <= spec.page_bytes


def test_an_expert_place_is_the_block_rounded_up() -> None:
    assert expert_spec("expert", 2_433_000).page_bytes == 2_433_024


def test_every_full_group_has_a_grid_that_ends_with_the_arena() -> None:
    """As the device lays its views out, also when two FULL groups share an arena."""
    both = [attention_spec(name, [layer], 3, 10, "float16", 16) for layer, name in enumerate(("a", "b"))]
    for ledger in (ArenaLedger([*both, window_spec(16, 40)], 10_000 * 7), ArenaLedger(both, 10_000 * 7)):
        arena_bytes = ledger.headroom().arena_bytes
        assert arena_bytes == 70_000 // 128 * 128
        for name, grid in ledger.grids.items():
            assert grid.anchor_bytes == (0 if name == "window" else arena_bytes % grid.page_bytes)
        ledger.begin_step(1, 0)
        count = 0
        while isinstance(ledger.grant(PageAsk(count, 40)), Grant):
            count += 1
        assert count >= 4
        ledger.audit()


def test_the_high_grid_ends_at_the_arenas_end() -> None:
    low, high = Grid.over(10_000_000, 4096), Grid.over(10_000_000, 4096, ends_at_end=True)
    assert (low.anchor_bytes, high.anchor_bytes) == (0, 10_000_000 % 4096)
    assert high.address(high.num_pages) == 10_000_000
    assert (low.page_up(4097), low.page_down(4097)) == (2, 1)
    assert (high.page_up(high.anchor_bytes), high.page_down(high.anchor_bytes)) == (0, 0)
    assert Grid.over(1 << 40, 4096).address((1 << 40) // 4096 - 1) > 2**31, (
        "addresses are plain ints past 2^31"
    )


@pytest.mark.parametrize(
    ("num_computed", "first"), [(0, 0), (4, 0), (5, 0), (7, 0), (8, 1), (11, 1), (12, 2), (100, 24)]
)
def test_the_first_visible_page_of_a_window_of_five(num_computed: int, first: int) -> None:
    """Position 8 sees 4..8, the first whole page of which is page 1 of 4 tokens."""
    assert first_visible_page(window_spec(4, 5), num_computed) == first
    assert first_visible_page(full_spec(4), num_computed) == 0


def test_most_pages_covers_every_alignment_of_a_chunk() -> None:
    spec = window_spec(16, 40)
    for computed in range(0, 400):
        for chunk in (1, 16, 64):
            held = pages_for(spec, computed + chunk) - first_visible_page(spec, computed)
            assert held < most_pages(spec, 10_000, chunk), "one page more may still be in flight"
    assert most_pages(spec, 20, 64) == 2
    assert most_pages(spec, 10_000, 1) == 5
    assert most_pages(window_spec(16, 128), 10_000, 1) == 10, (
        "a window costs its tokens, not the next power of two"
    )
