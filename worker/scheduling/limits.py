"""What one step and one request may come to."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from memory.api import CHECKPOINT_TOKENS
from worker.errors import ConfigError

MIXED_TOKENS = 8
"""Longer chunks are a pass, where there are passes."""

PRICE_SPARE = 0.02
"""Chunks end at whole pages: what earlier passes of a prompt leave by that, its last one may take beyond the most."""


@dataclass(frozen=True, slots=True)
class RingRule:
    """How large the ring of a prefill pass is: what two of ``num_layers`` layers of ``num_experts`` lack. A pass of
    fewer than ``least_tokens`` has none: it takes so few of a layer's experts that it reads those where they are."""

    num_layers: int
    num_experts: int
    least_tokens: int = 0

    def places(self, num_resident: int) -> int:
        """Places of a ring while so many experts are resident; 0 where none is missing."""
        missing = max(0, self.num_layers * self.num_experts - num_resident)
        return min(2 * self.num_experts, 2 * -(-missing // self.num_layers))


@dataclass(frozen=True, slots=True)
class PassPrice:
    """What chunks of a pass cost, in tokens without context: one that sees ``equal_context`` tokens costs two, for
    attention takes as long as all else then. Meanwhile the link brings: an expert in ``expert_tokens``."""

    equal_context: float
    expert_tokens: float

    def cost(self, num_computed: int, num_tokens: int) -> float:
        """Of a chunk behind so many tokens."""
        return num_tokens * (1.0 + (num_computed + num_tokens / 2) / self.equal_context)

    def tokens(self, num_computed: int, cost: float) -> int:
        """Of the longest chunk behind so many tokens that costs no more."""
        first = 1.0 + num_computed / self.equal_context
        return int(
            self.equal_context * (sqrt(first * first + 2.0 * max(0.0, cost) / self.equal_context) - first)
        )

    def share(self, num_computed: int, num_known: int, priced: float, most: float) -> float:
        """What each pass is to cost that a prompt still needs: all the same, for streams wait for layers; no less than
        ``priced``, which the link needs, where the prompt has so much; and no more than ``most``."""
        whole = self.cost(num_computed, num_known - num_computed)
        spare = PRICE_SPARE if num_computed else 0.0
        return whole / max(1, int(whole / priced), ceil(whole / most - spare))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and one request may come to.

    Attributes:
        max_running: rows in one step.
        max_step_tokens: tokens in one step.
        max_model_len: tokens of a request, prompt and output together.
        end_token_ids: the model's own end tokens.
        deterministic: chunks end only at multiples of CHECKPOINT_TOKENS, the output of a request that was sent back is
            computed again token by token, and no output is shared, since a prompt would be computed another way.
        prefix_cache: whether prefixes are looked up and kept.
        checkpoint_tokens: how far apart a row is offered to the prefix cache at least, besides the prompt's end, which
            always is.
        seed: of requests that name none.
        pass_tokens: most tokens of a prefill pass, which waiting prompts share and which runs beside decode steps; 0:
            prompts are computed in steps.
        chunk_tokens: most prompt tokens of a step in which rows decode: more hold running streams up, and cost no less
            in one step than in several. With 64 rows it makes whole tiles of products.
        mixed_tokens: with passes, chunks of no more tokens than this in all are computed beside decode rows.
        ring: of a pass, which streams missing experts through expert places; None: they are read where they are.
        price: of the chunks of passes; None: their tokens alone count.
    """

    max_running: int
    max_step_tokens: int
    max_model_len: int
    end_token_ids: tuple[int, ...] = ()
    deterministic: bool = False
    prefix_cache: bool = True
    checkpoint_tokens: int = 1024
    seed: int = 0
    pass_tokens: int = 0
    chunk_tokens: int = 960
    mixed_tokens: int = MIXED_TOKENS
    ring: RingRule | None = None
    price: PassPrice | None = None

    def __post_init__(self) -> None:
        if self.deterministic and self.max_step_tokens <= CHECKPOINT_TOKENS:
            least = CHECKPOINT_TOKENS + 1
            raise ConfigError(
                [f"deterministic=true needs max_step_tokens of at least {least}, not {self.max_step_tokens}"]
            )
