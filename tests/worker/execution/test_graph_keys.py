"""Which captured sizes tell how much memory graphs take."""

from __future__ import annotations

from worker.execution.graphs import DecodeGraphs


def test_graphs_that_measure_memory_are_the_roomiest_of_each_backend() -> None:
    class Steps:
        def attention_names(self, rows: int, bound: int) -> tuple[str, ...]:
            return ("few",) if rows <= 4 or (rows <= 16 and bound == 4096) else ("many",)

    graphs = DecodeGraphs(Steps(), (1, 4, 16, 64), (4096, 32768))  # type: ignore[arg-type]
    assert graphs.roomiest_keys == [(64, 32768), (4, 32768)]
    alone = DecodeGraphs(Steps(), (1, 4), (4096,))  # type: ignore[arg-type]
    assert alone.roomiest_keys == [(4, 4096)]
