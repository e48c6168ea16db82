"""Which pages wait in pinned host memory: slots by virtual id, under a byte budget, least recently used first out.

The buffer is cut into slabs as large as the largest page. A slab belongs to one group while any of its slots is
taken, so kinds of very different size share one budget and an emptied slab goes to whoever needs it next:
``address = slot // per_slab * slab_bytes + slot % per_slab * page_bytes``. Only bookkeeping: who copies is not known
here, and a slot must be pinned for as long as a copy reads or writes it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from memory.api import LedgerError


@dataclass(frozen=True, slots=True)
class HostPage:
    """A virtual page that lay in the host tier and was put out of it."""

    group: str
    virtual: int
    slot: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The slot to copy to, and what was put out to make room."""

    slot: int
    evicted: tuple[HostPage, ...] = ()


class _Entry:
    __slots__ = ("pins", "slot", "stamp")

    def __init__(self, slot: int, stamp: int) -> None:
        self.slot = slot
        self.stamp = stamp
        self.pins = 0


class _Slab:
    __slots__ = ("group", "pins", "stamp", "used")

    def __init__(self) -> None:
        self.group = ""
        self.pins = 0  # of its pages, in sum
        self.stamp = 0  # last use of any of its pages
        self.used: dict[int, int] = {}  # slot -> virtual id


