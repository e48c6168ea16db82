"""Model families by the ``architectures`` entry of config.json."""

from worker.registry import Registry

MODELS = Registry("model architecture", "model", {})
