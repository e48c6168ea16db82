"""Which replica likely holds a prefix."""

from __future__ import annotations

import pytest

from serve_app.policies.prefix_affinity import PrefixAffinity, block_hashes

PROMPT = list(range(1_000))


def chain(num_blocks: int, salt: str = "", first: int = 0) -> tuple[int, ...]:
    return block_hashes([first, *PROMPT[1 : num_blocks * 4 + 1]], salt, block_tokens=4)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_only_full_blocks_that_leave_a_token_to_compute_are_hashed(num_tokens: int, num_blocks: int) -> None:
    assert len(block_hashes(PROMPT[:num_tokens], block_tokens=4)) == num_blocks


def test_a_hash_stands_for_everything_before_it() -> None:
    assert chain(5)[:3] == chain(3)
    assert not set(chain(3)) & set(chain(3, first=7))
    assert not set(chain(3)) & set(chain(3, salt="tenant"))


def test_hits_are_the_longest_held_prefix_of_each_replica() -> None:
    prefixes = PrefixAffinity(block_tokens=4)
    prefixes.placed("a", chain(5), 1)
    prefixes.placed("b", chain(2), 2)
    prefixes.placed("c", chain(3, first=7), 3)
    assert prefixes.hit_tokens(chain(9)) == {"a": 20, "b": 8}
    assert prefixes.hit_tokens(chain(1)) == {"a": 4, "b": 4}
    assert prefixes.hit_tokens(()) == {}


def test_a_gap_in_the_chain_ends_the_hit() -> None:
    prefixes = PrefixAffinity(block_tokens=4)
    blocks = chain(4)
    prefixes.placed("a", blocks[:1] + blocks[2:], 1)
    assert prefixes.hit_tokens(blocks) == {"a": 4}


def test_the_map_is_bounded_and_forgets_the_oldest_tail_first() -> None:
    prefixes = PrefixAffinity(block_tokens=4, max_blocks=6)
    old, new = chain(4), chain(4, first=7)
    prefixes.placed("a", old, 1)
    prefixes.placed("a", new, 2)
    assert prefixes.num_blocks("a") == 6
    assert prefixes.hit_tokens(new) == {"a": 16}
    assert prefixes.hit_tokens(old) == {"a": 8}


def test_use_refreshes_a_prefix() -> None:
    prefixes = PrefixAffinity(block_tokens=4, max_blocks=6)
    first, second, third = chain(3), chain(3, first=7), chain(3, first=8)
    prefixes.placed("a", first, 1)
    prefixes.placed("a", second, 2)
    prefixes.placed("a", first, 3)
    prefixes.placed("a", third, 4)
    assert prefixes.hit_tokens(first) == {"a": 12}
    assert prefixes.hit_tokens(second) == {}


def test_a_block_found_gone_takes_the_older_ones_with_it() -> None:
    prefixes = PrefixAffinity(block_tokens=4)
    for stamp, first in enumerate((7, 8, 9), start=1):
        prefixes.placed("a", chain(3, first=first), stamp)
    prefixes.forget_until("a", prefixes.last_use("a", chain(3, first=8)[0]))
    assert [prefixes.hit_tokens(chain(3, first=first)) for first in (7, 8, 9)] == [{}, {}, {"a": 12}]


def test_a_placement_that_never_ran_brings_nothing_but_takes_nothing() -> None:
    prefixes = PrefixAffinity(block_tokens=4)
    prefixes.placed("a", chain(2), 1)
    prefixes.placed("a", chain(5), 2)
    prefixes.withdraw("a", chain(5)[2:], 2)
    assert prefixes.hit_tokens(chain(5)) == {"a": 8}


def test_a_flush_forgets_one_replica_only() -> None:
    prefixes = PrefixAffinity(block_tokens=4)
    prefixes.placed("a", chain(3), 1)
    prefixes.placed("b", chain(3), 2)
    prefixes.flush("a")
    prefixes.flush("never seen")
    assert prefixes.hit_tokens(chain(3)) == {"b": 12}
    assert prefixes.num_blocks("a") == 0
