"""Faults of the GPU's kernels where the interpreter shows them, and of FP8 keys and values.

The text of a Triton function is read from its file, so faults lie in what launches it and in the twins.
"""

from __future__ import annotations

from tests.faults import Fault

_ATTENTION = "tests/kernels/test_triton_attention.py"
_LINEAR = "tests/kernels/test_triton_linear.py"
_SAMPLING = "tests/kernels/test_triton_sampling.py"
_WIDE = "tests/kernels/test_triton_experts_wide.py"
_TILES = "tests/kernels/test_expert_tiles.py"
_FEW = "tests/kernels/test_triton_experts_few.py"
_SEARCH = "tests/benchmarks/test_expert_tiles.py"
_FAMILIES = "tests/worker/models/test_families.py"

FAULTS = [
    Fault(
        "the last tiles of a step's chunks are not launched",
        "kernels._triton.attention",
        "(tile.pairs // group_pad) + chunk_rows",
        "(tile.pairs // group_pad)",
        (f"{_ATTENTION}::test_a_step_of_decode_rows_and_chunks",),
    ),
    Fault(
        "one split too few for a window that begins inside one",
        "kernels._triton.attention",
        "+ (window is not None and max_kv_len > window))",
        ")",
        (f"{_ATTENTION}::test_splits_are_cut_by_position",),
    ),
    Fault(
        "a contraction is cut by the number of tokens",
        "kernels._triton.linear",
        "parts = num_parts(rows, width)\n",
        "parts = num_parts(rows, width) if tokens > 2 else 1\n",
        (f"{_LINEAR}::test_a_rows_bits_do_not_depend_on_the_batch",),
    ),
    Fault(
        "filters read the best logits from the wrong end",
        "kernels._triton.sampling",
        "torch.topk(logits, count, dim=-1).values",
        "torch.topk(logits, count, dim=-1).values.flip(-1).contiguous()",
        (f"{_SAMPLING}::test_filters_keep_what_they_name",),
    ),
    Fault(
        "scales of FP8 keys and values are not applied",
        "kernels._reference.attention",
        "(packed.float() * factor.unsqueeze(-1))",
        "packed.float()",
        (f"{_FAMILIES}::test_fp8_keys_and_values_err_as_their_mantissa_says",),
    ),
    Fault(
        "FP8 rows are scaled to half their range",
        "kernels._reference.pages",
        "(wide / scale.unsqueeze(-1))",
        "(wide / scale.unsqueeze(-1) / 512)",
        (f"{_ATTENTION}::test_fp8_pages_stay_within_their_error",),
    ),
    Fault(
        "deterministic mode lets any attention through",
        "worker.attention.choice",
        "if config.deterministic and asked not in preferred:",
        "if False:",
        ("tests/worker/models/test_deterministic.py::test_a_gpu_is_deterministic_by_the_kernels_that_are",),
    ),
    Fault(
        "experts are unpacked over one another",
        "kernels._triton.experts_wide",
        "torch.arange(num_experts, device=x.device) % self.num_held",
        "torch.arange(num_experts, device=x.device) * 0",
        (f"{_WIDE}::test_every_format_means_what_its_checkpoint_means",),
    ),
    Fault(
        "a wide launch stores blocks that nobody chose",
        "kernels._triton.experts_wide",
        "torch.where(starts[1:] > starts[:-1], tee, 0)",
        "tee",
        (f"{_WIDE}::test_every_format_means_what_its_checkpoint_means",),
    ),
    Fault(
        "deterministic mode takes wide tiles for many tokens",
        "kernels._triton.experts",
        'if serves["wide"] and not deterministic:',
        'if serves["wide"]:',
        (f"{_WIDE}::test_launches_with_many_tokens_per_expert_are_wide",),
    ),
    Fault(
        "a table claims what does not fit",
        "benchmarks.decode_speed",
        "if claimed_arena(geometry, batch, CONTEXTS[context]) < available",
        "if True",
        (
            "tests/benchmarks/test_gpu_benchmarks.py::test_tables_name_what_fits_and_what_deterministic_mode_costs",
        ),
    ),
    Fault(
        "tiles of a deterministic launch are those of its number of tokens",
        "kernels._triton.experts",
        "if not deterministic and x.dtype is torch.bfloat16:",
        "if x.dtype is torch.bfloat16:",
        (f"{_TILES}::test_launches_take_what_is_listed_unless_they_are_deterministic",),
    ),
    Fault(
        "a table's tiles may be larger than shared memory",
        "kernels._triton.expert_tiles",
        "if shared > SHARED_BYTES:",
        "if False:",
        (f"{_TILES}::test_a_malformed_table_is_refused",),
    ),
    Fault(
        "the last tiles of a walk over rows are nobody's",
        "kernels._triton.experts_few",
        "row_tiles = triton.cdiv(width, down.rows * down.tiles)",
        "row_tiles = max(1, width // (down.rows * down.tiles))",
        (f"{_FEW}::test_no_tile_changes_a_bit[fp8-96]",),
    ),
    Fault(
        "one token reads missing experts where they were before they were brought",
        "kernels._triton.experts",
        "table = table if ahead is None else ahead.table",
        "pass",
        (f"{_FEW}::test_products_of_one_token[64-192-fp8]",),
    ),
    Fault(
        "the search for tiles times what it did not compare",
        "benchmarks.expert_tiles",
        "if not error <= MOST_ERROR:",
        "if error < 0:",
        (f"{_SEARCH}::test_the_fastest_that_agrees_is_listed",),
    ),
]
