"""Says a plan in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from worker.advise.formats import FORMATS
from worker.advise.limits import implied_miss_rate, link_rate_needed, uniform_miss_rate
from worker.advise.plan import Plan, make_plan, prefill_link_bytes

CHUNK_TOKENS = 2048
"""Tokens of the prefill chunk whose cost is named: the worker's default ``max_step_tokens``."""


def sized(num_bytes: float) -> str:
    """Bytes with three digits and a decimal unit."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= unit:
            value = num_bytes / unit
            return f"{value:.0f} {name}" if abs(value) >= 99.95 else f"{value:.3g} {name}"
    return f"{num_bytes:.0f} B"


def counted(number: float) -> str:
    """A number of weights: 30.53e9, 11.68e6."""
    return f"{number / 1e9:.2f}e9" if number >= 1e8 else f"{number / 1e6:.2f}e6"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, right-aligned but for the first column."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    pad = [str.ljust, *[str.rjust] * (len(head) - 1)]
    lines = [
        "| " + " | ".join(pad[i](cell, widths[i]) for i, cell in enumerate(line)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:]]


def report(plan: Plan) -> list[str]:
    """The whole answer: costs, the table per K, and advice."""
    lines = [*_title(plan), "", "Costs", *bullets(cost_sentences(plan)), ""]
    if plan.rows:
        lines += ["Per number of experts resident in each layer (K), uniform routing", *_rows(plan), ""]
    return [*lines, "Advice", *bullets(advice_sentences(plan))]


def bullets(sentences: Sequence[str]) -> list[str]:
    """One line each."""
    return [f"- {sentence}" for sentence in sentences]


def _title(plan: Plan) -> list[str]:
    geometry, machine, work = plan.geometry, plan.machine, plan.workload
    active = f", {counted(geometry.num_active_params)} active" if geometry.num_experts else ""
    return [
        f"{geometry.name}: {counted(geometry.num_params)} weights{active}, as {plan.weights.title}",
        f"on {sized(machine.gpu_bytes)} of GPU memory ({sized(machine.runtime_bytes)} of it set aside for the driver, "
        f"workspaces and activations), {sized(machine.memory_bytes_per_s)}/s memory, "
        f"{sized(machine.link_bytes_per_s)}/s link, {sized(machine.host_bytes)} of host memory",
        f"for {_requests(plan)} of {work.context} tokens, {work.kv_dtype} KV",
    ]


def _requests(plan: Plan) -> str:
    count = plan.workload.concurrency
    return f"{count} request{'s' if count > 1 else ''}"


def cost_sentences(plan: Plan) -> list[str]:
    """What a token, a request and an expert cost."""
    geometry, work = plan.geometry, plan.workload
    found = [
        f"Weights besides routed experts: {sized(plan.dense_bytes)} held, "
        f"{sized(geometry.dense_read_bytes(plan.weights))} read per step.",
        f"Full-attention KV: {geometry.full_kv_bytes('bf16'):,} B a token in bf16, "
        f"{geometry.full_kv_bytes('fp8_e4m3'):,} B in FP8.",
    ]
    if geometry.window_kv_bytes():
        found.append(
            f"Sliding-window KV: at most {sized(geometry.window_kv_bytes(work.kv_dtype))} a request."
        )
    if geometry.state_bytes:
        found.append(f"Recurrent state: {sized(geometry.state_bytes)} a request, whatever its length.")
    found.append(f"One request of {work.context} tokens: {sized(plan.requests_bytes / work.concurrency)}.")
    if geometry.num_experts:
        found += _expert_costs(plan)
    return found


def _expert_costs(plan: Plan) -> list[str]:
    geometry = plan.geometry
    place = geometry.place_bytes(plan.weights)
    layers_place = place * geometry.num_moe_layers
    tokens = {dtype: round(layers_place / geometry.full_kv_bytes(dtype)) for dtype in ("bf16", "fp8_e4m3")}
    return [
        f"One expert of one layer: {sized(place)}; a place in all {geometry.num_moe_layers} layers: "
        f"{sized(layers_place)}, as much as {tokens['bf16']:,} tokens of bf16 KV or {tokens['fp8_e4m3']:,} of FP8 KV.",
        f"All {geometry.num_routed_experts:,} experts: {sized(plan.host_store_bytes)}, on the device or pinned on the "
        "host.",
        f"A token that finds none of its experts resident moves {sized(geometry.all_miss_bytes(plan.weights))}.",
        f"{_requests(plan)} in one decode step: {plan.distinct_per_layer:.1f} of "
        f"{geometry.num_experts} experts in use in each layer (uniform routing).",
    ]


def _rows(plan: Plan) -> list[str]:
    head = (
        "K", "places", "fits here", "context each", "old batch limit", "misses", "link/step",
        "tokens/s, in-layer", "tokens/s, foreseen",
    )  # fmt: skip
    batch = plan.workload.concurrency
    body = [
        (
            str(row.num_resident),
            sized(row.places_bytes),
            "yes" if row.fits else "no",
            f"{row.context_tokens:,}",
            str(row.old_batch_limit),
            f"{row.miss_rate:.0%}",
            sized(row.link_bytes),
            f"{batch / row.in_layer_s:,.0f}",
            f"{batch / row.foresight_s:,.0f}",
        )
        for row in plan.rows
    ]
    return table(head, body)


def advice_sentences(plan: Plan, about_speed: bool = True) -> list[str]:
    """What to do, most important first; ``about_speed``: also what follows from the machine's rates."""
    trained, asked = plan.geometry.max_model_len, plan.workload.context
    found = _placing_sentences(plan, about_speed)
    if 0 < trained < asked:
        return [f"The model was trained for {trained:,} tokens, not {asked:,}.", *found]
    return found


