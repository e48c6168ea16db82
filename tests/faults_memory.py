"""Faults of the ledger: each undoes one line that keeps bytes, owners or answers right."""

from __future__ import annotations

from tests.faults import Fault

_LESSONS = "tests/memory/test_ledger_lessons.py::"
_GRANTS = "tests/memory/test_ledger_grants.py::"
_LAYOUT = "tests/memory/test_ledger_layout.py::"
_PAGES = "tests/memory/test_ledger_pages.py::"
_SPECS = "tests/memory/test_specs.py::"
_WALK = "tests/memory/test_ledger_drill.py::test_no_byte_is_ever_wrong_on_long_walks[3]"

FAULTS = [
    # -- owners and bytes
    Fault(
        "double free",
        "memory.ledger.page_table",
        'raise LedgerError(f"{self.group}: virtual page {virtual} is released twice")',
        "return False",
        (f"{_LESSONS}test_double_free_and_unknown_ids_raise",),
    ),
    Fault(
        "a physical page freed twice",
        "memory.ledger.page_pool",
        "elif before not in (BOUND, TARGET):",
        "elif before not in (BOUND, TARGET, FREE):",
        (f"{_PAGES}test_freeing_a_page_twice_raises",),
    ),
    Fault(
        "unknown virtual ids pass",
        "memory.ledger.page_table",
        "if not 0 <= virtual < len(self.physical) or self.physical[virtual] < 0:",
        "if False:",
        (f"{_PAGES}test_unknown_and_dead_virtual_pages_raise",),
    ),
    Fault(
        "lost pending free",
        "memory.ledger.deferred",
        "done += self._by_step.pop(heappop(self._steps))",
        "done += self._by_step.pop(heappop(self._steps))[1:]",
        (f"{_GRANTS}test_a_released_page_waits_for_the_step_that_reads_it",),
    ),
    Fault(
        "bytes reused while a step reads them",
        "memory.ledger.book",
        "if due <= self.completed_step:",
        "if True:",
        (f"{_GRANTS}test_a_released_page_waits_for_the_step_that_reads_it", _WALK),
    ),
    Fault(
        "pages retire a step early",
        "memory.ledger.deferred",
        "self._steps[0] <= completed_step",
        "self._steps[0] <= completed_step + 1",
        (f"{_PAGES}test_deferred_frees_wait_for_their_step", _WALK),
    ),
    Fault(
        "the last reader is forgotten",
        "memory.ledger.page_table",
        "self.last_step[virtual] = last_step\n        if self.users",
        "pass\n        if self.users",
        (_WALK,),
    ),
    # -- one joint grant
    Fault(
        "same bytes credited twice",
        "memory.ledger.headroom",
        "used = (table.num_bound - table.num_pinned) * size - reclaimable",
        "used = (table.num_bound - table.num_pinned) * size",
        (f"{_GRANTS}test_cached_pages_give_way_to_requests_and_a_stale_match_is_refused",),
    ),
    Fault(
        "the gap credited to every kind",
        "memory.ledger.room",
        "return max(0, sum(pages * self._pools[g].page_bytes for g, pages in need.items()) - free)",
        "return max([0, *(pages * self._pools[g].page_bytes - free for g, pages in need.items())])",
        (f"{_LESSONS}test_evictable_bytes_are_credited_once",),
    ),
    Fault(
        "evictable bytes credited to two kinds",
        "memory.ledger.room",
        "if lacking > sum(mine):",
        "if False:",
        (f"{_LESSONS}test_evictable_bytes_are_credited_once",),
    ),
    Fault(
        "a kind forgotten in the joint grant",
        "memory.ledger.room",
        "if lacking > 0 and not self._layout.grow(group, lacking):\n                done = False",
        "if lacking > 0 and not self._layout.grow(group, lacking):\n                done = done and group > 1",
        (f"{_LESSONS}test_no_byte_is_granted_to_two_kinds",),
    ),
    Fault(
        "a state is free by count, not by bytes",
        "memory.ledger.extents",
        "return max(0, pool.grid.page_down(edge) - pool.last)",
        "return pool.grid.num_pages - pool.last",
        (f"{_LESSONS}test_a_state_without_bytes_is_not_free_by_count",),
    ),
    Fault(
        "over-admission raises",
        "memory.ledger.room",
        "if self.in_place(need) or self.by_moving(need):\n            return True\n        if self._cache is None:",
        "if self.in_place(need) or self.by_moving(need) or not self._cache:\n            return True\n"
        "        if not need:",
        (f"{_LESSONS}test_over_admission_is_an_answer",),
    ),
    Fault(
        "a prefix hit forgets the copy of its state",
        "memory.ledger.ledger",
        "num_states=2)",
        "num_states=1)",
        (f"{_LESSONS}test_a_prefix_hit_pays_for_the_copy_of_its_state",),
    ),
    Fault(
        "the floor is not in the price of the longest request",
        "memory.ledger.extents",
        "if not floor_places:\n        return cursor <= high",
        "if True:\n        return cursor <= high",
        (f"{_LESSONS}test_whoever_is_let_in_can_finish_and_whoever_cannot_is_refused_with_the_bytes",),
    ),
    Fault(
        "pending frees are not told",
        "memory.ledger.book",
        "return sum(pool.num_pending * pool.page_bytes for pool in self.pools)",
        "return 0",
        (f"{_LESSONS}test_frees_on_their_way_are_told_before_anybody_is_sent_back",),
    ),
    Fault(
        "a start-up share caps a kind",
        "memory.ledger.extents",
        "edge = self._edge(index, up)\n        size, places",
        "edge = self._edge(index, up)\n        edge = min(edge, self.arena_bytes // 2) if up else edge\n"
        "        size, places",
        (f"{_LESSONS}test_the_cap_of_running_requests_is_what_the_arena_holds",),
    ),
    Fault(
        "a band takes the whole gap at once",
        "memory.ledger.extents",
        "grown = min(room, -(-left // stride) * stride)",
        "grown = max(0, room)",
        (f"{_LESSONS}test_kinds_need_no_common_page_size",),
    ),
    Fault(
        "the floor of places is ignored",
        "memory.ledger.extents",
        "return max(0, self.floor_places - (self.usable_places() - beside))",
        "return 0",
        (f"{_LAYOUT}test_growth_stops_at_the_floor_of_places",),
    ),
    # -- windows
    Fault(
        "window pages freed one page too early",
        "memory.ledger.specs",
        "return max(0, num_computed_tokens - spec.window + 1) // spec.page_tokens",
        "return max(0, num_computed_tokens - spec.window + 1 + spec.page_tokens) // spec.page_tokens",
        (f"{_GRANTS}test_window_pages_leave_exactly_when_the_last_query_has_passed", _WALK),
    ),
    Fault(
        "window pages kept one token too long",
        "memory.ledger.specs",
        "return max(0, num_computed_tokens - spec.window + 1) // spec.page_tokens",
        "return max(0, num_computed_tokens - spec.window) // spec.page_tokens",
        (f"{_GRANTS}test_window_pages_leave_exactly_when_the_last_query_has_passed",),
    ),
    Fault(
        "a window is paged at twice its cost",
        "memory.ledger.specs",
        "return min(pages, -(-(span + spec.page_tokens - 1) // spec.page_tokens) + 1)",
        "return pages",
        (f"{_SPECS}test_most_pages_covers_every_alignment_of_a_chunk",),
    ),
    # -- moves and pins
    Fault(
        "move under a pin",
        "memory.ledger.relocation",
        "not self._tables[group].pins[virtual]\n            and ",
        "",
        (f"{_LAYOUT}test_pinned_pages_do_not_move",),
    ),
    Fault(
        "a pinned page flips under its reader",
        "memory.ledger.relocation",
        "if table.pins[virtual]:",
        "if False:",
        ("tests/memory/test_ledger_drill.py::test_no_pinned_page_flips",),
    ),
    Fault(
        "of two pins one is lost",
        "memory.ledger.page_table",
        "self.pins[virtual] -= 1",
        "self.pins[virtual] = 0",
        (f"{_LESSONS}test_two_readers_of_one_page_each_hold_it",),
    ),
    Fault(
        "mutable page moved beside a step",
        "memory.ledger.relocation",
        "if table.sealed[virtual] != MUTABLE and table.sealed[virtual] - 1 <= completed_step:",
        "if True:",
        (f"{_LAYOUT}test_sealed_pages_move_beside_steps_and_tail_pages_between_them",),
    ),
    Fault(
        "a page still being written counts as sealed",
        "memory.ledger.relocation",
        "and table.sealed[virtual] - 1 <= completed_step:",
        "and True:",
        ("tests/memory/test_ledger_drill.py::test_a_page_is_not_copied_before_its_last_writer_is_done",),
    ),
    Fault(
        "the table flips before the copy is done",
        "memory.ledger.relocation",
        "if step <= completed_step]",
        "if step <= completed_step + 1]",
        (_WALK,),
    ),
    Fault(
        "moves of one batch overwrite each other",
        "memory.ledger.relocation",
        "if not avoid.touches(address, address + pool.page_bytes):",
        "if True:",
        ("tests/memory/test_ledger_drill.py", ),
    ),
    Fault(
        "the old bytes of a moved page are freed under a reader",
        "memory.ledger.relocation",
        "pool.defer(source)\n                self._deferred.add(committed_step, group, source)",
        "pool.free(source)",
        (_WALK,),
    ),
    Fault(
        "a copy's target is lost when its page ends",
        "memory.ledger.relocation",
        "self._deferred.add(step, group, target)",
        "pass",
        (_WALK,),
    ),
    Fault(
        "physical ids leave the ledger",
        "memory.ledger.ledger",
        "return PageRun(run.first, tuple(run.pages))",
        "table = self._book.tables[self._book.number[group]]\n"
        "        return PageRun(run.first, tuple([table.physical[page] for page in run.pages]))",
        (f"{_LESSONS}test_virtual_ids_survive_moves_and_physical_ones_stay_inside",),
    ),
    Fault(
        "background moves ignore their budget",
        "memory.ledger.relocation",
        "most = min(pool.num_free - keep_free, affordable)",
        "most = pool.num_free - keep_free",
        (f"{_LAYOUT}test_background_moves_keep_to_the_budget_and_stop_for_urgent_ones",),
    ),
    Fault(
        "bands are compacted though nobody needs the room",
        "memory.ledger.ledger",
        "wanted = layout.place_bytes or layout.gap_bytes() * _TIGHT_SHARE < layout.arena_bytes",
        "wanted = True",
        (f"{_LAYOUT}test_nothing_moves_while_memory_is_ample",),
    ),
    Fault(
        "urgent moves only one page",
        "memory.ledger.relocation",
        "if not inside or (self._urgent_bytes and spent > self.urgent_budget_bytes):",
        "if not inside or self._urgent_bytes:",
        (f"{_LAYOUT}test_a_full_neighbour_is_compacted_before_anybody_waits",),
    ),
    Fault(
        "floats never move",
        "memory.ledger.room",
        "if layout.room(group, up) >= pages or band.anchor is not Anchor.FLOAT:",
        "if True:",
        (f"{_LESSONS}test_the_cap_of_running_requests_is_what_the_arena_holds",),
    ),
    # -- expert places
    Fault(
        "place allowed too early",
        "memory.ledger.places",
        "drained += [(step, span) for span in common(freed, hot)]",
        "drained += [(completed_step, span) for span in common(freed, hot)]",
        (f"{_LAYOUT}test_a_ring_is_banned_and_comes_back_after_its_steps",),
    ),
    Fault(
        "a place is not banned when a page takes its bytes",
        "memory.ledger.places",
        "spans = merged((low // size, -(-high // size)) for low, high in blocks)",
        "spans = merged((-(-low // size), high // size) for low, high in blocks)",
        (f"{_LAYOUT}test_experts_give_way_to_pages_and_get_their_places_back", _WALK),
    ),
    Fault(
        "bytes that moves leave are forgotten after a step",
        "memory.ledger.relocation",
        "self._vacated_before.append((step, spans))",
        "pass",
        (f"{_LAYOUT}test_a_ring_is_banned_and_comes_back_after_its_steps", _WALK),
    ),
    Fault(
        "experts give way though the market says prefixes go first",
        "memory.ledger.room",
        "if not self.spare_prefixes and self._layout.place_bytes:",
        "if False:",
        ("tests/memory/test_ledger_market.py::test_grants_spare_prefixes_only_while_the_market_says_so",),
    ),
    # -- prefixes, states, host tier
    Fault(
        "a shared state is written in place",
        "memory.ledger.cache",
        "book.copy(group, page, holding.runs[group].pages[0])",
        "book.drop(group, holding.runs[group].pages[0])",
        (f"{_GRANTS}test_a_match_shares_pages_and_copies_the_state_on_write",),
    ),
    Fault(
        "a state between checkpoints is donated",
        "memory.ledger.cache",
        "if not self._states:\n            end -= end % self._tree.block_tokens",
        "if True:\n            end -= end % self._tree.block_tokens",
        (f"{_GRANTS}test_a_state_between_checkpoints_is_not_donated",),
    ),
    Fault(
        "a checkpoint keeps the state that goes on running",
        "memory.ledger.cache",
        "self._book.copy(group, holding.runs[group].pages[0], page)",
        "self._book.drop(group, page)",
        (f"{_LESSONS}test_resumed_state_is_restored_never_empty",),
    ),
    Fault(
        "a stale match is shared",
        "memory.ledger.cache",
        "if node != NO_NODE and not base.num_tokens:",
        "if False:",
        (f"{_GRANTS}test_cached_pages_give_way_to_requests_and_a_stale_match_is_refused",),
    ),
    Fault(
        "a match covers the last token",
        "memory.ledger.cache",
        "limit = len(token_ids) - 1",
        "limit = len(token_ids)",
        (f"{_GRANTS}test_a_match_never_covers_the_last_token",),
    ),
    Fault(
        "the host tier gives back another block's page",
        "memory.ledger.spill",
        "keys = tuple((digest, page) for digest in digests[base:] for page in range(count))",
        "keys = tuple((digest, count - 1 - page) for digest in digests[base:] for page in range(count))",
        (f"{_LESSONS}test_a_round_trip_through_the_host_brings_back_every_byte",),
    ),
    Fault(
        "a state comes back from the host late",
        "memory.ledger.ledger",
        "copies = back + book.take_copies(step)",
        "copies = book.take_copies(step)",
        (f"{_LESSONS}test_a_round_trip_through_the_host_brings_back_every_byte",),
    ),
    Fault(
        "host matches outlive their step",
        "memory.ledger.cache",
        "self._from_host.clear()",
        "pass",
        (f"{_LESSONS}test_a_host_match_is_valid_for_its_step_only",),
    ),
    Fault(
        "the oldest request is sent back for ever",
        "memory.ledger.retraction",
        "able.remove(oldest)",
        "pass",
        ("tests/memory/test_retraction.py::test_the_oldest_stays_so_that_somebody_finishes",),
    ),
]  # fmt: skip
