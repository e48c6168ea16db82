"""Carries step plans out: memory commands, forward pass, sampling, result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memory.api import PageSpec
from memory.device.arena import Arena
from memory.ledger.specs import expert_spec
from worker.api import ModelInfo, TokenLogprobs
from worker.attention.choice import choose_backend
from worker.config import WorkerConfig
from worker.execution.batch import BatchBuilder, DeviceBatch
from worker.execution.loading import load_model
from worker.execution.sampler import SampledRows, Sampler
from worker.experts.pager import ExpertPager
from worker.layers.decoder import HiddenStates
from worker.models.base import ExpertFactory
from worker.models.paged import PagingFactory, paged_factory
from worker.scheduling.step import StepPlan, StepResult

DEFAULT_PAGE_TOKENS = 64
EXPERT_GROUP = "expert"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was started: what :meth:`ModelRunner.collect` turns into a result."""

    plan: StepPlan
    sampled: SampledRows | None
    started_s: float


class ModelRunner:
    """One model on one device. ``attach_memory`` comes once, before the first step."""

    def __init__(self, config: WorkerConfig, experts: ExpertFactory | None = None) -> None:
        """Loads the model; ``experts`` stands in for what ``config.experts`` says. ConfigError, ModelLoadError."""
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._config = config
        if experts is None and config.experts == "paged":
            experts = paged_factory(config)
        loaded = load_model(config, experts)
        self._model = loaded.model
        self._device = loaded.device
        self.model_info: ModelInfo = loaded.info
        page_tokens = config.page_tokens or DEFAULT_PAGE_TOKENS
        self.page_specs: tuple[PageSpec, ...] = tuple(g.page_spec(page_tokens) for g in self._model.groups)
        self.pager: ExpertPager | None = None
        if isinstance(experts, PagingFactory):
            self.pager = experts.finish(loaded.device)
            self.page_specs += (expert_spec(EXPERT_GROUP, self.pager.host.place_bytes),)
        self._shapes = {g.name: g.attention for g in self._model.groups if g.attention is not None}
        self._backend = choose_backend(config, tuple(self._shapes.values()), self._device)
        self._last_tokens = torch.zeros(config.max_running, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(
            config.max_running, self._model.vocab_size, self.model_info.eos_token_ids, self._device
        )
        self._arena: Arena | None = None
        self._builder: BatchBuilder | None = None

    def attach_memory(self, specs: Sequence[PageSpec], arena_bytes: int) -> None:
        """Takes the arena. ``specs`` are ``page_specs``, perhaps joined by others that ride along."""
        absent = {spec.name for spec in self.page_specs} - {spec.name for spec in specs}
        if absent:
            raise ValueError(f"the arena lacks the page groups {sorted(absent)}")
        self._arena = Arena(specs, arena_bytes, self._device)
        self._builder = BatchBuilder(self._arena, self._shapes, self._backend, self._model.conv_width)
        if self.pager is not None:
            self.pager.attach(self._arena.grids[EXPERT_GROUP])

    @property
    def arena(self) -> Arena:
        """The attached arena; RuntimeError before ``attach_memory``."""
        if self._arena is None:
            raise RuntimeError("attach_memory comes before the first step")
        return self._arena

    def run(self, plan: StepPlan) -> StepResult:
        """Carries a step out and waits for it."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step; its sampled tokens stay on the device for the steps launched after it."""
        started_s = time.perf_counter()
        self._apply(plan)
        self._sampler.start(plan.started)
        if plan.num_rows == 0:
            return LaunchedStep(plan, None, started_s)
        batch, hidden = self._forward(plan)
        if not plan.samples.any():
            return LaunchedStep(plan, None, started_s)
        logits = self._model.decoder.logits(hidden.final.index_select(0, batch.sample_index))
        sampled = self._sampler.sample(plan, logits)
        slots = torch.from_numpy(plan.slots[plan.samples]).to(self._device)
        self._last_tokens.index_copy_(0, slots, sampled.token_ids)
        return LaunchedStep(plan, sampled, started_s)

    @torch.inference_mode()
    def score(self, plan: StepPlan) -> torch.Tensor:
        """Carries a step out without sampling; answers the logits behind each of its tokens, [tokens, vocabulary]
        float32. All token ids are given."""
        self._apply(plan)
        return self._model.decoder.logits(self._forward(plan)[1].final)

    def _apply(self, plan: StepPlan) -> None:
        if self.pager is not None:
            # Bans come first: behind them the step's own moves and kernels may write where experts were.
            self.pager.begin_step(plan.step, plan.commands, plan.num_decode_rows)
        self.arena.apply(plan.commands)

    def _forward(self, plan: StepPlan) -> tuple[DeviceBatch, HiddenStates]:
        assert self._builder is not None
        batch = self._builder.build(plan, self._last_tokens)
        hidden = self._model.decoder.forward(batch.token_ids, batch.context)
        if self.pager is not None:
            self.pager.end_step()
        return batch, hidden

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for a launched step and answers what it brought."""
        plan = launched.plan
        token_ids = np.full((plan.num_rows, 1), -1, dtype=np.int64)
        logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if launched.sampled is not None:
            token_ids[plan.samples, 0] = launched.sampled.token_ids.cpu().numpy()
            found = launched.sampled.logprobs
            if found:
                logprobs = tuple((found[row],) if row in found else () for row in range(plan.num_rows))
        if self.pager is not None:
            self.pager.raise_if_corrupt()
        seconds = time.perf_counter() - launched.started_s
        return StepResult(plan.step, token_ids, plan.samples.astype(np.int64), logprobs, seconds)

    def close(self) -> None:
        """Gives the arena back; no step may follow."""
        self._arena = None
        self._builder = None
