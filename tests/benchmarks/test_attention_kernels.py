"""The table of attention kernels: a layer's time, and what of it the bytes need that its rows see."""

from __future__ import annotations

import pytest

from benchmarks import attention_kernels
from worker.attention.decode_choice import DecodeTimes


@pytest.mark.parametrize(("name", "seen"), [("qwen3-30b-a3b", 1024), ("gpt-oss-20b.window", 128)])
def test_shares_count_the_tokens_that_rows_see(name: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = attention_kernels.GROUPS[name]
    times = (DecodeTimes(4, 4096, 1024, {"flash": 1e-3, "triton": 5e-4}),)
    monkeypatch.setattr(attention_kernels, "measure_decode", lambda *_: times)
    rows, line = attention_kernels.decode_table(name, group, ("flash", "triton"), 4e12)
    assert [row["case"] for row in rows] == [
        f"{name}.decode.b4.1024.{known}" for known in ("flash", "triton")
    ]
    assert [row["us"] for row in rows] == pytest.approx([1e3 / group.num_layers, 500 / group.num_layers])
    # Keys and values of two bytes, in every layer.
    read = 4 * seen * 2 * group.shape.num_kv_heads * group.shape.head_dim * 2 * group.num_layers
    assert [row["share"] for row in rows] == pytest.approx([read / 1e-3 / 4e12, read / 5e-4 / 4e12])
    assert line.startswith(f"{name}: triton at 4 x 1024")
