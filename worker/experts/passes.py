"""How large a prefill pass and its ring are: a pass must compute for as long as the link brings what is missing.

Any chunk of some hundred tokens touches nearly every expert, so a pass costs the same bytes whatever its size is: those
of all experts that have no place. Prompts that wait share one. With T tokens it computes for ``T x flops per token /
rate``, and the link works for ``missing bytes / link``; T is where the first is no shorter than the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from memory.api import PageKind, PageSpec
from worker.scheduling.limits import PassPrice, RingRule

PASS_FLOPS_PER_S = 215e12
"""Routed experts' operations over the time of all but attention: 8,192 tokens of Qwen3-30B-A3B in FP8 take 138 ms of it
on an H200."""
ATTENTION_RATE = 2.8
"""Attention's operations a second over that: it takes another 44 to 48 ms of those tokens."""
PASS_LINK_BYTES_PER_S = 50e9
ACTIVATION_BYTES = 2 << 30
"""Most bytes that the activations of a pass may take."""


WINDOW_SHARE = 1 / 16
"""Of the arena, at most, for the window entries of a pass."""
RING_DRAWS = 8
"""Choices per expert: at 8 from 128 a ring is worth its places from 128 tokens on."""


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What a pass depends on.

    Attributes:
        num_layers, num_experts, experts_per_token: layers with routed experts; experts of each; how many a token takes.
        place_bytes: of an expert.
        resident_places: experts that may be counted on to be resident, over all layers.
        hidden_size, inner_size: of an expert: what goes in and comes out, and what lies between.
        value_bytes: of an activation.
        attention_flops: of a token for each token that it sees, over all layers that see everything.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    place_bytes: int
    resident_places: int
    hidden_size: int
    inner_size: int
    value_bytes: int = 2
    attention_flops: float = 0.0

    @property
    def missing(self) -> int:
        """Experts that a pass must bring."""
        return max(0, self.num_layers * self.num_experts - self.resident_places)

    @property
    def ring_tokens(self) -> int:
        """Least tokens of a pass with a ring, which brings all experts of a layer: so many of a text take nearly all, a
        shorter one's are mostly resident."""
        return ceil(RING_DRAWS * self.num_experts / self.experts_per_token)

    @property
    def token_flops(self) -> float:
        """Of a token's routed experts: three products of two FLOPs a weight. The rest is left out, so a pass is rather
        too long than too short."""
        return 6.0 * self.num_layers * self.experts_per_token * self.hidden_size * self.inner_size

    @property
    def equal_context(self) -> float:
        """Tokens that a token sees when attention takes as long as all else; infinite where no layer sees them all."""
        return ATTENTION_RATE * self.token_flops / self.attention_flops if self.attention_flops else inf

    @property
    def token_bytes(self) -> int:
        """Activations of a token: stream, normed, query, key, value and output, and a layer's expert outputs."""
        per_expert = self.hidden_size + 3 * self.inner_size
        return self.value_bytes * (10 * self.hidden_size + self.experts_per_token * per_expert)


@dataclass(frozen=True, slots=True)
class PassSize:
    """``tokens`` of a pass at most, 0: prompts are computed in steps; ``ring``: how large its ring is; ``line``: the
    sizes in words; ``price``: of chunks, None where a pass is to have its tokens whatever they cost."""

    tokens: int
    ring: RingRule
    line: str
    price: PassPrice | None = None


def priced_tokens(facts: PassFacts, link_bytes_per_s: float, flops_per_s: float) -> int:
    """Tokens that compute for as long as the link brings what is missing."""
    transfer_s = facts.missing * facts.place_bytes / link_bytes_per_s
    return max(64, ceil(transfer_s * flops_per_s / facts.token_flops))


def tokens_in_windows(specs: Sequence[PageSpec], arena_bytes: int) -> int:
    """Most tokens of a chunk whose sliding-window entries, all kept until it is computed, take :data:`WINDOW_SHARE` of
    an arena; the arena's bytes where no group has a window."""
    token_bytes = sum(s.page_bytes / s.page_tokens for s in specs if s.kind is PageKind.WINDOW)
    return int(WINDOW_SHARE * arena_bytes / token_bytes) if token_bytes else arena_bytes


def plan_passes(
    facts: PassFacts,
    asked: int,
    largest: int,
    link_bytes_per_s: float = PASS_LINK_BYTES_PER_S,
    flops_per_s: float = PASS_FLOPS_PER_S,
    activation_bytes: int = ACTIVATION_BYTES,
) -> PassSize:
    """Passes of as many tokens as ``asked``, -1 for none. 0: as many as compute while the link works, as far as their
    activations fit and a request has so many (``largest``; 0: no passes), and none where nothing has to be brought. A
    ring holds what two layers lack: one half is read while the other is filled; the line tells its size for what
    ``facts`` say is resident."""
    transfer_s = facts.missing * facts.place_bytes / link_bytes_per_s
    priced = priced_tokens(facts, link_bytes_per_s, flops_per_s)
    most = max(64, activation_bytes // facts.token_bytes)
    tokens = max(0, asked)
    if asked == 0 and largest and facts.missing:
        tokens = min(priced, most, max(64, largest)) // 64 * 64
    ring = RingRule(facts.num_layers, facts.num_experts, facts.ring_tokens)
    expert_s = facts.place_bytes / link_bytes_per_s
    price = PassPrice(facts.equal_context, expert_s * flops_per_s / facts.token_flops)
    priced_by_context = asked == 0 and tokens and facts.equal_context < inf
    what = f"prefill passes of up to {tokens} tokens" if tokens else "prompts in steps"
    return PassSize(
        tokens,
        ring,
        f"{what}; {priced} tokens compute as long as the link works at {link_bytes_per_s / 1e9:.0f} GB/s"
        f" ({facts.missing} experts, {transfer_s * 1e3:.0f} ms), {most} fit {activation_bytes / 1e9:.1f} GB of"
        f" activations; a ring of {ring.places(facts.resident_places)} places",
        price if priced_by_context else None,
    )
