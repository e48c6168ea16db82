"""Faults of weight formats, the host store, residency and the verifier that the suite must notice."""

from __future__ import annotations

from tests.faults import Fault

FORMATS = "tests/worker/quantization/test_formats.py"
RESIDENCY = "tests/memory/test_residency.py"
EXACT = "tests/worker/experts/test_paged_exactness.py"
ENGINE = "tests/worker/experts/test_paged_engine.py"
VERIFY = "tests/worker/experts/test_verify.py"
KERNELS = "tests/kernels/test_triton_residency.py"
FEW = "tests/kernels/test_triton_experts_few.py"
GHOSTS = "tests/memory/test_ghosts.py"
REPLAY = "tests/benchmarks/test_expert_replay.py"
STAGED = "tests/worker/experts/test_prefill_passes.py"

FAULTS = [
    Fault(
        "stale place: an evicted expert is still read from its old place",
        "memory.device.residency",
        old="lost = torch.where(evicted, old, self._rows * self._experts)\n"
        "        self._flat_address.scatter_(0, lost, self._host_of(lost))\n",
        new="lost = torch.where(evicted, old, self._rows * self._experts)\n",
        tests=(f"{RESIDENCY}::test_the_invariants_hold_over_random_steps_with_bans[0-lru]",),
    ),
    Fault(
        "stale place: a banned place keeps its readers",
        "memory.device.residency",
        old="        self._flat_address.scatter_(0, dropped, self._host_of(dropped))\n",
        new="",
        tests=(f"{RESIDENCY}::test_banned_places_lose_their_owners_and_allowed_ones_are_free",),
    ),
    Fault(
        "torn copy: half of a block is stored",
        "kernels._reference.experts",
        old="bytes_at(targets[expert], where.num_bytes).copy_(block)",
        new="bytes_at(targets[expert], where.num_bytes // 2).copy_(block[: where.num_bytes // 2])",
        tests=(f"{EXACT}::test_gpt_oss_with_biases_and_clamped_activation",),
    ),
    Fault(
        "torn copy: the running check looks at half a block",
        "memory.device.residency_check",
        old="found = hash_blocks(self._grid[places, :num_bytes])",
        new="found = self._hashes[row, expert]",
        tests=(f"{RESIDENCY}::test_a_changed_byte_in_a_place_is_found_and_named",),
    ),
    Fault(
        "swapped scale: gate and up read each other's FP8 grid",
        "worker.experts.block_format",
        old='up_scales=part_offset(layout, "up_scales")',
        new='up_scales=part_offset(layout, "gate_scales")',
        tests=(f"{FORMATS}::test_a_block_means_what_the_checkpoint_means[fp8_block-96]",),
    ),
    Fault(
        "swapped scale: an expert's down scales are its gate's",
        "worker.quantization.int4",
        old='block_part(block, layout, f"{part}_scales").copy_(torch.cat(scales))',
        new='block_part(block, layout, f"{part}_scales").copy_(torch.cat(scales).flip(0))',
        tests=(f"{FORMATS}::test_a_block_means_what_the_checkpoint_means[compressed-96]",),
    ),
    Fault(
        "unpaged zero point: the kernel reads none",
        "worker.experts.block_format",
        old='gate_up_zeros=part_offset(layout, "gate_up_zeros")',
        new="gate_up_zeros=-1",
        tests=(f"{VERIFY}::test_sound_models_pass[qwen3_moe-int4]",),
    ),
    Fault(
        "unpaged zero point: a format forgets to declare it",
        "worker.quantization.int4_tensors",
        old='                found["weight_zero_point"] = ((-(-rows // 8), groups), "int32")\n',
        new="                pass\n",
        tests=(f"{FORMATS}::test_a_block_means_what_the_checkpoint_means[compressed_zeros-96]",),
    ),
    Fault(
        "victim published late: tokens are still sent to its place when other bytes arrive there",
        "memory.device.residency",
        old="        self._count(row, experts, stamping, wanted, hit, taken, evicted)\n",
        new="        self._flat_address.scatter_(0, lost, self._base + victim * self._place_bytes)\n",
        tests=(f"{RESIDENCY}::test_the_invariants_hold_over_random_steps_with_bans[1-lru]",),
    ),
    Fault(
        "new owner published early: before its first byte is stored",
        "memory.device.residency",
        old="        return torch.where(taken, self._base + victim",
        new="        self.publish(row)\n        return torch.where(taken, self._base + victim",
        tests=(f"{RESIDENCY}::test_the_invariants_hold_over_random_steps_with_bans[0-lru]",),
    ),
    Fault(
        "place overwritten while stamped",
        "memory.device.residency",
        old="(stamp < self._step) & ",
        new="",
        tests=(f"{RESIDENCY}::test_the_invariants_hold_over_random_steps_with_bans[0-lru]",),
    ),
    Fault(
        "residency: a place of the executing layer is a victim",
        "memory.device.residency",
        old=" & ~ours & ",
        new=" & ",
        tests=(f"{RESIDENCY}::test_the_invariants_hold_over_random_steps_with_bans[0-lru]",),
    ),
    Fault(
        "residency: a layer's least worthy miss meets the least worthy victim",
        "memory.device.residency",
        old="torch.argsort(worth, descending=True, stable=True)",
        new="torch.argsort(worth, stable=True)",
        tests=(f"{REPLAY}::test_the_device_does_what_the_policy_says[3-lfru-True]",),
    ),
    Fault(
        "kernels: misses take victims in another order than the tensor operations say",
        "kernels._triton.residency",
        old="OVERLAP=overlap, RANKED=ranked,",
        new="OVERLAP=overlap, RANKED=not ranked,",
        tests=(f"{KERNELS}::test_the_kernels_do_what_the_tensor_operations_do[lfru-20-7-True-True]",),
    ),
    Fault(
        "paging: prompts in steps run without graphs",
        "worker.execution.runner",
        old="if self.passes is not None and self.passes.tokens else",
        new="if self.passes is not None else",
        tests=(f"{STAGED}::test_steps_bring_whole_prompts_in_graphs_where_there_are_no_passes[-1-32]",),
    ),
    Fault(
        "residency: prefill rows page",
        "worker.experts.pager",
        old="residency.begin_step(step, num_stamping)",
        new="residency.begin_step(step, 1 << 20)",
        tests=(f"{ENGINE}::test_prefill_leaves_the_decode_set_alone",),
    ),
    Fault(
        "residency: a scan flushes the set",
        "memory.device.residency",
        old="return (owner == FREE) | ~self.frozen",
        new="return owner != BANNED",
        tests=(f"{RESIDENCY}::test_a_step_that_needs_more_than_the_places_freezes_the_set_until_it_shrinks",),
    ),
    Fault(
        "kernels: packed weights meet inputs in another order than their own",
        "kernels._triton.experts_group",
        old="columns, KIND=span_kind,",
        new="columns, KIND=-1,",
        tests=(f"{FEW}::test_products_of_a_few_tokens[64-192-int4]",),
    ),
    Fault(
        "kernels: a stored block goes without its scales",
        "kernels._triton.experts_few",
        old="pieces = triton.cdiv(sum(parts[3:]), COPIED_WORDS) if tee is not None else 0",
        new="pieces = 0",
        tests=(f"{FEW}::test_a_block_is_stored_whole_where_the_tee_points[fp8]",),
    ),
    Fault(
        "kernels: ages of use are those of the step before",
        "kernels._triton.residency_step",
        old="scratch.losses, step, num_experts",
        new="scratch.losses, step - 1, num_experts",
        tests=(f"{KERNELS}::test_the_kernels_do_what_the_tensor_operations_do[lfru-20-7-True-True]",),
    ),
    Fault(
        "kernels: the layer before is never published",
        "kernels._triton.residency",
        old="row, pairs, published, experts.shape[1]",
        new="row, pairs, -1, experts.shape[1]",
        tests=(f"{KERNELS}::test_the_kernels_do_what_the_tensor_operations_do[lfru-20-7-True-True]",),
    ),
    Fault(
        "kernels: the running check leaves the last words out",
        "kernels._triton.hashing",
        old="sizes, cursor, progress, found, grid.shape[0]",
        new="sizes - 8, cursor, progress, found, grid.shape[0]",
        tests=(f"{KERNELS}::test_the_running_check_of_a_gpu_finds_a_changed_word_and_names_its_owner",),
    ),
    Fault(
        "gather: experts are read from places to which nothing was brought",
        "worker.experts.pager",
        old="gather(residency.address[row], targets,",
        new="gather(residency.address[row], targets * 0,",
        tests=(f"{EXACT}::test_paged_equals_resident_bit_for_bit[int4]",),
    ),
    Fault(
        "act-order: the rows of gate and up stay in the model's order",
        "worker.quantization.int4",
        old='rows = rows_of if rows_of is not None and name != "down_proj" else slice(None)',
        new="rows = slice(None)",
        tests=(f"{FORMATS}::test_a_block_means_what_the_checkpoint_means[gptq_act_order-64]",),
    ),
    Fault(
        "GPTQ: version 1 zero points are read as version 2",
        "worker.quantization.int4",
        old='offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1',
        new="offset = 0",
        tests=(f"{FORMATS}::test_a_block_means_what_the_checkpoint_means[gptq_v1-32]",),
    ),
    Fault(
        "AWQ: outputs of a word are taken in plain order",
        "worker.quantization.int4_tensors",
        old="AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        new="AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)",
        tests=(f"{FORMATS}::test_a_block_means_what_the_checkpoint_means[awq-32]",),
    ),
    Fault(
        "host store: a filling that broke off counts as complete",
        "memory.device.host_region",
        old="        self.is_filled = found[: len(_COMPLETE)] == _COMPLETE\n",
        new="        self.is_filled = bool(os.fstat(self._file).st_mtime)\n",
        tests=("tests/memory/test_host_experts.py::test_a_filling_that_was_broken_off_is_begun_anew",),
    ),
    Fault(
        "verifier: a NaN counts as agreement",
        "worker.verify.probe",
        old="        error = torch.nan_to_num(error, nan=torch.inf)\n",
        new="        error = torch.nan_to_num(error, nan=0.0)\n",
        tests=(f"{VERIFY}::test_a_nan_is_a_parting",),
    ),
    Fault(
        "ghosts: an expert that has a place again stays one",
        "memory.device.ghosts",
        old="self._lost >= self._losses - remembered, absent, out",
        new="self._lost >= self._losses - remembered, absent | resident, out",
        tests=(f"{GHOSTS}::test_the_last_losses_are_remembered_and_counted_when_wanted",),
    ),
    Fault(
        "ghosts: losses are never forgotten",
        "memory.device.ghosts",
        old="self._lost >= self._losses - remembered, absent, out",
        new="self._lost > 0, absent, out",
        tests=(f"{GHOSTS}::test_ghosts_tell_what_more_places_would_save",),
    ),
    Fault(
        "market: an engine keeps its ghosts to itself",
        "worker.engines.paged",
        old="report.ghost_hits, report.num_ghosts, sum",
        new="0, 0, sum",
        tests=(f"{ENGINE}::test_the_market_hears_of_ghosts_and_prices_a_miss_at_the_measured_rate",),
    ),
    Fault(
        "a slot begins with what its last request used",
        "worker.experts.use",
        old="self._counts.index_fill_(0, self._started, 0)",
        new="pass",
        tests=("tests/worker/experts/test_expert_use.py::test_padding_sets_no_bit_and_a_slot_begins_anew",),
    ),
    Fault(
        "everything that was ever chosen counts as used",
        "kernels._reference.expert_use",
        old="_packed(now >= least.to(torch.int16))",
        new="_packed(now > 0)",
        tests=(
            "tests/kernels/test_triton_expert_use.py::test_bits_are_the_experts_chosen_half_as_often_as_on_average",
        ),
    ),
]
