"""Carries step plans out: memory commands, forward pass, sampling, result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memory.api import PageSpec
from memory.device.arena import Arena
from memory.ledger.specs import expert_spec
from worker.api import ModelInfo, TokenLogprobs
from worker.attention.base import AttentionBackend
from worker.attention.choice import choose_backend, choose_decode_backend
from worker.attention.decode_choice import measured_rows
from worker.attention.decode_times import DecodeGroup
from worker.config import WorkerConfig
from worker.execution.batch import BatchBuilder, DeviceBatch
from worker.execution.decode import DecodeSteps, batch_sizes, context_bounds
from worker.execution.graphs import DecodeGraphs, GraphPool, MixedGraphs
from worker.execution.loading import load_model
from worker.execution.mixed import MixedKey, MixedSizes, MixedSteps
from worker.execution.prefill_pass import LayerPace, PrefillPass
from worker.execution.sampler import SampledRows, Sampler, SamplingStep
from worker.execution.staging import Uploads, fetch, make_uploads
from worker.execution.timing import StepTimer
from worker.experts.pager import ExpertPager
from worker.experts.passes import PassFacts, PassSize, plan_passes, tokens_in_windows
from worker.experts.use import ExpertUse
from worker.layers.decoder import HiddenStates
from worker.models.base import ExpertFactory
from worker.models.paged import PagingFactory, paged_factory
from worker.scheduling.limits import MIXED_TOKENS
from worker.scheduling.step import StepPlan, StepResult

DEFAULT_PAGE_TOKENS = 64
EXPERT_GROUP = "expert"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was started: what :meth:`ModelRunner.collect` turns into a result. ``sampled``, ``corrupt`` and
    ``leaning`` (see :class:`worker.experts.use.ExpertUse`) lie on the host and are whole when ``timer`` is done."""

    plan: StepPlan
    sampled: SampledRows | None
    corrupt: torch.Tensor | None
    leaning: torch.Tensor | None
    timer: StepTimer


