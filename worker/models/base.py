"""What every model family gives: an asserted configuration, page specs, and a decoder built from a weight source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.pointwise import GatedActivation
from memory.api import LayerRows, PageKind, PageSpec, Row
from worker.attention.base import AttentionShape
from worker.errors import ModelLoadError
from worker.execution.weights import WeightSource
from worker.layers.decoder import Decoder
from worker.layers.mlp import RoutedExperts
from worker.quantization.base import ExpertShape, Format

_ABSENT = object()


class ModelConfig:
    """A family's view of config.json: what it reads it checks, and a surprise is a sentence that names the key."""

    def __init__(self, raw: Mapping[str, Any], family: str) -> None:
        self._raw = raw
        self._family = family

    def part(self, key: str) -> ModelConfig:
        """A nested object, or this one where the key is absent (text-only configurations are flat)."""
        return ModelConfig(self._raw[key], self._family) if key in self._raw else self

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._raw.get(key) is not None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """A positive integer under the first key that is there."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(key, value, "a positive integer")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """A number under the first key that is there."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def expect(self, key: str, *allowed: object, default: object = _ABSENT) -> Any:
        """One of the values that the family implements; ``default`` where the key is absent or null."""
        value = self._raw.get(key)
        if value is None:
            value = default if default is not _ABSENT else None
        if value not in allowed:
            raise self._error(key, value, " or ".join(repr(a) for a in allowed))
        return value

    def sequence(
        self, key: str, length: int, allowed: Sequence[object], default: Sequence[object]
    ) -> list[Any]:
        """A list of ``length`` entries, each one of ``allowed``."""
        value = self._raw.get(key)
        value = list(default if value is None else value)
        if len(value) != length or any(entry not in allowed for entry in value):
            raise self._error(key, value, f"{length} entries out of {', '.join(map(repr, allowed))}")
        return value

    def windows(self, key: str, length: int) -> list[int | None]:
        """A list with a window in tokens, or null, per layer; all null where the key is absent."""
        value = self._raw.get(key)
        found = [None] * length if value is None else list(value)
        whole = all(entry is None or (isinstance(entry, int) and entry > 0) for entry in found)
        if len(found) != length or not whole:
            raise self._error(key, value, f"a window in tokens or null for each of {length} layers")
        return found

    def rope(self, *, default_theta: float) -> Mapping[str, Any]:
        """Rotary parameters with rope_type and rope_theta, from ``rope_parameters`` or the older ``rope_scaling``."""
        rope = dict(self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", self._raw.get("rope_theta", default_theta))
        if "partial_rotary_factor" in self._raw:
            rope.setdefault("partial_rotary_factor", self._raw["partial_rotary_factor"])
        return rope

    def refuse(self, key: str, value: object, wanted: str) -> ModelLoadError:
        """The error for a value that the family does not implement."""
        return self._error(key, value, wanted)

    def _first(self, keys: Sequence[str], default: object) -> tuple[str, Any]:
        for key in keys:
            if self._raw.get(key) is not None:
                return key, self._raw[key]
        return keys[0], default

    def _error(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"config.json: {key}={value!r}, but {self._family} is implemented for {wanted}")


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one layer as a checkpoint has them.

    Attributes:
        layer: the model layer.
        num_experts, experts_per_token: how many there are, and how many a token takes.
        shape: of each expert.
        format: the weight format; ``read(expert)`` answers the tensors that ``format.expert_tensors`` names.
        activation: what stands between the projections.
    """

    layer: int
    num_experts: int
    experts_per_token: int
    shape: ExpertShape
    format: Format
    read: Callable[[int], Mapping[str, torch.Tensor]]
    activation: GatedActivation


class ExpertFactory(Protocol):
    """Decides where experts live: resident, or paged."""

    def __call__(self, experts: ExpertLayer, source: WeightSource) -> RoutedExperts:
        """Reads every expert of the layer, once. In a rehearsal it reads too and keeps nothing."""
        ...


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a model is told beside its configuration: names of KV and activation dtypes, where experts live, the
    checkpoint's weight format, and whether results may depend on the batch (``deterministic``: not)."""

    kv_dtype: str
    dtype: str
    experts: ExpertFactory
    format: Format
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of pages that a model asks for, before page sizes are chosen."""

    name: str
    kind: PageKind
    layers: tuple[LayerRows, ...]
    attention: AttentionShape | None = None

    def page_spec(self, page_tokens: int) -> PageSpec:
        """The spec with ``page_tokens`` entries for FULL pages. A WINDOW page holds at most a quarter of the window,
        so that little more than the window is kept."""
        window = self.attention.window if self.attention is not None else None
        if self.kind is PageKind.STATE:
            page_tokens = 1
        elif window is not None:
            page_tokens = min(page_tokens, max(8, 1 << (window // 4).bit_length() - 1 if window >= 4 else 8))
        return PageSpec(self.name, self.kind, page_tokens, self.layers, window)


@dataclass(frozen=True, slots=True)
class Model:
    """A built model: the decoder and what the layers above must know about it."""

    decoder: Decoder
    groups: tuple[GroupSpec, ...]
    vocab_size: int
    max_model_len: int
    num_layers: int
    num_experts: int = 0
    experts_per_token: int = 0
    conv_width: int = 0


class ModelFamily(Protocol):
    """What the registry holds: builds a model of one family; called for a rehearsal and for real."""

    def __call__(self, raw: Mapping[str, Any], source: WeightSource, options: BuildOptions) -> Model:
        """Raises ModelLoadError where the configuration asks for something else."""
        ...


class GroupCollector:
    """Gathers the layers of each attention group, and the states, while a model is built."""

    def __init__(self, kv_dtype: str) -> None:
        self._kv_dtype = kv_dtype
        self._attention: dict[str, tuple[AttentionShape, list[LayerRows]]] = {}
        self._states: list[LayerRows] = []

    def attention(self, layer: int, shape: AttentionShape) -> str:
        """Enters a softmax layer; answers its group."""
        name = "full" if shape.window is None else f"window{shape.window}"
        held, layers = self._attention.setdefault(name, (shape, []))
        if held != shape:
            raise ModelLoadError(f"layers of group {name!r} differ in shape: {held} and {shape}")
        sizes = (shape.num_kv_heads, shape.head_dim)
        rows = [Row("k", sizes, self._kv_dtype), Row("v", sizes, self._kv_dtype)]
        if self._kv_dtype == "float8_e4m3fn":
            rows += [Row(name, (shape.num_kv_heads,), "float32") for name in ("k_scale", "v_scale")]
        layers.append(LayerRows(layer, tuple(rows)))
        return name

    def state(self, rows: LayerRows) -> None:
        """Enters a layer with a recurrent state."""
        self._states.append(rows)

    def groups(self) -> tuple[GroupSpec, ...]:
        """All groups: token-paged ones in order of first use, then the state."""
        found = [
            GroupSpec(name, PageKind.FULL if shape.window is None else PageKind.WINDOW, tuple(layers), shape)
            for name, (shape, layers) in self._attention.items()
        ]
        if self._states:
            found.append(GroupSpec("state", PageKind.STATE, tuple(self._states)))
        return tuple(found)
