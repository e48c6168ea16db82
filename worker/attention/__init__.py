"""Attention backends by name."""

from worker.registry import Registry

BACKENDS = Registry(
    "attention backend",
    "attention_backend",
    {
        "torch": "worker.attention.torch_backend:TorchAttention",
        "rowwise": "worker.attention.rowwise:RowwiseAttention",
    },
)
