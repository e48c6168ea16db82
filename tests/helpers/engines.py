"""The engines that the contract test runs on, each with a way to make it and to make it fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

from tests.helpers.tiny import tiny_folder
from worker.api import Engine
from worker.config import WorkerConfig
from worker.engines.fake import FakeEngine
from worker.engines.fake_script import FakeScript

FAKE_SCRIPT = FakeScript(
    output="random",
    vocab_size=288,
    eos_token_ids=(4, 2),
    bytes_per_token=64,
    max_model_len=4096,
    tokens_per_s=1000.0,
)


@dataclass(frozen=True)
class EngineKind:
    """``make`` builds an engine from configuration overrides; ``make_failing(n)`` one whose loop raises once it has
    generated n tokens in all."""

    name: str
    make: Callable[..., Engine]
    make_failing: Callable[[int], Engine]

    def opened(self, **options: Any) -> AbstractContextManager[Engine]:
        """A made engine that is closed at the end of a ``with`` block."""
        return closing(self.make(**options))


def _fake(**options: Any) -> Engine:
    return FakeEngine(WorkerConfig(model="fake", arena_bytes=1 << 24, **options), FAKE_SCRIPT)


def _failing_fake(num_tokens: int) -> Engine:
    script = FakeScript(output="random", vocab_size=288, die_after_tokens=num_tokens)
    return FakeEngine(WorkerConfig(model="fake"), script)


def _transformers(**options: Any) -> Engine:
    from worker.engines.transformers import TransformersEngine

    return TransformersEngine(WorkerConfig(model=str(tiny_folder()), device="cpu", **options))


def _failing_transformers(num_tokens: int) -> Engine:
    engine: Any = _transformers()
    forward, calls = engine._lm.forward, []

    def fail_later(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > num_tokens:
            raise RuntimeError("planted failure")
        return forward(*arguments, **named)

    engine._lm.forward = fail_later
    return engine


def _native(**options: Any) -> Engine:
    from worker.engines.native import NativeEngine

    config = WorkerConfig(
        model=str(tiny_folder()), device="cpu", arena_bytes=1 << 26, page_tokens=16, **options
    )
    return NativeEngine(config, audit=True)


def _failing_native(num_tokens: int) -> Engine:
    engine: Any = _native()
    launch, launched = engine._runner.launch, []

    def fail_later(plan: Any) -> Any:
        launched.append(int(plan.samples.sum()))
        if sum(launched) > num_tokens:
            raise RuntimeError("planted failure")
        return launch(plan)

    engine._runner.launch = fail_later
    return engine


def _native_on_fake_runner(num_tokens: int = 0, **options: Any) -> Engine:
    from tests.helpers.fake_runner import FailingRunner, FakeRunner, full_spec, state_spec, window_spec
    from worker.engines.native import NativeEngine

    specs = (full_spec(), window_spec(40), state_spec())
    config = WorkerConfig(model="fake", arena_bytes=1 << 22, max_model_len=8192, **options)
    if num_tokens:
        return NativeEngine(config, lambda _: FailingRunner(specs, num_tokens))
    return NativeEngine(config, lambda _: FakeRunner(specs), audit=True)


ENGINES = (
    EngineKind("fake", _fake, _failing_fake),
    EngineKind("transformers", _transformers, _failing_transformers),
    EngineKind("native", _native, _failing_native),
    EngineKind("native on a fake runner", _native_on_fake_runner, _native_on_fake_runner),
)
