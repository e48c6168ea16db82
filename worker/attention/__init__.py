"""Attention backends by name."""

from worker.registry import Registry

BACKENDS = Registry(
    "attention backend",
    "attention_backend",
    {
        "flash": "worker.attention.flash:FlashAttention",
        "triton": "worker.attention.triton_backend:TritonAttention",
        "triton_few": "worker.attention.triton_backend:TritonFewRowsAttention",
        "torch": "worker.attention.torch_backend:TorchAttention",
        "rowwise": "worker.attention.rowwise:RowwiseAttention",
    },
)