def _placing_sentences(plan: Plan, about_speed: bool) -> list[str]:
    if plan.num_resident is None:
        return _too_small(plan)
    if not plan.geometry.num_experts:
        return ["A dense model that fits: nothing to page.", *_room_sentences(plan)]
    if plan.fits_resident:
        return [
            "Everything fits: experts=resident. Paging would only cost speed.",
            *_room_sentences(plan),
            *(_limit_sentences(plan) if about_speed else ()),
        ]
    return [
        *_paging_sentences(plan),
        *(_prefill_sentences(plan) if about_speed else ()),
        *_host_sentences(plan),
        *_old_rule_sentences(plan),
        *(_limit_sentences(plan) if about_speed else ()),
        *_smaller_sentences(plan),
    ]


def _too_small(plan: Plan) -> list[str]:
    if plan.arena_bytes <= 0:
        return [
            f"Does not fit: the weights besides routed experts alone need {sized(plan.dense_bytes)}. "
            "Take a smaller format or a larger GPU."
        ]
    found = [
        f"Does not fit: {_requests(plan)} of {plan.workload.context} tokens: "
        f"{sized(plan.requests_bytes)}, but beside the dense weights there are {sized(plan.arena_bytes)}; "
        f"{plan.largest_concurrency} such requests would fit with no expert resident."
    ]
    if plan.workload.kv_dtype == "bf16":
        half = plan.workload.concurrency * plan.geometry.request_bytes(plan.workload.context, "fp8_e4m3")
        fits = "fits" if half <= plan.arena_bytes else "does not fit either"
        found.append(f"With kv_dtype=fp8_e4m3 they need {sized(half)}, which {fits}.")
    return found


def _room_sentences(plan: Plan) -> list[str]:
    left = plan.arena_bytes - plan.requests_bytes - plan.host_store_bytes
    each = plan.geometry.request_bytes(plan.workload.context, plan.workload.kv_dtype)
    return [
        f"{sized(left)} are left: room for {left // each} more such requests, used as prefix cache until then."
    ]


def _paging_sentences(plan: Plan) -> list[str]:
    geometry = plan.geometry
    assert plan.num_resident is not None
    return [
        f"experts=paged: {plan.places:,} places, on average {plan.num_resident} of {geometry.num_experts} experts of "
        f"each layer, misses at most {uniform_miss_rate(plan.num_resident, geometry.num_experts):.0%} (uniform "
        "routing; real text misses less).",
    ]


