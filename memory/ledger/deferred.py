"""Holds freed pages back until the last step that may read their bytes has finished."""

from __future__ import annotations

from heapq import heappop, heappush


class DeferredFrees:
    """Pages that are logically free, by the step they wait for."""

    def __init__(self) -> None:
        self._by_step: dict[int, list[tuple[int, int]]] = {}
        self._steps: list[int] = []

    def add(self, last_step: int, group: int, page: int) -> None:
        """``page`` of group number ``group`` may be read by steps up to ``last_step``."""
        waiting = self._by_step.get(last_step)
        if waiting is None:
            self._by_step[last_step] = waiting = []
            heappush(self._steps, last_step)
        waiting.append((group, page))

    def retire(self, completed_step: int) -> list[tuple[int, int]]:
        """Takes out the pages, as (group, page), whose steps have all finished."""
        done: list[tuple[int, int]] = []
        while self._steps and self._steps[0] <= completed_step:
            done += self._by_step.pop(heappop(self._steps))
        return done

    def pages(self) -> list[tuple[int, int]]:
        """Everything that waits, for the audit."""
        return [entry for waiting in self._by_step.values() for entry in waiting]
