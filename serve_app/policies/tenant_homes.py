"""Gives users and tenants a home each: the replica that new conversations of theirs go to while that costs nothing.

Where experts are paged, tenants of different habits drive out each other's experts wherever they meet. So each is at
home on the replica that is home to the fewest, and the experts that it uses gather there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class TenantHomes:
    """Homes by key; the least recently asked for is forgotten beyond ``max_keys``."""

    def __init__(self, max_keys: int = 4_096) -> None:
        self._max_keys = max_keys
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._num_guests: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, key: str, near: Sequence[str]) -> str:
        """The key's replica; one that has none is settled on whichever of ``near`` (at least one) is home to the
        fewest, the first of equals."""
        found = self._homes.get(key)
        if found is None:
            found = min(near, key=lambda name: self._num_guests[name])
            self._homes[key] = found
            self._num_guests[found] += 1
            if len(self._homes) > self._max_keys:
                _, left = self._homes.popitem(last=False)
                self._num_guests[left] -= 1
        self._homes.move_to_end(key)
        return found

    def remove(self, replica_id: str) -> None:
        """A replica is gone: its guests find other homes when they come."""
        if self._num_guests.pop(replica_id, 0):
            for key in [key for key, name in self._homes.items() if name == replica_id]:
                del self._homes[key]
