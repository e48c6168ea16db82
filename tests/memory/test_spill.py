"""What comes back from the host, and what is rather computed."""

from __future__ import annotations

import pytest

from memory.api import Grant, PageAsk
from memory.ledger.spill import LINK_BYTES_PER_S
from tests.memory.geometries import full_spec, small_ledger, small_state_spec

STATE_BYTES = 100_000_000
"""Two milliseconds over the link: as long as 100 tokens take at the 0.02 ms that a tree without figures assumes."""


@pytest.mark.parametrize(("num_tokens", "comes_back"), [(64, 0), (128, 128)])
def test_a_prefix_comes_back_only_where_that_is_quicker(num_tokens: int, comes_back: int) -> None:
    assert LINK_BYTES_PER_S == 50e9
    specs = [full_spec(64), small_state_spec(STATE_BYTES)]
    ledger = small_ledger(specs, 10 * STATE_BYTES, cached=True, host_bytes=4 * STATE_BYTES)
    tokens = list(range(num_tokens))
    ledger.begin_step(0, -1)
    assert isinstance(ledger.grant(PageAsk(1, num_tokens)), Grant)
    ledger.commit_step(0)
    ledger.end_step(0)
    ledger.release(1, tokens, num_tokens)
    for step in (1, 2, 3):
        ledger.begin_step(step, step - 1)
        ledger.commit_step(step)
        ledger.end_step(step)
    assert ledger.report()["host_tier"]["waiting_pages"] == 0
    ledger.shed({spec.name: 1 << 60 for spec in specs})
    ledger.begin_step(4, 3)
    assert ledger.match([*tokens, 7]).num_tokens == comes_back


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_flush_empties_the_host_tier_too_at_once_or_when_its_copies_have_run(in_flight: bool) -> None:
    specs = [full_spec(64)]
    page = specs[0].page_bytes
    ledger = small_ledger(specs, 16 * page, cached=True, host_bytes=16 * page)
    tokens = list(range(128))

    ledger.begin_step(0, -1)
    assert isinstance(ledger.grant(PageAsk(1, 128)), Grant)
    ledger.commit_step(0)
    ledger.end_step(0)
    ledger.release(1, tokens, 128)
    ledger.begin_step(1, 0)
    ledger.commit_step(1)
    if not in_flight:
        ledger.end_step(1)
    assert ledger.report()["host_tier"]["used_bytes"] == 2 * page
    assert ledger.flush() == 4 * page, "two pages in the arena, two in the host tier"
    assert ledger.report()["host_tier"]["used_bytes"] == (2 * page if in_flight else 0)
    ledger.audit()
    assert ledger.match([*tokens, 7]).num_tokens == 0
    if in_flight:
        ledger.end_step(1)
    assert ledger.report()["host_tier"]["used_bytes"] == 0
    ledger.audit()
    assert ledger.flush() == 0
