"""Model families by the ``architectures`` entry of config.json."""

from worker.registry import Registry

MODELS = Registry(
    "model architecture",
    "model",
    {
        "Qwen3_5ForCausalLM": "worker.models.qwen3_5:build_dense",
        "Qwen3_5ForConditionalGeneration": "worker.models.qwen3_5:build_dense",
        "Qwen3_5MoeForCausalLM": "worker.models.qwen3_5:build_moe",
        "Qwen3_5MoeForConditionalGeneration": "worker.models.qwen3_5:build_moe",
        "Qwen3MoeForCausalLM": "worker.models.qwen3_moe:build",
        "GptOssForCausalLM": "worker.models.gpt_oss:build",
    },
)
