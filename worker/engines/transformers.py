"""Any local Hugging Face causal language model, one request at a time: the oracle and the baseline.

Slow and plain on purpose. One thread runs a request from its prompt to its end, one token per forward pass, with
the library's own cache; the others wait in a queue.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from memory.api import Headroom
from worker.api import (
    FinishReason,
    GenerateRequest,
    ModelInfo,
    RequestTimeline,
    TokenEvent,
    TokenLogprobs,
    WorkerSnapshot,
)
from worker.config import WorkerConfig
from worker.engines.checks import check_token_ids
from worker.engines.desk import RequestDesk
from worker.engines.plain_sampling import choose_token, token_logprobs
from worker.engines.streams import EventReader
from worker.errors import ConfigError, InvalidRequest, ModelLoadError, PromptTooLong
from worker.model_folder import read_model_info
from worker.models.transformers_window import apply_attention_windows

FALLBACK_MODEL_LEN = 4096
"""Where neither the checkpoint nor the configuration says how long a request may be."""


@dataclass(slots=True)
class _Live:
    """One request in the engine."""

    request: GenerateRequest
    ends: frozenset[int]
    seed: int
    stamps: RequestTimeline
    generated: list[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt_token_ids) + len(self.generated)


class TransformersEngine:
    """The engine around ``AutoModelForCausalLM``; the constructor loads the model.

    Raises ConfigError for options that this engine cannot honour and ModelLoadError for a folder it cannot load.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._device, dtype = _device_and_dtype(config)
        self._lm = _load(config, self._device, dtype)
        self._model = _model_info(config, self._lm, self._device)
        self._seeds = random.Random(config.seed)
        self._desk: RequestDesk[_Live] = RequestDesk(config)
        self._counters = self._desk.counters
        self._running: _Live | None = None
        self._thread = threading.Thread(target=self._loop, name="transformers-engine", daemon=True)
        self._thread.start()

    @property
    def model(self) -> ModelInfo:
        """The loaded model's facts."""
        return self._model

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; see :meth:`worker.api.Engine.submit`."""
        self._validate(request)
        self._desk.submit(request, self._accept)

    def _accept(self, request: GenerateRequest) -> _Live:
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= frozenset(self._model.eos_token_ids)
        return _Live(
            request=request,
            ends=frozenset(token for token in ends if 0 <= token < self._model.vocab_size),
            seed=sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63),
            stamps=RequestTimeline(queued_s=time.time(), num_prompt_tokens=len(request.prompt_token_ids)),
        )

    def _validate(self, request: GenerateRequest) -> None:
        if request.grammar is not None:
            raise InvalidRequest("response_format", "engine=transformers cannot enforce a grammar.")
        needed = len(request.prompt_token_ids) + request.sampling.max_tokens
        if needed > self._model.max_model_len:
            raise PromptTooLong(needed, self._model.max_model_len)
        check_token_ids(request, self._model.vocab_size)

    def stream(self, request_id: str) -> EventReader:
        """The request's events; see :meth:`worker.api.Engine.stream`."""
        return self._desk.stream(request_id, self.abort)

    def abort(self, request_id: str) -> None:
        """Ends a request before its next token; unknown ids are ignored."""
        with self._desk.changed:
            live = self._desk.requests.get(request_id)
            if live is None:
                return
            live.aborted = True
            if live is not self._running:
                self._desk.waiting.remove(live)
                self._finish(live, TokenEvent(request_id, finish_reason=FinishReason.ABORT))

    def snapshot(self) -> WorkerSnapshot:
        """Counters and queue now. There is no arena: headroom is empty."""
        with self._desk.changed:
            queue = self._desk.queue(int(self._running is not None), 1)
            return self._counters.snapshot(queue, Headroom())

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, waits, and aborts what is left after ``timeout_s``."""
        return await self._desk.drain(timeout_s, self.abort)

    def check_health(self) -> None:
        """Raises EngineDead after a death, or when a token takes longer than ``stall_timeout_s``."""
        self._desk.check_health()

    def close(self) -> None:
        """Stops the thread after the token in flight and lets the model go; open streams end with ABORT."""
        with self._desk.changed:
            self._desk.closed = True
            self._desk.changed.notify()
        self._thread.join()
        for request_id in list(self._desk.requests):
            self.abort(request_id)
        self._lm = None

    def _loop(self) -> None:
        try:
            while (live := self._next()) is not None:
                self._run(live)
        except Exception as error:
            self._die(f"{type(error).__name__}: {error}")

    def _next(self) -> _Live | None:
        with self._desk.changed:
            self._running = None
            while not self._desk.waiting and not self._desk.closed:
                self._desk.changed.wait()
            if self._desk.closed:
                return None
            self._running = live = self._desk.waiting.popleft()
            live.stamps = replace(live.stamps, scheduled_s=time.time())
            self._counters.scheduled(live.stamps.scheduled_s - live.stamps.queued_s)
            self._desk.advanced()
            return live

    def _die(self, error: str) -> None:
        with self._desk.changed:
            self._running = None
            self._desk.die(error)

    @torch.inference_mode()
    def _run(self, live: _Live) -> None:
        cache = None
        tokens = list(live.request.prompt_token_ids)
        while True:
            started = time.monotonic()
            if not live.aborted:
                logits, cache = self._forward(tokens if cache is None else tokens[-1:], cache)
                token, logprobs = _draw(live, logits)
            with self._desk.changed:
                if live.aborted or self._desk.closed:
                    self._finish(live, TokenEvent(live.request.request_id, finish_reason=FinishReason.ABORT))
                    return
                event = self._advance(live, token, logprobs)
                self._desk.advanced()
                self._counters.stepped(time.monotonic() - started)
                if event.finish_reason is not None:
                    self._finish(live, event)
                    return
            self._desk.streams.put(event)
            tokens.append(live.generated[-1])

    def _forward(self, token_ids: list[int], cache: Any) -> tuple[torch.Tensor, Any]:
        """The logits [vocab] behind the last of ``token_ids``, and the cache (None where the model keeps none)."""
        inputs = torch.tensor([token_ids], device=self._device)
        output = self._lm(input_ids=inputs, past_key_values=cache, logits_to_keep=1)
        return output.logits[0, -1], output.past_key_values

    def _advance(self, live: _Live, token: int, logprobs: tuple[TokenLogprobs, ...]) -> TokenEvent:
        live.generated.append(token)
        self._counters.generated_tokens += 1
        if len(live.generated) == 1:
            live.stamps = replace(live.stamps, first_token_s=time.time())
        reason = None
        if token in live.ends:
            reason = FinishReason.STOP
        elif len(live.generated) == live.request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        return TokenEvent(
            request_id=live.request.request_id,
            token_ids=(token,),
            num_generated=len(live.generated),
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=token if reason is FinishReason.STOP else None,
            timeline=replace(live.stamps, num_generated_tokens=1) if len(live.generated) == 1 else None,
        )

    def _finish(self, live: _Live, last: TokenEvent) -> None:
        del self._desk.requests[live.request.request_id]
        if live is self._running:
            self._running = None
        if last.finish_reason is FinishReason.ABORT:
            self._counters.num_aborted += 1
        else:
            self._counters.num_finished += 1
        timeline = replace(live.stamps, finished_s=time.time(), num_generated_tokens=len(live.generated))
        self._desk.streams.put(replace(last, num_generated=len(live.generated), timeline=timeline))


def _draw(live: _Live, logits: torch.Tensor) -> tuple[int, tuple[TokenLogprobs, ...]]:
    sampling = live.request.sampling
    prompt = live.request.prompt_token_ids
    token = choose_token(logits, sampling, prompt, live.generated, live.ends, live.seed)
    if sampling.logprobs is None:
        return token, ()
    return token, (token_logprobs(logits, token, sampling.logprobs),)


def _device_and_dtype(config: WorkerConfig) -> tuple[torch.device, torch.dtype | str]:
    """Where to compute and in what: an explicit dtype, the checkpoint's on a GPU ("auto"), float32 on a CPU."""
    problems = []
    if config.experts != "resident":
        problems.append(f"experts={config.experts!r} needs engine=native")
    if config.kv_dtype != "auto":
        problems.append(f"kv_dtype={config.kv_dtype!r} needs engine=native")
    if config.memory_mode != "arena":
        problems.append(f"memory_mode={config.memory_mode!r} needs engine=native")
    if config.attention_backend != "auto":
        problems.append(f"attention_backend={config.attention_backend!r} needs engine=native")
    if config.host_tier_bytes:
        problems.append(f"host_tier_bytes={config.host_tier_bytes} needs engine=native")
    if config.deterministic:
        problems.append("deterministic=true needs engine=native")
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        problems.append(f"device={config.device!r}, but torch finds no GPU")
    if not name.startswith(("cpu", "cuda")):
        problems.append(f"device={config.device!r} must be auto, cpu, cuda or cuda:N")
    if problems:
        raise ConfigError(problems)
    device = torch.device(name)
    if config.dtype != "auto":
        return device, getattr(torch, config.dtype)
    return device, "auto" if device.type == "cuda" else torch.float32


def _load(config: WorkerConfig, device: torch.device, dtype: torch.dtype | str) -> Any:
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} holds no config.json: model= must name a checkpoint's folder.")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    try:
        if config.load == "random":
            shape = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            drawn = shape.dtype if dtype == "auto" else dtype
            with torch.random.fork_rng():
                torch.manual_seed(config.seed)
                model = transformers.AutoModelForCausalLM.from_config(shape, dtype=drawn)  # type: ignore[no-untyped-call]
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"transformers cannot load {folder}: {error}") from error
    apply_attention_windows(model)
    return model.to(device).eval()


def _model_info(config: WorkerConfig, model: Any, device: torch.device) -> ModelInfo:
    dtype = str(model.dtype).removeprefix("torch.")
    info = read_model_info(Path(config.model), config, dtype, str(device))
    return replace(
        info,
        architecture=type(model).__name__,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_model_len=info.max_model_len or FALLBACK_MODEL_LEN,
    )
