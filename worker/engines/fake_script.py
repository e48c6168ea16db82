"""What the fake engine says and how fast: a frozen script, and the token source that follows it for one request."""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import blake2b
from math import log
from pathlib import Path
from typing import Any

from worker.api import FinishReason, GenerateRequest, ModelInfo, TokenLogprobs
from worker.errors import ConfigError
from worker.model_folder import read_json

SCRIPT_FILE = "fake.json"
OUTPUTS = ("echo", "count", "script", "random")


@dataclass(frozen=True, slots=True)
class FakeScript:
    """How a fake engine behaves. Every field may stand in the model folder's ``fake.json``.

    Attributes:
        output: ``echo`` repeats the prompt's tokens, ``count`` counts up from the prompt's last token, ``script``
            repeats ``token_ids``, ``random`` draws a hash of (seed, position), of (prompt, position) when greedy.
        token_ids: for ``output="script"``.
        answer_tokens: so many tokens, then the model's end token; 0: no end token of its own accord.
        first_token_s: seconds from being scheduled to the first token.
        prefill_tokens_per_s: adds a delay that grows with the prompt; 0: none.
        tokens_per_s: of each stream; 0: as fast as the loop turns.
        tick_s: tokens due within so many seconds are emitted together.
        bytes_per_token: of the simulated arena; 0: an arena that never fills.
        arena_bytes: of the simulated arena; 0: the worker's ``arena_bytes``.
        die_after_tokens: the loop raises once it has generated so many tokens in all; 0: never.
        stall_after_tokens: the loop stands still from then on; 0: never.
        vocab_size, eos_token_ids: 0 or empty: as the folder's files say (256 and none without files).
        max_model_len: where neither the folder nor the worker's configuration says.
        prefix_blocks: blocks of 64 prompt tokens that the simulated prefix cache keeps; 0: none.
        num_layers, num_experts, experts_per_token: of the simulated model; 0: as the folder's files say.
        resident_experts: experts of each layer in the simulated expert cache; 0: no such cache.
        expert_bytes, miss_s: bytes and extra seconds that one miss costs.
    """

    output: str = "echo"
    token_ids: tuple[int, ...] = ()
    answer_tokens: int = 0
    first_token_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    tick_s: float = 0.002
    bytes_per_token: int = 0
    arena_bytes: int = 0
    die_after_tokens: int = 0
    stall_after_tokens: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 4096
    prefix_blocks: int = 0
    num_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    resident_experts: int = 0
    expert_bytes: int = 0
    miss_s: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        for entry in fields(self):
            value, kind = getattr(self, entry.name), type(entry.default)
            if not isinstance(value, int | float if kind is float else kind) or isinstance(value, bool):
                problems.append(f"{SCRIPT_FILE}: {entry.name}={value!r} must be of type {kind.__name__}")
            elif isinstance(value, int | float) and value < 0:
                problems.append(f"{SCRIPT_FILE}: {entry.name}={value} must be at least 0")
        if self.output not in OUTPUTS:
            problems.append(f"{SCRIPT_FILE}: output={self.output!r} must be one of {', '.join(OUTPUTS)}")
        if (self.output == "script") != bool(self.token_ids):
            problems.append(f"{SCRIPT_FILE}: token_ids belongs to output='script', which needs it")
        if problems:
            raise ConfigError(problems)

    def first_token_delay_s(self, num_tokens: int) -> float:
        """Seconds from being scheduled to the next token when ``num_tokens`` must be computed before it."""
        prefill_s = num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        return self.first_token_s + prefill_s


def read_script(folder: Path) -> FakeScript:
    """The script in ``folder``'s fake.json, the default one if there is none; ConfigError names unknown fields."""
    found = read_json(folder / SCRIPT_FILE)
    unknown = sorted(set(found) - {entry.name for entry in fields(FakeScript)})
    if unknown:
        raise ConfigError([f"{SCRIPT_FILE}: unknown field {name!r}" for name in unknown])
    values: dict[str, Any] = {
        n: tuple(value) if isinstance(value, list) else value for n, value in found.items()
    }
    return FakeScript(**values)


class TokenSource:
    """The scripted answer to one request. It honours what decides when an answer ends, seeds, and the extremes of
    ``logit_bias`` (100 forces, -100 forbids a token); other sampling rules do not bend a script."""

    def __init__(self, script: FakeScript, request: GenerateRequest, model: ModelInfo) -> None:
        self._script = script
        self._prompt = request.prompt_token_ids
        self._sampling = request.sampling
        self._vocab_size = model.vocab_size
        self._model_ends = frozenset() if request.sampling.ignore_eos else frozenset(model.eos_token_ids)
        self._ends = self._model_ends | frozenset(request.sampling.stop_token_ids)
        bias = request.sampling.logit_bias
        self._forced = next((token for token, value in bias if value >= 100.0), None)
        self._forbidden = frozenset(token for token, value in bias if value <= -100.0)
        self._key = b"" if script.output != "random" else self._random_key()

    def next_token(self, position: int) -> int:
        """The token at generated position ``position``; the same whenever it is asked."""
        answer_tokens = self._script.answer_tokens
        if self._forced is not None:
            token = self._forced
        elif answer_tokens and position >= answer_tokens and self._model_ends:
            token = min(self._model_ends)
        else:
            token = self._scripted(position)
        banned = self._forbidden if position >= self._sampling.min_tokens else self._forbidden | self._ends
        for _ in range(self._vocab_size):
            if token not in banned:
                break
            token = (token + 1) % self._vocab_size
        return token

    def finish_reason(self, token: int, num_generated: int) -> FinishReason | None:
        """Why the answer ends with ``token``, its ``num_generated``-th, or None."""
        if token in self._ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self._sampling.max_tokens else None

    def logprobs(self, token: int) -> tuple[TokenLogprobs, ...]:
        """Made-up log-probabilities with the form of real ones: the token itself leads, halves follow."""
        if self._sampling.logprobs is None:
            return ()
        others = (
            (token + step) % self._vocab_size
            for step in range(min(self._sampling.logprobs, self._vocab_size))
        )
        top = tuple((other, -log(2.0) * (rank + 1)) for rank, other in enumerate(others))
        return (TokenLogprobs(token, -log(2.0), top),)

    def _scripted(self, position: int) -> int:
        if self._script.output == "echo":
            return self._prompt[position % len(self._prompt)]
        if self._script.output == "count":
            return (self._prompt[-1] + 1 + position) % self._vocab_size
        if self._script.output == "script":
            return self._script.token_ids[position % len(self._script.token_ids)] % self._vocab_size
        digest = blake2b(position.to_bytes(8, "little"), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") % self._vocab_size

    def _random_key(self) -> bytes:
        source = repr(self._prompt)
        if self._sampling.temperature > 0.0:
            source += f" {self._sampling.seed}"
        return blake2b(source.encode(), digest_size=32).digest()
