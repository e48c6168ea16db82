"""Writes the sizing page: what every named model needs, and what fits on cards of common sizes."""

from __future__ import annotations

from worker.advise.formats import FORMATS, WeightFormat
from worker.advise.geometry import ModelGeometry
from worker.advise.named import find_geometry, named_models
from worker.advise.plan import Machine, Plan, Workload, make_plan
from worker.advise.words import counted, sized, table

CARD_BYTES = tuple(size * 10**9 for size in (8, 16, 24, 48, 80, 141))
LINKS_BYTES_PER_S = (25e9, 50e9)
WORKLOAD = Workload(concurrency=4, context=8192)
SHOWN_FORMATS = ("bf16", "fp8", "int4", "mxfp4")


def sizing_page() -> str:
    """The page as Markdown."""
    models = [find_geometry(name) for name in named_models()]
    routed = [model for model in models if model.num_experts]
    dense = [model for model in models if not model.num_experts]
    return "\n".join(
        [*_opening(), *_costs(models), *_experts(routed), *_cards(routed), *_dense_cards(dense), ""]
    )


def _opening() -> list[str]:
    machine = _machine(CARD_BYTES[0])
    return [
        "# Sizing",
        "",
        "What models cost and what fits where. Written by `python -m worker.advise --sizing-page` from configuration",
        "facts alone: arithmetic, no measurement. For your model and machine:",
        "",
        "    python -m worker.advise MODEL --gpu-bytes 24GB --link-gbps 25 --host-bytes 64GB --concurrency 4 --measure",
        "",
        "`MODEL` is a checkpoint's folder, a config.json or a name of this page. A card's bytes are decimal;",
        f"{sized(machine.runtime_bytes)} of them are set aside for the driver, workspaces and activations (an",
        "assumption: `--runtime-bytes`). Draft heads and vision towers are not counted.",
        "",
    ]


def _machine(gpu_bytes: int, link_bytes_per_s: float = LINKS_BYTES_PER_S[0]) -> Machine:
    return Machine(gpu_bytes, link_bytes_per_s, host_bytes=10**12, memory_bytes_per_s=1e12)


def _formats(model: ModelGeometry) -> list[WeightFormat]:
    """Formats to show: those whose groups divide the model's experts; mxfp4 only where a checkpoint comes in it."""
    own = model.checkpoint_format
    found = [entry for entry in FORMATS if entry.name in SHOWN_FORMATS and entry.name != "mxfp4"]
    if model.expert is not None:
        found = [entry for entry in found if entry.divides(model.expert)]
    if own.name == "mxfp4":
        found = [own]
    return found


def _costs(models: list[ModelGeometry]) -> list[str]:
    head = ("model", "weights", "active", "KV a token, bf16", "window KV a request", "state a request")
    rows = [
        (
            model.name,
            counted(model.num_params),
            counted(model.num_active_params),
            f"{model.full_kv_bytes():,} B",
            sized(model.window_kv_bytes()) if model.window_kv_bytes() else "-",
            sized(model.state_bytes) if model.state_bytes else "-",
        )
        for model in models
    ]
    return ["## What a token and a request cost", "", *table(head, rows), ""]


def _experts(models: list[ModelGeometry]) -> list[str]:
    head = (
        "model", "format", "experts", "one expert", "a place in all layers", "= tokens of bf16 KV", "= of FP8 KV",
        "all experts (host store)", "a token, all missed",
    )  # fmt: skip
    rows = []
    for model in models:
        for weights in _formats(model):
            place = model.place_bytes(weights) * model.num_moe_layers
            rows.append(
                (
                    model.name,
                    weights.title,
                    f"{model.num_moe_layers} x {model.num_experts}, {model.experts_per_token} a token",
                    sized(model.expert_bytes(weights)),
                    sized(place),
                    f"{round(place / model.full_kv_bytes('bf16')):,}",
                    f"{round(place / model.full_kv_bytes('fp8_e4m3')):,}",
                    sized(model.all_experts_bytes(weights)),
                    sized(model.all_miss_bytes(weights)),
                )
            )
    return ["## What an expert costs", "", *table(head, rows), ""]


def _cards(models: list[ModelGeometry]) -> list[str]:
    head = ("model", "format", *(sized(size) for size in CARD_BYTES))
    rows = [
        (model.name, weights.title, *(_cell(model, weights, size) for size in CARD_BYTES))
        for model in models
        for weights in _formats(model)
    ]
    slow, fast = (f"{rate / 1e9:.0f}" for rate in LINKS_BYTES_PER_S)
    return [
        "## Mixture-of-experts models by card",
        "",
        f"For {WORKLOAD.concurrency} requests of {WORKLOAD.context:,} tokens with bf16 KV. `resident`: every expert",
        "stays on the card. `K`: experts of each layer that do, on average; then the tokens a second, over all",
        f"requests, that a link of {slow} and of {fast} GB/s could carry if routing were uniform. Real text misses",
        "less: this is the floor of what the link allows, whatever the card's own speed. `no`: the weights besides",
        "experts, or the requests, do not fit.",
        "",
        *table(head, rows),
        "",
    ]


def _cell(model: ModelGeometry, weights: WeightFormat, gpu_bytes: int) -> str:
    plan = make_plan(model, weights, _machine(gpu_bytes), WORKLOAD)
    if plan.num_resident is None:
        return "no"
    if plan.fits_resident:
        return "resident"
    row = next(row for row in plan.rows if row.num_resident == plan.num_resident)
    speeds = [WORKLOAD.concurrency * rate / row.link_bytes for rate in LINKS_BYTES_PER_S]
    return f"K {plan.num_resident}: " + " / ".join(
        f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}" for speed in speeds
    )


def _dense_cards(models: list[ModelGeometry]) -> list[str]:
    head = ("model", "format", *(sized(size) for size in CARD_BYTES))
    rows = []
    for model in models:
        for weights in _formats(model):
            plans = [make_plan(model, weights, _machine(size), WORKLOAD) for size in CARD_BYTES]
            rows.append((model.name, weights.title, *(_room(plan) for plan in plans)))
    return [
        "## Dense hybrid models by card",
        "",
        f"Requests of {WORKLOAD.context:,} tokens with bf16 KV that fit at once.",
        "",
        *table(head, rows),
    ]


def _room(plan: Plan) -> str:
    return f"{plan.largest_concurrency:,}" if plan.largest_concurrency else "no"