def _prefill_sentences(plan: Plan) -> list[str]:
    chunk = prefill_link_bytes(plan, CHUNK_TOKENS)
    return [
        f"A prefill chunk of {CHUNK_TOKENS:,} tokens touches nearly every expert and moves {sized(chunk)}: "
        f"{chunk / plan.machine.link_bytes_per_s:.2f} s on this link, nearly the same for 100 tokens. Let prompts "
        "share chunks.",
    ]


def _host_sentences(plan: Plan) -> list[str]:
    need, have = sized(plan.host_store_bytes), sized(plan.machine.host_bytes)
    if plan.host_fits:
        return [f"The host store needs {need} of pinned memory; the host has {have}."]
    return [f"The host store needs {need} of pinned memory, but the host has {have}: it does not fit."]


def _old_rule_sentences(plan: Plan) -> list[str]:
    geometry, batch = plan.geometry, plan.workload.concurrency
    assert plan.num_resident is not None
    wanted = batch * geometry.experts_per_token
    sums = f"batch {batch} x {geometry.experts_per_token} experts per token = {wanted}"
    if wanted <= plan.num_resident:
        return [f"The old rule (fixed slots per layer) would not bind: {sums}, K = {plan.num_resident}."]
    return [
        f"The old rule would bind: {sums} exceeds K = {plan.num_resident}, so that engines with fixed slots leave "
        "their captured graph. Here any batch runs in one graph: what does not fit is read in place over the link."
    ]


def _limit_sentences(plan: Plan) -> list[str]:
    row = next(row for row in plan.rows if row.num_resident == plan.num_resident)
    batch = plan.workload.concurrency
    if plan.fits_resident:
        return [f"Limit: {batch / plan.resident_s:,.0f} tokens/s over all requests, bound by device memory."]
    bound = "the link" if row.in_layer_s > 1.05 * plan.resident_s else "device memory"
    return [
        f"Limits at K = {row.num_resident}: {batch / row.in_layer_s:,.0f} tokens/s over all requests if a layer's "
        f"experts become known in the layer, {batch / row.foresight_s:,.0f} with perfect foresight, "
        f"{batch / plan.resident_s:,.0f} with everything resident; bound by {bound}."
    ]


def _smaller_sentences(plan: Plan) -> list[str]:
    found = []
    geometry, work = plan.geometry, plan.workload
    if work.kv_dtype == "bf16":
        saved = plan.requests_bytes - work.concurrency * geometry.request_bytes(work.context, "fp8_e4m3")
        more = saved // geometry.place_bytes(plan.weights)
        found.append(f"kv_dtype=fp8_e4m3 would free {sized(saved)}: {more:,} more expert places.")
    smaller = [
        entry for entry in FORMATS if geometry.expert_bytes(entry) < geometry.expert_bytes(plan.weights)
    ]
    resident = [entry for entry in smaller if make_plan(geometry, entry, plan.machine, work).fits_resident]
    if resident:
        best = max(resident, key=geometry.expert_bytes)
        found.append(
            f"A checkpoint in {best.title} would fit whole ({sized(geometry.all_experts_bytes(best))})."
        )
    return found


def implied_sentences(plan: Plan, tokens_per_s: float, num_resident: int) -> list[str]:
    """What a measured single-stream speed says about the real miss rate."""
    geometry = plan.geometry
    all_miss = geometry.all_miss_bytes(plan.weights)
    implied = implied_miss_rate(tokens_per_s, plan.machine.link_bytes_per_s, all_miss)
    uniform = uniform_miss_rate(num_resident, geometry.num_experts)
    verdict = (
        "routing is skewed and the cache uses it"
        if implied < uniform
        else "no more than uniform routing allows"
    )
    return [
        f"{tokens_per_s:g} tokens/s would need {sized(link_rate_needed(tokens_per_s, all_miss))}/s if all missed; at "
        f"{sized(plan.machine.link_bytes_per_s)}/s at most {implied:.0%} missed, against {uniform:.0%} of uniform "
        f"routing at K = {num_resident}: {verdict}."
    ]
