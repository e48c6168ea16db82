"""Faults of carrying a step out, of drawing its tokens and of random weights that the suite must notice."""

from __future__ import annotations

from tests.faults import Fault

DECODE = "tests/worker/execution/test_decode_steps.py"
SAMPLER = "tests/worker/execution/test_sampler.py"
BLOCKS = "tests/worker/models/test_random_blocks.py"
READER = "tests/worker/models/test_pinned_reader.py"
IN_PLACE = f"{DECODE}::test_inputs_in_place_give_the_same_bits[qwen3_5_moe-48]"
MIXED = "tests/worker/execution/test_mixed_steps.py::test_what_is_filled_is_what_is_built[lengths0]"
SINGLE = "tests/worker/execution/test_mixed_steps.py::test_sizes_of_single_plans"
REHEARSAL = "tests/worker/execution/test_mixed_steps.py::test_a_rehearsal_fills_a_step_and_has_no_pages"
WARM = (
    "tests/worker/execution/test_mixed_steps.py::test_every_size_runs_on_its_rehearsal_before_it_is_captured"
)
BESIDE = "tests/worker/execution/test_mixed_steps.py::test_only_what_was_launched_beside_is_waited_for[False]"

FAULTS = [
    Fault(
        "decode steps: a row does not see its own token",
        "worker.execution.decode",
        old="tables.first_page, position + 1",
        new="tables.first_page, position.clip(1)",
        tests=(IN_PLACE,),
    ),
    Fault(
        "decode steps: the state of a prompt of one token begins with what was there",
        "worker.execution.decode",
        old="        if self._state is not None and fresh is not None:",
        new="        if False:",
        tests=(IN_PLACE,),
    ),
    Fault(
        "decode steps: tokens go to the first entry of their page",
        "worker.execution.decode",
        old="position % spec.page_tokens",
        new="position * 0",
        tests=(IN_PLACE,),
    ),
    Fault(
        "sampler: edits of the second row land on the first",
        "worker.execution.sampler",
        old="places += [place] * (len(ids) - len(places))",
        new="places += [0] * (len(ids) - len(places))",
        tests=(SAMPLER,),
    ),
    Fault(
        "random blocks: scales of another size",
        "worker.models.random_blocks",
        old="return E8M0_ONE + round(math.log2(deviation / E2M1_DEVIATION))",
        new="return E8M0_ONE + round(math.log2(deviation))",
        tests=(f"{BLOCKS}::test_weights_keep_the_size_of_activations[mxfp4]",),
    ),
    Fault(
        "checkpoint reader: tensors begin at the header",
        "worker.execution.pinned_reader",
        old='self._first + entry["data_offsets"][0]',
        new='entry["data_offsets"][0]',
        tests=(f"{READER}::test_places_and_bytes_are_those_of_the_library",),
    ),
    Fault(
        "mixed steps: padding rows have a state",
        "worker.execution.mixed",
        old='parts["state"][:] = -1',
        new='parts["state"][:] = 0',
        tests=(MIXED,),
    ),
    Fault(
        "mixed steps: padding tokens are the first row's",
        "worker.execution.mixed",
        old='parts["token_row"][:] = -1',
        new='parts["token_row"][:] = 0',
        tests=(MIXED,),
    ),
    Fault(
        "mixed steps: padding pieces are a row's first",
        "worker.execution.mixed",
        old="index[:, 1] = len(index)  # past any row's end",
        new="index[:, 1] = 0",
        tests=(MIXED,),
    ),
    Fault(
        "mixed steps: more chunks than a size provides for",
        "worker.execution.mixed",
        old=" and self.num_chunks(tokens) >= chunks",
        new="",
        tests=(SINGLE,),
    ),
    Fault(
        "mixed steps: a row longer than any context has sizes",
        "worker.execution.mixed",
        old="if not fitting or longest > self.bounds[-1]:",
        new="if not fitting:",
        tests=(SINGLE,),
    ),
    Fault(
        "mixed steps: a rehearsal reads what the last step left",
        "worker.execution.mixed",
        old="self._values[: fields.size].copy_(torch.from_numpy(values))",
        new="pass",
        tests=(REHEARSAL,),
    ),
    Fault(
        "graphs: a step with chunks is captured that never ran",
        "worker.execution.graphs",
        old="partial(self._steps.forward, key), MIXED_WARM_UPS)",
        new="partial(self._steps.forward, key), 0)",
        tests=(WARM,),
    ),
    Fault(
        "delta net: waits for what was not launched beside",
        "worker.layers.delta_net",
        old="if fused is not None:  # waiting",
        new="if True:  # waiting",
        tests=(BESIDE,),
    ),
]
