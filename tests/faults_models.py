"""Faults of kernels, models and the runner: each makes one number, slot or rule slightly wrong."""

from __future__ import annotations

from tests.faults import Fault

_ATTENTION = "tests/kernels/test_attention.py"
_RECURRENT = "tests/kernels/test_recurrent.py"
_SAMPLING = "tests/kernels/test_sampling.py"
_SAMPLER = "tests/worker/execution/test_sampler.py"
_RUNNER = "tests/worker/execution/test_runner.py"
_FAMILIES = "tests/worker/models/test_families.py"
_LOADING = "tests/worker/models/test_loading.py"
_ARENA = "tests/memory/device/test_arena.py"

FAULTS = [
    Fault(
        "stale values read beyond a row's end",
        "kernels._reference.attention",
        "    _hide_stale_rows(value, pages)\n",
        "",
        (_ATTENTION,),
    ),
    Fault(
        "window one token too long",
        "kernels._reference.attention",
        "visible & (key > query - window)",
        "visible & (key >= query - window)",
        (_ATTENTION,),
    ),
    Fault(
        "sinks forgotten in chunks",
        "kernels._reference.attention",
        "column = sinks.float().view(kv_heads, -1, 1, 1)",
        "column = -1e9 + sinks.float().view(kv_heads, -1, 1, 1)",
        (_ATTENTION,),
    ),
    Fault(
        "state of a page read after its neighbour's",
        "kernels._reference.recurrent",
        "running_page = page.index_select(0, layout.order)",
        "running_page = page",
        (_RECURRENT,),
    ),
    Fault(
        "decay of the last chunk lost",
        "kernels._reference.recurrent",
        "held.mul_(decay[now])",
        "held.mul_(1.0)",
        (_RECURRENT,),
    ),
    Fault(
        "old convolution columns kept one token too long",
        "kernels._reference.recurrent",
        "newest = (layout.state_slot + layout.query_len.unsqueeze(1)).flatten()",
        "newest = (layout.state_slot + layout.query_len.unsqueeze(1) - 1).flatten()",
        (_RECURRENT,),
    ),
    Fault(
        "noise blind to the position",
        "kernels._reference.sampling",
        "first = _mix(first ^ (positions & _LOW_32))",
        "first = _mix(first)",
        (_SAMPLING,),
    ),
    Fault(
        "top-p stops one token early",
        "kernels._reference.sampling",
        "before = ordered.cumsum(-1) - ordered",
        "before = ordered.cumsum(-1)",
        (_SAMPLING,),
    ),
    Fault(
        "end tokens allowed before min_tokens",
        "worker.execution.sampler",
        "num_generated < rules.sampling.min_tokens",
        "num_generated < rules.sampling.min_tokens - 1",
        (_SAMPLER,),
    ),
    Fault(
        "prompt counted as generated",
        "worker.execution.sampler",
        "known[: row.num_prompt_tokens], known[row.num_prompt_tokens :]",
        "known[: row.num_prompt_tokens], known",
        (_SAMPLER,),
    ),
    Fault(
        "token drawn with the noise of the one before",
        "worker.execution.sampler",
        "positions=uploads.put((plan.num_computed + plan.query_len)[row]),",
        "positions=uploads.put(plan.num_computed[row]),",
        (_SAMPLER,),
    ),
    Fault(
        "state of a slot's last owner continued",
        "worker.execution.batch",
        "return group, uploads.put(fresh) if len(fresh) else None",
        "return group, None",
        (_RUNNER,),
    ),
    Fault(
        "moves carried out as if they were done",
        "memory.device.mover",
        "self.lanes.compute(lambda: self._copy(moving))",
        "pass",
        (_RUNNER,),
    ),
    Fault(
        "host tier loads into the wrong page",
        "memory.device.mover",
        "self._host.load(copy.group, copy.source, self._grids[copy.group][copy.target])",
        "self._host.load(copy.group, copy.source, self._grids[copy.group][copy.target - 1])",
        (_RUNNER,),
    ),
    Fault(
        "FULL anchored at the arena's start",
        "memory.device.arena",
        "return arena_bytes % spec.page_bytes if spec.kind is PageKind.FULL else 0",
        "return 0",
        (_ARENA,),
    ),
    Fault(
        "gate and query swapped",
        "worker.models.qwen3_5",
        "query_gate[:, 0].reshape(-1, hidden), query_gate[:, 1]",
        "query_gate[:, 1].reshape(-1, hidden), query_gate[:, 0]",
        (_FAMILIES,),
    ),
    Fault(
        "YaRN without its attention factor",
        "worker.layers.attention",
        "if self._factor != 1.0:",
        "if self._factor == 1.0:",
        (_FAMILIES,),
    ),
    Fault(
        "extra tensors of a checkpoint not named",
        "worker.execution.weights",
        "extra = sorted(set(self._store.names()) - self._known)",
        "extra = []",
        (_LOADING,),
    ),
]
