"""The settings of one worker: a frozen value, made once at start; nothing writes to it later."""

from __future__ import annotations

from dataclasses import dataclass, fields

from worker.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bf16", "fp8_e4m3")
MEMORY_MODES = ("arena", "split")
EXPERT_MODES = ("resident", "paged")
HOST_STORES = ("private", "shared")
LOAD_MODES = ("checkpoint", "random")
LEAST = {"max_running": 1, "max_waiting": 1, "max_step_tokens": 1, "pass_tokens": -1}
"""Of the numbers that may not be 0, or may be less."""
CPU_ARENA_BYTES = 1 << 30
"""The arena of an engine on a CPU whose ``arena_bytes`` is 0."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker may be told.

    Attributes:
        model: folder of the checkpoint.
        served_name: the name it answers to; empty: the folder's name.
        engine: ``native``, ``transformers`` or ``fake``.
        device: ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of weights and activations; ``auto`` is the checkpoint's on a GPU and float32 on a CPU.
        kv_dtype: of attention KV; ``auto`` follows dtype; ``fp8_e4m3`` keeps a scale per token and head beside it.
        max_model_len: most tokens of a request, prompt and output together; 0: what the model was trained for.
        beyond_trained_len: whether ``max_model_len`` may be more than that.
        max_running: most requests in one step.
        max_waiting: most requests in the worker's own queue; above it ``submit`` answers Overloaded.
        max_step_tokens: most tokens computed in one step (prefill is cut into chunks of at most this).
        arena_bytes: bytes of the arena; 0: what is left on the device (CPU: 1 GiB).
        memory_mode: ``arena``, or ``split`` for fixed shares per kind.
        split_ratio: with ``split``, the share of STATE and WINDOW pages together in the arena.
        page_tokens: entries per FULL page; 0 lets the engine choose.
        prefix_cache: whether finished prefixes are kept.
        host_tier_bytes: pinned host memory for evicted pages; 0: none.
        experts: ``resident`` or ``paged``.
        expert_bytes: with ``paged``, bytes for resident experts; 0: what is left over.
        pass_tokens: with ``paged``, most tokens of a prefill pass, which waiting prompts share and which streams
            missing experts beside decode steps; 0: on a GPU what suits its link, on a CPU none; -1: prompts are
            computed in steps. The start prints what it comes to.
        expert_use: with ``paged``, whether each request's end says which experts it used, for placement.
        host_store: with ``paged``, ``private`` host memory, or ``shared`` with the other replicas of this host.
        attention_backend: ``auto`` or a name from the registry.
        deterministic: outputs do not depend on batch, chunks, cache hits or retraction.
        load: ``checkpoint``, or ``random`` for seeded random weights of the folder's config.json.
        seed: of random weights and of requests without a seed.
        num_threads: CPU threads of the computation; 0 leaves torch's choice.
        stall_timeout_s: a step loop with work that stands still for so long is dead.
    """

    model: str
    served_name: str = ""
    engine: str = "native"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int = 0
    beyond_trained_len: bool = False
    max_running: int = 64
    max_waiting: int = 1024
    max_step_tokens: int = 2048
    arena_bytes: int = 0
    memory_mode: str = "arena"
    split_ratio: float = 0.5
    page_tokens: int = 0
    prefix_cache: bool = True
    host_tier_bytes: int = 0
    experts: str = "resident"
    expert_bytes: int = 0
    pass_tokens: int = 0
    expert_use: bool = True
    host_store: str = "private"
    attention_backend: str = "auto"
    deterministic: bool = False
    load: str = "checkpoint"
    seed: int = 0
    num_threads: int = 0
    stall_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        problems = [*self._choice_problems(), *self._range_problems(), *self._idle_problems()]
        if problems:
            raise ConfigError(problems)

    def _choice_problems(self) -> list[str]:
        choices = {
            "dtype": DTYPES,
            "kv_dtype": KV_DTYPES,
            "memory_mode": MEMORY_MODES,
            "experts": EXPERT_MODES,
            "host_store": HOST_STORES,
            "load": LOAD_MODES,
        }
        return [
            f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
            for name, known in choices.items()
            if getattr(self, name) not in known
        ]

    def _range_problems(self) -> list[str]:
        problems = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = LEAST.get(entry.name, 0)
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                problems.append(f"{entry.name}={value} must be at least {least}")
        if not self.stall_timeout_s > 0.0:
            problems.append(f"stall_timeout_s={self.stall_timeout_s} must be above 0")
        if not 0.0 < self.split_ratio < 1.0:
            problems.append(f"split_ratio={self.split_ratio} must lie between 0 and 1")
        if self.page_tokens & (self.page_tokens - 1):
            problems.append(f"page_tokens={self.page_tokens} must be a power of two")
        return problems

    def _idle_problems(self) -> list[str]:
        """Options that would have no effect beside the others."""
        problems = []
        if self.expert_bytes and self.experts != "paged":
            problems.append(f"expert_bytes={self.expert_bytes} needs experts=paged")
        if self.pass_tokens and self.experts != "paged":
            problems.append(f"pass_tokens={self.pass_tokens} needs experts=paged")
        if self.host_store == "shared" and self.experts != "paged":
            problems.append("host_store=shared needs experts=paged")
        if self.host_tier_bytes and not self.prefix_cache:
            problems.append(f"host_tier_bytes={self.host_tier_bytes} needs prefix_cache=true")
        return problems
