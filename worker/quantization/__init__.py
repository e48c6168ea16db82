"""Weight formats by name."""

from worker.registry import Registry

FORMATS = Registry("weight format", "format", {})
