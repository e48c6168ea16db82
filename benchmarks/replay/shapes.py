"""What the replay must know of each model: bytes per token and request, weights read and work done per token.

Lengths may be simulated coarsely: one simulated token stands for ``grain`` real ones, so its KV is ``grain`` times as
large and pages hold ``grain`` times fewer. Bytes per real token, page and request stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory.api import LayerRows, PageKind, PageSpec, Row


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Memory and work of one model.

    Attributes:
        full_token_bytes: attention KV (or latents) per token, all layers.
        window_token_bytes: the same for sliding layers, 0 for none.
        window: tokens a sliding layer's query sees.
        state_bytes: recurrent state per request, 0 for none.
        dense_bytes: weights that every step reads, the head among them, the embedding not.
        expert_bytes: one routed expert of one layer, as it is read.
        num_layers: layers with attention or a state; each costs its launches.
        num_moe_layers, num_experts, experts_per_token: routed experts, 0 for none.
        token_params: parameters that every token meets: neither embedding nor head.
        head_params: those that a token meets whose successor is wanted.
        attention_flops: multiply-adds x 2 per query token and context token, full-attention layers together.
        paged: experts lie in the arena.
        page_tokens: real tokens per FULL page; window_page_tokens: per WINDOW page.
    """

    name: str
    full_token_bytes: int
    dense_bytes: float
    token_params: float
    head_params: float
    attention_flops: float
    num_layers: int
    window_token_bytes: int = 0
    window: int = 0
    state_bytes: int = 0
    expert_bytes: int = 0
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    paged: bool = False
    page_tokens: int = 64
    window_page_tokens: int = 32

    def specs(self, grain: int) -> tuple[PageSpec, ...]:
        """Page specs in which one token stands for ``grain`` real ones."""
        found = [_tokens("full", PageKind.FULL, self.page_tokens, grain, self.full_token_bytes)]
        if self.window:
            found.append(
                _tokens(
                    f"window{self.window}",
                    PageKind.WINDOW,
                    self.window_page_tokens,
                    grain,
                    self.window_token_bytes,
                    self.window // grain,
                )
            )
        if self.state_bytes:
            row = Row("state", (self.state_bytes,), "uint8")
            found.append(PageSpec("state", PageKind.STATE, 1, (LayerRows(0, (row,)),)))
        if self.paged:
            row = Row("block", (self.expert_bytes,), "uint8")
            found.append(PageSpec("expert", PageKind.EXPERT, 1, (LayerRows(0, (row,)),)))
        return tuple(found)

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes that a request of ``num_tokens`` real tokens holds, without rounding to pages."""
        window = min(num_tokens, self.window) * self.window_token_bytes
        return num_tokens * self.full_token_bytes + window + self.state_bytes


def _tokens(
    name: str, kind: PageKind, page_tokens: int, grain: int, token_bytes: int, window: int | None = None
) -> PageSpec:
    row = Row("kv", (token_bytes * grain,), "uint8")
    return PageSpec(name, kind, max(1, page_tokens // grain), (LayerRows(0, (row,)),), window)


GPT_OSS_20B = ModelShape(
    "gpt_oss_20b",
    full_token_bytes=24_576,
    window_token_bytes=24_576,
    window=128,
    dense_bytes=2.437e9,
    expert_bytes=13_219_200,
    num_layers=24,
    num_moe_layers=24,
    num_experts=32,
    experts_per_token=4,
    token_params=3.029e9,
    head_params=0.579e9,
    attention_flops=4 * 12 * 64 * 64,
    page_tokens=128,
)
QWEN35_4B = ModelShape(
    "qwen35_4b",
    full_token_bytes=32_768,
    state_bytes=51_511_296,
    dense_bytes=8.411e9,
    num_layers=32,
    token_params=3.570e9,
    head_params=0.636e9,
    attention_flops=4 * 8 * 16 * 256,
)
QWEN35_35B_A3B = ModelShape(
    "qwen35_35b_a3b",
    full_token_bytes=20_480,
    state_bytes=64_389_120,
    dense_bytes=3.880e9,
    expert_bytes=6_291_456,
    num_layers=40,
    num_moe_layers=40,
    num_experts=256,
    experts_per_token=8,
    token_params=2.438e9,
    head_params=0.509e9,
    attention_flops=4 * 10 * 16 * 256,
)
QWEN3_30B_A3B = ModelShape(
    "qwen3_30b_a3b",
    full_token_bytes=98_304,
    dense_bytes=2.460e9,
    expert_bytes=4_720_128,
    num_layers=48,
    num_moe_layers=48,
    num_experts=128,
    experts_per_token=8,
    token_params=2.731e9,
    head_params=0.311e9,
    attention_flops=4 * 48 * 32 * 128,
    paged=True,
)
KIMI_LINEAR = ModelShape(
    "kimi_linear",
    full_token_bytes=8_064,
    state_bytes=43_417_600,
    dense_bytes=3.270e9,
    expert_bytes=14_155_776,
    num_layers=27,
    num_moe_layers=26,
    num_experts=256,
    experts_per_token=8,
    token_params=2.730e9,
    head_params=0.3775e9,
    attention_flops=4 * 7 * 32 * 576,
    page_tokens=128,
)
SHAPES = {shape.name: shape for shape in (GPT_OSS_20B, QWEN35_4B, QWEN35_35B_A3B, QWEN3_30B_A3B, KIMI_LINEAR)}
