"""Faults of the arena on the device: wrong orders between streams, wrong pages, bytes read that are nobody's."""

from __future__ import annotations

from tests.faults import Fault

_MOVER = "tests/memory/device/test_mover.py::"
_LATE = "tests/worker/test_restless_arena.py::test_no_disturbance_of_memory_changes_a_bit[late]"
_WATCHED = "tests/worker/test_restless_arena.py::test_no_disturbance_of_memory_changes_a_bit[watched]"

FAULTS = [
    Fault(
        "a state moves beside a step",
        "memory.device.mover",
        "self.lanes.compute(lambda: self._copy(moving))",
        "self.lanes.run(Lane.MOVE, [self.lanes.mark()], lambda: self._copy(moving))",
        (_LATE,),
    ),
    Fault(
        "a table is written under a step in flight",
        "memory.device.mover",
        "self.lanes.compute(lambda: self._tables.patch(where, what))",
        "self._tables.patch(where, what)",
        (f"{_MOVER}test_a_step_in_flight_sees_its_own_tables_and_bytes",),
    ),
    Fault(
        "numbers are written over under a step in flight",
        "memory.device.ring",
        "lanes.finish(slot.sent)  # of four steps ago: done long since",
        "pass",
        (f"{_MOVER}test_a_step_in_flight_sees_its_own_tables_and_bytes",),
    ),
    Fault(
        "numbers are written over under a lane",
        "memory.device.ring",
        "        for mark in slot.readers:\n            lanes.wait(mark)\n",
        "",
        (f"{_MOVER}test_numbers_kept_by_a_late_lane_are_not_written_over",),
    ),
    Fault(
        "a virtual id is used as a physical one",
        "memory.device.tables",
        "        found = table[virtual]\n",
        "        found = virtual.copy()\n",
        (_LATE,),
    ),
    Fault(
        "a stale tail is read",
        "worker.attention.rowwise",
        "kv_len.to(torch.int32),",
        "(kv_len + (kv_len % 16 != 0)).to(torch.int32),  # one slot more, where the page has one",
        (_WATCHED,),
    ),
    Fault(
        "a copy beside the steps counts as done too early",
        "memory.device.mover",
        "return self._beside[0][0] - 1",
        "return step",
        (f"{_MOVER}test_a_step_is_finished_only_with_its_lanes", _LATE),
    ),
    Fault(
        "the engine asks nobody whether copies are done",
        "worker.loop",
        'getattr(runner, "finished_step", None)',
        "None",
        (_LATE,),
    ),
    Fault(
        "a page comes back before it has gone",
        "memory.device.mover",
        "for mark in (after, self._last_out) if mark is not None",
        "for mark in (after,) if mark is not None",
        (f"{_MOVER}test_what_lanes_still_read_is_waited_for", _LATE),
    ),
    Fault(
        "a step does not wait for what comes back",
        "memory.device.mover",
        "        self.lanes.wait(end)\n",
        "",
        (f"{_MOVER}test_what_lanes_still_read_is_waited_for", _LATE),
    ),
    Fault(
        "a move overtakes a copy to the host",
        "memory.device.mover",
        "if not moved.isdisjoint(pages):",
        "if False:",
        (f"{_MOVER}test_what_lanes_still_read_is_waited_for",),
    ),
    Fault(
        "what comes back overtakes a move",
        "memory.device.mover",
        "        if between:\n            self.hold_lanes_back()\n",
        "",
        (f"{_MOVER}test_what_comes_back_waits_for_bytes_given_away_and_for_nothing_else[move]",),
    ),
    Fault(
        "what comes back overtakes a ban",
        "memory.device.mover",
        "        if commands.ban:\n            self.hold_lanes_back()\n",
        "",
        (f"{_MOVER}test_what_comes_back_waits_for_bytes_given_away_and_for_nothing_else[ban]",),
    ),
    Fault(
        "copies that follow each other share a launch",
        "memory.device.mover",
        "launch is None or source in written[group] or target in written[group] or target in read[group]",
        "launch is None",
        (f"{_MOVER}test_copies_keep_their_order_in_few_launches",),
    ),
    Fault(
        "pages of the host tier overlap",
        "memory.device.host_tier",
        "first = slab * self._slab_bytes + index * size",
        "first = slab * size + index * size",
        ("tests/memory/device/test_host_bytes.py",),
    ),
    Fault(
        "pages of one slab are written over each other",
        "memory.device.host_tier",
        "first = slab * self._slab_bytes + index * size",
        "first = slab * self._slab_bytes",
        ("tests/memory/device/test_host_bytes.py",),
    ),
    Fault(
        "a launch takes blocks for pages",
        "kernels._triton.pages",
        "_move_pages[(triton.cdiv(size, block), count)](",
        "_move_pages[(count, triton.cdiv(size, block))](",
        ("tests/kernels/test_triton_pages.py::test_pages_move_in_one_launch",),
    ),
    Fault(
        "bytes in use are poisoned",
        "memory.device.watch",
        "lines = np.flatnonzero(~owned[low // 128 : high // 128]) + low // 128",
        "lines = np.arange(low // 128, high // 128)",
        (f"{_MOVER}test_freed_bytes_are_poisoned_unless_somebody_has_them",),
    ),
]