class LaunchedPass:
    """A prefill pass under way."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, layers: PrefillPass, timer: StepTimer) -> None:
        self._runner = runner
        self._plan = plan
        self._layers = layers
        self._timer = timer
        self._ended: LaunchedStep | None = None

    @torch.inference_mode()
    def advance(self, seconds: float | None) -> bool:
        """Launches about ``seconds`` of its layers, at least one; None: all that are left. True: that was the last."""
        self._layers.advance(seconds)
        if self._layers.is_done and self._ended is None:
            self._ended = self._runner.end_pass(self._plan, self._layers, self._timer)
        return self._ended is not None

    def collect(self) -> StepResult:
        """Waits for its end; RuntimeError before its last layer was launched."""
        if self._ended is None:
            raise RuntimeError(f"the pass of step {self._plan.step} has layers left")
        return self._runner.collect(self._ended)


class ModelRunner:
    """One model on one device. ``attach_memory`` comes once, before the first step."""

    def __init__(self, config: WorkerConfig, experts: ExpertFactory | None = None) -> None:
        """Loads the model; ``experts`` stands in for what ``config.experts`` says. ConfigError, ModelLoadError."""
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.config = config
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
            if config.expert_use:
                self.pager.use = self._watch_use(self.pager)
        self.passes = self._plan_passes()
        self._pace = LayerPace(self._device)
        self._shapes = {g.name: g.attention for g in self._model.groups if g.attention is not None}
        self._backend = choose_backend(config, tuple(self._shapes.values()), self._device)
        self._decode_backend = self._choose_decode_backend()
        self._last_tokens = torch.zeros(config.max_running, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(
            config.max_running, self._model.vocab_size, self.model_info.eos_token_ids, self._device
        )
        self._uploads = make_uploads(self._device)
        self._pass_uploads: Uploads | None = None
        self._arena: Arena | None = None
        self._builder: BatchBuilder | None = None
        self._closed = False
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._pool: GraphPool | None = None

    def _watch_use(self, pager: ExpertPager) -> ExpertUse:
        """Counts of what each row's decode steps choose."""
        layers, experts = len(pager.host.layers), pager.host.num_experts
        per_token = self.model_info.experts_per_token
        return ExpertUse(self.config.max_running, layers, experts, per_token, self._device)

    def _choose_decode_backend(self) -> AttentionBackend:
        """What serves decode steps' attention, chosen ahead of everything that is captured or measures memory."""
        dtype = str(self._model.decoder.dtype).removeprefix("torch.")
        specs = {spec.name: spec for spec in self.page_specs}
        groups = {
            name: DecodeGroup(shape, len(specs[name].layers), specs[name].page_tokens, dtype)
            for name, shape in self._shapes.items()
        }
        sizes = [
            (rows, bound)
            for bound in context_bounds(self.model_info.max_model_len)
            for rows in measured_rows(self.config.max_running)
        ]
        return choose_decode_backend(self.config, self._backend, groups, sizes, self._device)

    def _plan_passes(self) -> PassSize | None:
        """How prompts are computed where experts are paged."""
        if self.pager is None:
            return None
        info, pager = self.model_info, self.pager
        facts = PassFacts(
            num_layers=len(pager.host.layers),
            num_experts=pager.host.num_experts,
            experts_per_token=info.experts_per_token,
            place_bytes=pager.host.place_bytes,
            resident_places=self.config.expert_bytes // pager.host.place_bytes,
            hidden_size=self._model.decoder.hidden_size,
            inner_size=pager.inner_size,
            attention_flops=sum(
                4.0 * len(group.layers) * group.attention.num_heads * group.attention.head_dim
                for group in self._model.groups
                if group.attention is not None and group.attention.window is None
            ),
        )
        # On a CPU the link is memory: what is missing is read where it is, at the same price.
        largest = info.max_model_len if self._device.type == "cuda" else 0
        if self.config.arena_bytes:
            largest = min(largest, tokens_in_windows(self.page_specs, self.config.arena_bytes))
        return plan_passes(facts, self.config.pass_tokens, largest)

    @property
    def largest_chunk(self) -> int:
        """Most tokens that are computed at once."""
        return max(self.config.max_step_tokens, self.passes.tokens if self.passes is not None else 0)

    def attach_memory(self, specs: Sequence[PageSpec], arena_bytes: int, with_host_tier: bool = True) -> None:
        """Takes the arena. ``specs`` are ``page_specs``, perhaps joined by others that ride along."""
        absent = {spec.name for spec in self.page_specs} - {spec.name for spec in specs}
        if absent:
            raise ValueError(f"the arena lacks the page groups {sorted(absent)}")
        host_bytes = self.config.host_tier_bytes if with_host_tier else 0
        self._arena = Arena(specs, arena_bytes, self._device, host_bytes)
        self._builder = BatchBuilder(self._arena, self._shapes, self._backend, self._model.conv_width)
        if self.pager is not None:
            self.pager.attach(self._arena.grids[EXPERT_GROUP])
        if self._device.type == "cuda" and self._backend.capturable:
            self.graphs, self.mixed = self._decode_graphs(), self._mixed_graphs()

    def _decode_graphs(self) -> DecodeGraphs:
        """The padded decode steps, not captured yet."""
        steps = DecodeSteps(
            self._model.decoder,
            self.arena,
            self._shapes,
            self._decode_backend,
            self._last_tokens,
            self._model.vocab_size,
            self.model_info.max_model_len,
        )
        sizes, bounds = batch_sizes(self.config.max_running), context_bounds(self.model_info.max_model_len)
        return DecodeGraphs(steps, sizes, bounds)

    def _mixed_graphs(self) -> MixedGraphs:
        """The padded steps with chunks, not captured yet."""
        config, longest = self.config, self.model_info.max_model_len
        # Beside passes there are only chunks of a few tokens in steps.
        most = MIXED_TOKENS if self.passes is not None and self.passes.tokens else config.max_step_tokens
        steps = MixedSteps(
            self._model.decoder,
            self.arena,
            self._shapes,
            self._backend,
            self._last_tokens,
            MixedSizes.of(config.max_running, most, longest, self._model.conv_width > 0),
        )
        return MixedGraphs(steps)

    @torch.inference_mode()
    def capture_graphs(
        self, keys: list[tuple[int, int]] | None = None, mixed_keys: list[MixedKey] | None = None
    ) -> None:
        """Captures decode steps and steps with chunks (None: of all sizes) over the attached arena; nothing where
        graphs cannot be."""
        if self.graphs is None or self.mixed is None:
            return
        if self._pool is None:
            self._pool = GraphPool()
        self.mixed.capture(self._pool, mixed_keys)
        self.graphs.capture(self._pool, keys)

    def measure_arena_bytes(self) -> int:
        """Bytes of the device that are left for an arena when the largest steps have the rest."""
        from worker.execution.warm_up import measure_arena_bytes

        return measure_arena_bytes(self)

    @property
    def arena(self) -> Arena:
        """The attached arena; RuntimeError before ``attach_memory``."""
        if self._arena is None:
            raise RuntimeError("attach_memory comes before the first step")
        return self._arena

    @property
    def figures(self) -> Mapping[str, float]:
        """Counters for ``WorkerSnapshot.extra``."""
        figures = {}
        for name, graphs in (("decode", self.graphs), ("mixed", self.mixed)):
            if graphs is not None:
                figures[f"graph.eager_{name}_steps"] = float(graphs.num_eager_steps)
                figures[f"graph.replayed_{name}_steps"] = float(graphs.num_replays)
        return figures

    def run(self, plan: StepPlan) -> StepResult:
        """Carries a step, or a whole pass, out and waits for it."""
        if plan.staged:
            started = self.begin_pass(plan)
            started.advance(None)
            return started.collect()
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step; its sampled tokens stay on the device for the steps launched after it."""
        timer = StepTimer(self._device)
        self._apply(plan)
        self._sampler.start(plan.started)
        if plan.num_rows == 0:
            return self._launched(plan, None, timer)
        if not plan.samples.any():
            self._last_hidden(plan)
            return self._launched(plan, None, timer)
        sampling = self._sampler.prepare(plan, self._uploads)
        if self.graphs is not None and plan.num_decode_rows == plan.num_rows:
            sampled = self._decode(plan, sampling, self.graphs)
        else:
            hidden, slots = self._last_hidden(plan)
            sampled = self._sampler.draw(sampling, self._model.decoder.logits(hidden))
            self._last_tokens.index_copy_(0, slots, sampled.token_ids)
        return self._launched(plan, sampled, timer)

    @torch.inference_mode()
    def begin_pass(self, plan: StepPlan) -> LaunchedPass:
        """Starts a staged plan: its memory commands are carried out and its first layers' experts brought; its layers
        run as :meth:`LaunchedPass.advance` says, steps launched meanwhile in between."""
        assert self._builder is not None
        timer = StepTimer(self._device)
        self._apply(plan)
        if self._pass_uploads is None:
            self._pass_uploads = make_uploads(self._device)  # those of steps are used again by the next step
        uploads = self._pass_uploads
        uploads.begin()
        batch = self._builder.build(plan, self._last_tokens, uploads)
        ring = None if self.pager is None else self.pager.make_ring(plan.ring)
        layers = PrefillPass(self._model.decoder, batch, self.pager, ring, self._pace)
        return LaunchedPass(self, plan, layers, timer)

    @torch.inference_mode()
    def end_pass(self, plan: StepPlan, layers: PrefillPass, timer: StepTimer) -> LaunchedStep:
        """All layers were launched: draws what the plan's rows sample."""
        self._sampler.start(plan.started)
        if self.pager is not None:
            self.pager.end_step()
        if not plan.samples.any():
            return self._launched(plan, None, timer)
        self._uploads.begin()
        sampling = self._sampler.prepare(plan, self._uploads)
        self._uploads.flush()
        logits = self._model.decoder.logits(layers.hidden.index_select(0, layers.batch.sample_index))
        sampled = self._sampler.draw(sampling, logits)
        self._last_tokens.index_copy_(0, layers.batch.sample_slots, sampled.token_ids)
        return self._launched(plan, sampled, timer)

    def _launched(self, plan: StepPlan, sampled: SampledRows | None, timer: StepTimer) -> LaunchedStep:
        corrupt = None if self.pager is None else fetch(self.pager.found)
        found = None if sampled is None else sampled.fetched()
        use = None if self.pager is None or plan.staged else self.pager.use
        leaning = None if use is None else use.count()
        timer.stop()
        return LaunchedStep(plan, found, corrupt, leaning, timer)

    @torch.inference_mode()
    def score(self, plan: StepPlan) -> torch.Tensor:
        """Carries a step out without sampling; answers the logits behind each of its tokens, [tokens, vocabulary]
        float32. All token ids are given."""
        self._apply(plan)
        return self._model.decoder.logits(self._forward(plan)[1].final)

    def _apply(self, plan: StepPlan) -> None:
        self._uploads.begin()
        if self.pager is not None:
            use = self.pager.use
            if use is not None:
                use.begin_step(plan, self._uploads)
            # Bans come first: behind them the step's own moves and kernels may write where experts were.
            self.pager.begin_step(plan.step, plan.commands, plan.num_decode_rows, self._uploads)
            if use is not None:
                use.clear_started()
        self.arena.apply(plan.commands)

    def _forward(self, plan: StepPlan) -> tuple[DeviceBatch, HiddenStates]:
        assert self._builder is not None
        batch = self._builder.build(plan, self._last_tokens, self._uploads)
        hidden = self._model.decoder.forward(batch.token_ids, batch.context)
        if self.pager is not None:
            self.pager.end_step()
        return batch, hidden

    def _last_hidden(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Carries out a step with chunks; of its rows that sample, answers their last tokens' hidden states [rows, H]
        and their slots [rows]."""
        key = None if self.mixed is None else self.mixed.find(plan)
        if self.mixed is None or key is None:
            batch, hidden = self._forward(plan)
            return hidden.final.index_select(0, batch.sample_index), batch.sample_slots
        found = self.mixed.run(plan, key, self._uploads)
        if self.pager is not None:
            self.pager.end_step()
        return found

    def _decode(self, plan: StepPlan, sampling: SamplingStep, graphs: DecodeGraphs) -> SampledRows:
        """A step of single tokens, padded; some of its rows may not sample (a prompt's chunk of one token)."""
        places = None if plan.samples.all() else self._uploads.put(np.flatnonzero(plan.samples))
        logits, slots = graphs.run(plan, self._uploads)
        if self.pager is not None:
            self.pager.end_step()
        if places is not None:
            logits, slots = logits.index_select(0, places), slots.index_select(0, places)
        sampled = self._sampler.draw(sampling, logits)
        self._last_tokens.index_copy_(0, slots, sampled.token_ids)
        return sampled

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for a launched step, and for no later one, and answers what it brought."""
        plan = launched.plan
        seconds = launched.timer.wait()
        token_ids = np.full((plan.num_rows, 1), -1, dtype=np.int64)
        logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if launched.sampled is not None:
            token_ids[plan.samples, 0] = launched.sampled.token_ids.numpy()
            found = launched.sampled.logprobs
            if found:
                logprobs = tuple((found[row],) if row in found else () for row in range(plan.num_rows))
        used = None
        if self.pager is not None:
            self.pager.raise_if_corrupt(launched.corrupt)
            if self.pager.use is not None and launched.leaning is not None:
                used = self.pager.use.used_bits(launched.leaning)
        return StepResult(plan.step, token_ids, plan.samples.astype(np.int64), logprobs, seconds, used)

    def finished_step(self, step: int) -> int:
        """Of a collected ``step``: the last one up to it whose copies beside the steps are done too. Never waits."""
        return self.arena.finished(step)

    def detach_memory(self) -> None:
        """Gives the arena back; another may be attached."""
        self._arena = None
        self._builder = None
        self.graphs = self.mixed = self._pool = None

    def close(self) -> None:
        """Lets arena, weights and paged experts go; no step may follow. Its facts stay."""
        if self._closed:
            return
        self._closed = True
        self.detach_memory()
        self.pager = self._pass_uploads = None
        del self._model, self._backend, self._decode_backend, self._sampler, self._last_tokens, self._uploads
