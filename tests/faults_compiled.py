"""Faults of the CPU's compiled kernels, in what calls them, and of what an engine keeps."""

from __future__ import annotations

from tests.faults import Fault

_SUBLAYERS = "tests/kernels/test_sublayers.py"
_LINEAR = "tests/kernels/test_linear.py"
_ENGINE = "tests/worker/test_native_engine.py"

FAULTS = [
    Fault(
        "a delta net's queries are not scaled where it is one call",
        "kernels._native.sublayers",
        old="            d_k**-0.5,\n",
        new="            1.0,\n",
        tests=(f"{_SUBLAYERS}::test_delta_net",),
    ),
    Fault(
        "values go to the keys' pages where attention's front is one call",
        "kernels._native.sublayers",
        old="            value_pages.data_ptr(),\n",
        new="            key_pages.data_ptr(),\n",
        tests=(f"{_SUBLAYERS}::test_attention",),
    ),
    Fault(
        "weights are stored short though that loses something",
        "kernels._native.ops",
        old="return short if torch.equal(short.to(weight.dtype), weight) else weight",
        new="return short",
        tests=(f"{_LINEAR}::test_only_exact_weights_are_stored_short",),
    ),
    Fault(
        "a closed engine keeps its weights",
        "worker.execution.runner",
        old="        del self._model, self._backend,",
        new="        del self._backend,",
        tests=(f"{_ENGINE}::test_a_closed_engine_holds_no_weights_and_no_arena[resident]",),
    ),
]
