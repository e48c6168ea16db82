"""Engines by name: each is a callable ``(WorkerConfig) -> Engine``."""

from worker.registry import Registry

ENGINES = Registry(
    "engine",
    "engine",
    {
        "native": "worker.engines.native:NativeEngine",
        "transformers": "worker.engines.transformers:TransformersEngine",
        "fake": "worker.engines.fake:FakeEngine",
    },
)