class HostTier:
    """See the module.

    Args:
        budget_bytes: size of the pinned buffer; 0 switches the tier off.
        page_bytes: page size by group.
    """

    def __init__(self, budget_bytes: int, page_bytes: Mapping[str, int]) -> None:
        self._page_bytes = dict(page_bytes)
        self.slab_bytes = max(page_bytes.values(), default=1)
        self._slabs = [_Slab() for _ in range(budget_bytes // self.slab_bytes)]
        self._free_slabs = list(range(len(self._slabs)))
        self._per_slab = {name: self.slab_bytes // size for name, size in page_bytes.items()}
        self._free: dict[str, list[int]] = {name: [] for name in page_bytes}
        self._entries: dict[str, OrderedDict[int, _Entry]] = {name: OrderedDict() for name in page_bytes}
        self._clock = 0

    @property
    def budget_bytes(self) -> int:
        """Bytes of the slabs, at most what was asked for."""
        return len(self._slabs) * self.slab_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that lie here."""
        return sum(len(entries) * self._page_bytes[name] for name, entries in self._entries.items())

    def num_pages(self) -> Mapping[str, int]:
        """Pages that lie here, by group."""
        return {name: len(entries) for name, entries in self._entries.items()}

    def address(self, group: str, slot: int) -> int:
        """Byte offset of a slot in the buffer."""
        slab, index = divmod(slot, self._per_slab[group])
        return slab * self.slab_bytes + index * self._page_bytes[group]

    def find(self, group: str, virtual: int) -> int | None:
        """The page's slot, now most recently used; None if it is not here."""
        entry = self._entries[group].get(virtual)
        if entry is None:
            return None
        self._clock += 1
        entry.stamp = self._slab(group, entry.slot).stamp = self._clock
        self._entries[group].move_to_end(virtual)
        return entry.slot

    def store(self, group: str, virtual: int) -> Stored | None:
        """A slot for the page, others put out for it if need be; None where everything is pinned or the tier is too
        small. LedgerError if the page is here already."""
        if virtual in self._entries[group]:
            raise LedgerError(f"host tier: {group} page {virtual} is here already")
        evicted: tuple[HostPage, ...] = ()
        if not self._free[group] and not self._open_slab(group):
            found = self._make_room(group)
            if found is None:
                return None
            evicted = found
            if not self._free[group]:  # what went was a slab's last page, so the slab was closed
                self._open_slab(group)
        slot = heapq.heappop(self._free[group])
        self._clock += 1
        self._entries[group][virtual] = _Entry(slot, self._clock)
        slab = self._slab(group, slot)
        slab.used[slot] = virtual
        slab.stamp = self._clock
        return Stored(slot, evicted)

    def drop(self, group: str, virtual: int) -> None:
        """Gives the page's slot back. LedgerError if it is not here or pinned."""
        entry = self._entries[group].get(virtual)
        if entry is None:
            raise LedgerError(f"host tier: drop of {group} page {virtual}, which is not here")
        if entry.pins:
            raise LedgerError(f"host tier: drop of {group} page {virtual}, which is pinned")
        self._remove(group, virtual)

    def pinned(self, group: str, virtual: int) -> bool:
        """Whether a copy uses the slot of a page that is here."""
        return self._entries[group][virtual].pins > 0

    def pin(self, group: str, virtual: int) -> None:
        """A copy reads or writes the slot: the page stays until as many unpins. LedgerError if it is not here."""
        entry = self._entries[group].get(virtual)
        if entry is None:
            raise LedgerError(f"host tier: pin of {group} page {virtual}, which is not here")
        entry.pins += 1
        self._slab(group, entry.slot).pins += 1

    def unpin(self, group: str, virtual: int) -> None:
        """Ends a pin. LedgerError if there is none."""
        entry = self._entries[group].get(virtual)
        if entry is None or entry.pins == 0:
            raise LedgerError(f"host tier: unpin of {group} page {virtual}, which is not pinned")
        entry.pins -= 1
        self._slab(group, entry.slot).pins -= 1

    def audit(self) -> None:
        """Proves that slots, slabs and pages tell the same story; LedgerError if not."""
        seen: dict[int, tuple[str, int]] = {}
        for name, entries in self._entries.items():
            stamps = [entry.stamp for entry in entries.values()]
            _expect(stamps == sorted(stamps), f"{name}: use order lost")
            for virtual, entry in entries.items():
                start = self.address(name, entry.slot)
                _expect(
                    start + self._page_bytes[name] <= self.budget_bytes, f"{name} slot {entry.slot}: outside"
                )
                slab = self._slab(name, entry.slot)
                _expect(
                    slab.group == name and slab.used.get(entry.slot) == virtual, f"{name} {virtual}: slab"
                )
                _expect(start not in seen, f"{name} {virtual} and {seen.get(start)} share a slot")
                seen[start] = (name, virtual)
        _expect(len(seen) == sum(len(slab.used) for slab in self._slabs), "slots in use without a page")
        empty = {index for index, slab in enumerate(self._slabs) if not slab.group}
        _expect(empty == set(self._free_slabs) and len(empty) == len(self._free_slabs), "free slabs")
        for name, free in self._free.items():
            per = self._per_slab[name]
            owned = {
                i * per + j for i, slab in enumerate(self._slabs) if slab.group == name for j in range(per)
            }
            pins = sum(entry.pins for entry in self._entries[name].values())
            _expect(pins == sum(s.pins for s in self._slabs if s.group == name), f"{name}: pins")
            taken = {entry.slot for entry in self._entries[name].values()}
            _expect(len(set(free)) == len(free) and set(free) == owned - taken, f"{name}: free slots")

    def _open_slab(self, group: str) -> bool:
        if not self._free_slabs:
            return False
        index = heapq.heappop(self._free_slabs)
        self._slabs[index].group = group
        per = self._per_slab[group]
        for slot in range(index * per, (index + 1) * per):
            heapq.heappush(self._free[group], slot)
        return True

    def _make_room(self, group: str) -> tuple[HostPage, ...] | None:
        """Puts out this group's oldest page, or a whole slab of another group whose newest page is older still."""
        own = self._oldest(group)
        slab, stamp = self._oldest_slab(group)
        if slab is None or (own is not None and self._entries[group][own].stamp <= stamp):
            if own is None:
                return None
            return (self._remove(group, own),)
        other = self._slabs[slab]
        name = other.group
        return tuple(self._remove(name, virtual) for virtual in list(other.used.values()))

    def _oldest(self, group: str) -> int | None:
        return next((virtual for virtual, entry in self._entries[group].items() if not entry.pins), None)

    def _oldest_slab(self, group: str) -> tuple[int | None, int]:
        """The slab of another group whose last use lies furthest back, and when that was."""
        found = [
            (s.stamp, i) for i, s in enumerate(self._slabs) if s.used and not s.pins and s.group != group
        ]
        stamp, index = min(found, default=(0, None))
        return index, stamp

    def _slab(self, group: str, slot: int) -> _Slab:
        return self._slabs[slot // self._per_slab[group]]

    def _remove(self, group: str, virtual: int) -> HostPage:
        slot = self._entries[group].pop(virtual).slot
        index = slot // self._per_slab[group]
        slab = self._slabs[index]
        del slab.used[slot]
        heapq.heappush(self._free[group], slot)
        if not slab.used:
            per = self._per_slab[group]
            kept = [free for free in self._free[group] if free // per != index]
            heapq.heapify(kept)
            self._free[group] = kept
            slab.group = ""
            heapq.heappush(self._free_slabs, index)
        return HostPage(group, virtual, slot)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise LedgerError(f"host tier: {what}")
