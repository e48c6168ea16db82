"""Says what the demonstration model is: its sizes, its tensors' names and shapes, and its configuration file."""

from __future__ import annotations

import math
from dataclasses import dataclass

LINEAR = "linear_attention"
WINDOW = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3.5-MoE text model whose softmax layers may look through a window.

    ``kinds`` names what each layer mixes tokens with; one multi-token-prediction layer (full attention, its own
    experts) follows the last. All counts are heads, experts or elements; ``window`` counts tokens, itself included.
    """

    vocab_size: int = 4096
    hidden: int = 256
    kinds: tuple[str, ...] = (LINEAR, LINEAR, WINDOW, FULL) * 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 32
    rope_theta: float = 1e5
    window: int = 128
    linear_k_heads: int = 2
    linear_v_heads: int = 4
    linear_dim: int = 64
    conv_kernel: int = 4
    experts: int = 32
    experts_per_token: int = 4
    expert_width: int = 32
    shared_width: int = 64
    eps: float = 1e-6
    max_positions: int = 8192

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def conv_dim(self) -> int:
        return (2 * self.linear_k_heads + self.linear_v_heads) * self.linear_dim

    @property
    def value_dim(self) -> int:
        return self.linear_v_heads * self.linear_dim


@dataclass(frozen=True)
class Leaf:
    """One trained tensor: the same weight of several layers, stacked on the first axis (``layers`` empty: one).

    Layer number ``shape.num_layers`` stands for the multi-token-prediction layer. ``std`` is the standard deviation
    of the initial values (0: zeros); ``matrix`` says that its last two axes are trained as an orthogonalised update.
    """

    name: str
    layers: tuple[int, ...]
    dims: tuple[int, ...]
    std: float
    matrix: bool

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (len(self.layers), *self.dims) if self.layers else self.dims

    def tensor_names(self, num_layers: int) -> list[str]:
        """Names in a checkpoint file, in the order of the first axis."""
        if not self.layers:
            return [self.name]
        prefixes = ["mtp.layers.0" if n == num_layers else f"model.layers.{n}" for n in self.layers]
        return [f"{prefix}.{self.name}" for prefix in prefixes]


def leaves(shape: Shape) -> list[Leaf]:
    """Every trained tensor of the model, the multi-token-prediction layer included."""
    h, every = shape.hidden, tuple(range(shape.num_layers + 1))
    linear = tuple(n for n, kind in enumerate(shape.kinds) if kind == LINEAR)
    softmax = (*(n for n, kind in enumerate(shape.kinds) if kind != LINEAR), shape.num_layers)
    into, out = 0.6 / math.sqrt(h), 0.2 / math.sqrt(h)
    q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        Leaf("model.embed_tokens.weight", (), (shape.vocab_size, h), 0.02, False),
        Leaf("model.norm.weight", (), (h,), 0.0, False),
        Leaf("mtp.fc.weight", (), (h, 2 * h), into, True),
        Leaf("mtp.norm.weight", (), (h,), 0.0, False),
        Leaf("mtp.pre_fc_norm_embedding.weight", (), (h,), 0.0, False),
        Leaf("mtp.pre_fc_norm_hidden.weight", (), (h,), 0.0, False),
        Leaf("input_layernorm.weight", every, (h,), 0.0, False),
        Leaf("post_attention_layernorm.weight", every, (h,), 0.0, False),
        Leaf("linear_attn.in_proj_qkv.weight", linear, (shape.conv_dim, h), into, True),
        Leaf("linear_attn.in_proj_z.weight", linear, (shape.value_dim, h), into, True),
        Leaf("linear_attn.in_proj_b.weight", linear, (shape.linear_v_heads, h), out, False),
        Leaf("linear_attn.in_proj_a.weight", linear, (shape.linear_v_heads, h), out, False),
        Leaf("linear_attn.conv1d.weight", linear, (shape.conv_dim, 1, shape.conv_kernel), 0.3, False),
        Leaf("linear_attn.A_log", linear, (shape.linear_v_heads,), 0.0, False),
        Leaf("linear_attn.dt_bias", linear, (shape.linear_v_heads,), 0.0, False),
        Leaf("linear_attn.norm.weight", linear, (shape.linear_dim,), 0.0, False),
        Leaf("linear_attn.out_proj.weight", linear, (h, shape.value_dim), out, True),
        Leaf("self_attn.q_proj.weight", softmax, (2 * q_dim, h), into, True),
        Leaf("self_attn.k_proj.weight", softmax, (kv_dim, h), into, True),
        Leaf("self_attn.v_proj.weight", softmax, (kv_dim, h), into, True),
        Leaf("self_attn.o_proj.weight", softmax, (h, q_dim), out, True),
        Leaf("self_attn.q_norm.weight", softmax, (shape.head_dim,), 0.0, False),
        Leaf("self_attn.k_norm.weight", softmax, (shape.head_dim,), 0.0, False),
        Leaf("mlp.gate.weight", every, (shape.experts, h), out, False),
        Leaf("mlp.experts.gate_up_proj", every, (shape.experts, 2 * shape.expert_width, h), into, True),
        Leaf("mlp.experts.down_proj", every, (shape.experts, h, shape.expert_width), out, True),
        Leaf("mlp.shared_expert.gate_proj.weight", every, (shape.shared_width, h), into, True),
        Leaf("mlp.shared_expert.up_proj.weight", every, (shape.shared_width, h), into, True),
        Leaf("mlp.shared_expert.down_proj.weight", every, (h, shape.shared_width), out, True),
        Leaf("mlp.shared_expert_gate.weight", every, (1, h), 0.0, False),
    ]


def num_parameters(shape: Shape) -> int:
    return sum(math.prod(leaf.full_dims) for leaf in leaves(shape))


def model_config(shape: Shape, special_ids: dict[str, int]) -> dict[str, object]:
    """Contents of ``config.json``.

    Windowed layers are written as full attention beside ``attention_window_sizes``, because the stock class knows no
    windowed layer; ``worker.models.transformers_window`` applies the key. ``special_ids`` needs pad, bos and im_end.
    """
    third = shape.rotary_dim // 2 // 3
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "layer_types": [FULL if kind == WINDOW else kind for kind in shape.kinds],
        "attention_window_sizes": [shape.window if kind == WINDOW else None for kind in shape.kinds],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [shape.rotary_dim // 2 - 2 * third, third, third],
        },
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.linear_dim,
        "linear_value_head_dim": shape.linear_dim,
        "linear_num_key_heads": shape.linear_k_heads,
        "linear_num_value_heads": shape.linear_v_heads,
        "mamba_ssm_dtype": "float32",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "num_mtp_layers": 1,
        "mtp_layer_types": [FULL],
        "mtp_use_dedicated_embeddings": False,
        "use_cache": True,
        "pad_token_id": special_ids["pad"],
        "bos_token_id": special_ids["bos"],
        "eos_token_id": special_ids["im_end"],
    }
