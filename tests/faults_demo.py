"""Faults of the demonstration model's programs: each trains, splits, scores or refers slightly wrong."""

from __future__ import annotations

from tests.faults import Fault

_NETWORK = "tests/demo/test_network.py"
_TASKS = "tests/demo/test_tasks.py"
_VOCABULARY = "tests/demo/test_vocabulary.py"
_ROUTING = "tests/demo/test_expert_routing.py"
_PACKING = "tests/demo/test_packing.py"

FAULTS = [
    Fault(
        "reference window one token too wide",
        "worker.models.transformers_window",
        "config.sliding_window = window\n",
        "config.sliding_window = window + 1\n",
        (_NETWORK,),
    ),
    Fault(
        "keys decay from the chunk's start",
        "demo.delta_rule",
        "decayed = (k * (last - g).exp()",
        "decayed = (k * g.exp()",
        (_NETWORK,),
    ),
    Fault(
        "draft input in the other order",
        "demo.network",
        "torch.cat((left, right), dim=-1)",
        "torch.cat((right, left), dim=-1)",
        (_NETWORK,),
    ),
    Fault(
        "chosen experts not renormalised",
        "demo.network",
        "kept / kept.sum(-1, keepdim=True)",
        "kept",
        (_NETWORK,),
    ),
    Fault(
        "moments forgotten at a break",
        "demo.optimizer",
        'for kind in ("masters", "first", "second"):',
        'for kind in ("masters",):',
        (_NETWORK,),
    ),
    Fault(
        "held-out sums trained the other way round",
        "demo.tasks.arithmetic",
        'return f"{min(a, b)}+{max(a, b)}"',
        'return f"{a}+{b}"',
        (_TASKS,),
    ),
    Fault(
        "closing token not learned",
        "demo.prepare",
        "(ends[0] + 1 if len(ends)",
        "(ends[0] if len(ends)",
        (_TASKS,),
    ),
    Fault(
        "second call on the first one's line in training text",
        "demo.tasks.sample",
        'gap = "\\n" if content or i else ""',
        'gap = ""',
        (_VOCABULARY,),
    ),
    Fault(
        "least recently used counted as first in, first out",
        "demo.expert_routing",
        "kept.move_to_end(expert)",
        "pass",
        (f"{_ROUTING}::test_reuse_loads_and_hits_of_a_record_counted_by_hand",),
    ),
    Fault(
        "damaged weights restored",
        "demo.packing",
        "hashlib.sha256(out).hexdigest() != header.sha256",
        "False",
        (_PACKING,),
    ),
    Fault(
        "weights restored in place",
        "demo.packing",
        "    draft.write_bytes(data)\n        draft.replace(path)",
        "    path.write_bytes(data)",
        (_PACKING,),
    ),
]
