"""Stock transformers on the CPU: the numerical reference and the speed to beat, with the same prompts as the engine."""

from __future__ import annotations

import inspect
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from worker.api import TokenLogprobs
from worker.models.transformers_window import apply_attention_windows

ROOT = Path(__file__).resolve().parent.parent
TIE_MARGIN = 1e-4
"""Where the reference's two best log-probabilities lie closer, either is right."""
LOGPROB_TOLERANCE = 1e-4
ROUTER_TIE_MARGIN = 2e-6
"""Where the last chosen expert's router logit and the next one's lie closer, float32 cannot tell which is right, and
whoever takes the other expert is as right from there on."""


@cache
def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder's model, windows applied."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    apply_attention_windows(model)
    use_plain_functions(sys.modules[type(model).__module__])
    return model


def use_plain_functions(modelling: ModuleType) -> None:
    """Makes a model's code call torch's own functions where it would call a package for GPUs, if that is installed."""
    for name in ("gated_delta_rule", "causal_conv1d"):
        for key, found in list(vars(modelling).items()):
            if name in key and callable(found):
                setattr(modelling, key, inspect.unwrap(found))


@dataclass(frozen=True)
class Agreement:
    """How generated positions compare: ``mismatches`` have another token than the reference although its margin is
    clear, ``near_ties`` have no clear margin, ``resynchronised`` are those of them with another token.

    ``behind_router_tie`` positions see one where a router's choice is a tie; their log-probabilities are compared in
    ``tied_logprob_diff``, those of all others in ``max_logprob_diff``.
    """

    positions: int = 0
    mismatches: int = 0
    near_ties: int = 0
    resynchronised: int = 0
    max_logprob_diff: float = 0.0
    behind_router_tie: int = 0
    tied_logprob_diff: float = 0.0

    def joined(self, other: Agreement) -> Agreement:
        """Both together."""
        return Agreement(
            self.positions + other.positions,
            self.mismatches + other.mismatches,
            self.near_ties + other.near_ties,
            self.resynchronised + other.resynchronised,
            max(self.max_logprob_diff, other.max_logprob_diff),
            self.behind_router_tie + other.behind_router_tie,
            max(self.tied_logprob_diff, other.tied_logprob_diff),
        )


@contextmanager
def watching_routers(model: Any) -> Iterator[list[torch.Tensor]]:
    """Within it the list takes each router's logits, [tokens, experts], of one sequence's pass, layer by layer."""
    caught: list[torch.Tensor] = []

    def catch(_module: Any, _inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        caught.append(logits.reshape(-1, logits.shape[-1]).float())

    hooks = [
        module.register_forward_hook(catch)
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


def first_router_tie(logits: Sequence[torch.Tensor], experts_per_token: int) -> int | None:
    """The first position at which any router's choice is a tie; None without any."""
    ties = [
        (best[:, -2] - best[:, -1] < ROUTER_TIE_MARGIN).nonzero()
        for best in (layer.topk(experts_per_token + 1, -1).values for layer in logits)
    ]
    return min((int(found[0]) for found in ties if len(found)), default=None)


def compare(
    folder: Path, prompt: Sequence[int], generated: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Agreement:
    """Scores greedily generated tokens in one reference pass over prompt and output, so that every position is judged
    on its own prefix (after another choice at a near tie the reference follows the output); all reported
    log-probabilities are compared, top ones too."""
    model = reference_model(folder)
    with torch.inference_mode(), watching_routers(model) as routers:
        logits = model(torch.tensor([[*prompt, *generated]]), use_cache=False).logits[0]
    per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
    tie = first_router_tie(routers, per_token) if routers else None
    # The logits behind position p - 1 have seen all positions before p.
    tied_from = len(generated) if tie is None else max(0, tie - len(prompt) + 1)
    scores = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    best = scores.topk(2, -1)
    mismatches = near_ties = resynchronised = 0
    worst = tied_worst = 0.0
    for i, (token, said) in enumerate(zip(generated, logprobs, strict=True)):
        assert said.token_id == token
        clear = bool(best.values[i, 0] - best.values[i, 1] >= TIE_MARGIN)
        differs = token != int(best.indices[i, 0])
        near_ties += not clear
        mismatches += clear and differs
        resynchronised += differs and not clear
        pairs = [(token, said.logprob), *said.top]
        differs_by = max(abs(scores[i, t].item() - value) for t, value in pairs)
        if i < tied_from:
            worst = max(worst, differs_by)
        else:
            tied_worst = max(tied_worst, differs_by)
    tied = len(generated) - min(tied_from, len(generated))
    return Agreement(len(generated), mismatches, near_ties, resynchronised, worst, tied, tied_worst)


def sample_prompts(folder: Path, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of the given lengths: pieces of this repository's licence, which no model here was trained on, in the
    folder's own tokens. Not of its manual, which changes: a new text may hold a router's tie, behind which two right
    computations take different experts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.encode((ROOT / "LICENSE").read_text(), add_special_tokens=False)
    token_ids = text * (1 + max(lengths) // len(text))  # again from its beginning for longer prompts
    rng = random.Random(seed)
    starts = [rng.randrange(len(token_ids) - length) for length in lengths]
    return [tuple(token_ids[s : s + n]) for s, n in zip(starts, lengths, strict=True)]


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens of a run, prefill and decode apart. ``decode_tokens`` leaves out each row's first token,
    which the prefill brings; ``steps_s`` are the decode steps' seconds, each of ``num_rows`` tokens."""

    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    num_rows: int
    steps_s: tuple[float, ...]

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second while nothing is prefilled."""
        return self.decode_tokens / self.decode_s

    @property
    def step_rate(self) -> float:
        """Generated tokens per second at the lower quartile of step times: what other work on the machine distorts
        less than the mean."""
        return self.num_rows / sorted(self.steps_s)[len(self.steps_s) // 4]

    @property
    def total_s(self) -> float:
        """Seconds for everything."""
        return self.prefill_s + self.decode_s

    def joined(self, other: Timing) -> Timing:
        """One run after the other."""
        return Timing(
            self.prefill_s + other.prefill_s,
            self.prefill_tokens + other.prefill_tokens,
            self.decode_s + other.decode_s,
            self.decode_tokens + other.decode_tokens,
            self.num_rows,
            self.steps_s + other.steps_s,
        )


@torch.inference_mode()
def time_reference(folder: Path, prompts: Sequence[Sequence[int]], num_new: int) -> Timing:
    """Greedy continuation of one left-padded batch, by bare cached forward passes (faster than ``generate``)."""
    model = reference_model(folder)
    longest = max(len(prompt) for prompt in prompts)
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    padded: dict[str, Any] = {}
    if not bool(mask.all()):
        padded = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)}
    start = time.perf_counter()
    out = model(token_ids, use_cache=True, logits_to_keep=1, **padded)
    next_ids = out.logits[:, -1].argmax(-1, keepdim=True)
    stamps = [time.perf_counter()]
    for _ in range(num_new - 1):
        if padded:
            mask = torch.cat([mask, torch.ones_like(next_ids)], 1)
            padded = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        out = model(next_ids, past_key_values=out.past_key_values, use_cache=True, **padded)
        next_ids = out.logits[:, -1].argmax(-1, keepdim=True)
        stamps.append(time.perf_counter())
    num_prompt = sum(len(prompt) for prompt in prompts)
    decoded = len(prompts) * (num_new - 1)
    steps_s = tuple(after - before for before, after in pairwise(stamps))
    return Timing(stamps[0] - start, num_prompt, stamps[-1] - stamps[0], decoded, len(prompts), steps_s)
