"""Where a model's tensors come from: a checkpoint read by mmap, or a seed; and whether they are what it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from tqdm import tqdm

from worker.errors import ModelLoadError
from worker.execution.pinned_reader import PinnedReader, SafetensorsFile

_LISTED = 12
"""How many names of a kind an error lists before it only counts."""


class TensorStore(Protocol):
    """Named tensors, or something that can make them."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None if there is none of that name."""
        ...

    def names(self) -> Sequence[str]:
        """Every name; empty where tensors are made on demand."""
        ...

    def read(self, name: str, shape: tuple[int, ...], init: str, device: torch.device) -> torch.Tensor:
        """The tensor, of the given shape."""
        ...

    def close(self) -> None:
        """All was read: lets files and buffers go; a later read opens them again."""
        ...


class CheckpointFiles:
    """The safetensors files of a folder, mapped into memory: bytes are read when a tensor is copied."""

    def __init__(self, folder: Path) -> None:
        """Opens the files; ModelLoadError where there are none or one is broken."""
        self._files: dict[str, Any] = {}
        self._place: dict[str, Path] = {}
        self._plain: dict[Path, SafetensorsFile] = {}
        self._reader: PinnedReader | None = None
        for path in _checkpoint_paths(folder):
            try:
                handle = safe_open(str(path), framework="pt")
            except Exception as error:
                raise ModelLoadError(f"{path}: not a readable safetensors file ({error})") from error
            self._files[str(path)] = handle
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._place[name] = path

    def names(self) -> Sequence[str]:
        """Names of all tensors in all files."""
        return tuple(self._place)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape from the file's header."""
        if name not in self._place:
            return None
        return tuple(self._files[str(self._place[name])].get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...], init: str, device: torch.device) -> torch.Tensor:
        """The tensor: for a GPU there, read through pinned buffers; else on the host, still backed by the file."""
        path = self._place[name]
        if device.type == "cuda":
            if path not in self._plain:
                self._plain[path] = SafetensorsFile(path)
            self._reader = self._reader or PinnedReader(device)
            return self._reader.read(self._plain[path], name)
        tensor: torch.Tensor = self._files[str(path)].get_tensor(name)
        return tensor

    def close(self) -> None:
        """See :class:`TensorStore`."""
        for file in self._plain.values():
            file.close()
        self._plain.clear()
        self._reader = None


def _checkpoint_paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ModelLoadError(f"{folder}: the index names files that are not there: {', '.join(absent)}")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found and any(folder.glob("*.safetensors.planes")):
        raise ModelLoadError(
            f"{folder}: weights are packed; `python -m demo.packing restore {folder}` unpacks them"
        )
    if not found:
        raise ModelLoadError(f"{folder}: holds no *.safetensors file; load=random needs only config.json")
    return found


class RandomTensors:
    """Tensors drawn from a seed, each a function of (seed, name, shape): the same in any order of reading."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def names(self) -> Sequence[str]:
        """None: every name can be had."""
        return ()

    def generator(self, name: str, device: torch.device) -> torch.Generator:
        """What draws a tensor of this name on ``device``; other devices draw other numbers."""
        digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Unknown until asked for."""
        return None

    def read(self, name: str, shape: tuple[int, ...], init: str, device: torch.device) -> torch.Tensor:
        """``normal``: standard deviation fan_in^-0.5. ``ones``, ``zeros``: around them, 0.1 wide. ``log_decay``: log
        of uniform in [1, 16]."""
        generator = self.generator(name, device)
        if init == "log_decay":
            return torch.empty(shape, device=device).uniform_(1.0, 16.0, generator=generator).log_()
        tensor = torch.empty(shape, device=device).normal_(generator=generator)
        if init == "normal":
            return tensor.mul_(shape[-1] ** -0.5)
        return tensor.mul_(0.1).add_(1.0 if init == "ones" else 0.0)

    def close(self) -> None:
        """Nothing is open."""


class WeightSource:
    """What a model is built from: it *takes* tensors by name and says which others it knows and leaves.

    A model is built twice from equal calls: first from a rehearsal, which reads no bytes and collects every problem,
    then for real.
    """

    def __init__(
        self, store: TensorStore, device: torch.device, dtype: torch.dtype, progress: tqdm[Any] | None = None
    ) -> None:
        """``device`` meta makes this a rehearsal."""
        self.device = device
        self.dtype = dtype
        self.num_elements = 0
        self._store = store
        self._progress = progress
        self._known: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    @property
    def rehearsing(self) -> bool:
        """Whether tensors come without bytes."""
        return self.device.type == "meta"

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name; False for random weights, so that the first layout a
        model knows is the one that is made up."""
        return self._store.shape(name) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in the checkpoint, None if there is none of that name."""
        return self._store.shape(name)

    @property
    def is_made_up(self) -> bool:
        """Whether weights are random: no checkpoint says how they are stored."""
        return not self._store.names()

    def drawer(self, name: str) -> torch.Generator | None:
        """What draws numbers for ``name`` on the model's device; None where weights come from a checkpoint."""
        store = self._store
        return store.generator(name, self.device) if isinstance(store, RandomTensors) else None

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        init: str = "normal",
        dtype: torch.dtype | None = None,
        raw: bool = False,
    ) -> torch.Tensor:
        """The tensor on the model's device, cast to ``dtype`` (None: the model's). ``raw`` keeps the stored dtype."""
        self._known.add(name)
        wanted = dtype or self.dtype
        if self.rehearsing:
            self._check(name, shape)
            self.num_elements += prod(shape)
            return torch.empty(shape, dtype=torch.uint8 if raw else wanted, device="meta")
        tensor = self._store.read(name, shape, init, self.device)
        if self._progress is not None:
            self._progress.update(prod(shape))
        # A copy of what lies on the host, always: weights must not keep reading the file.
        return tensor.to(self.device, tensor.dtype if raw else wanted, copy=not tensor.is_cuda)

    def leave(self, *prefixes: str) -> None:
        """Declares tensors that are known and not used, by prefix."""
        self._known.update(name for name in self._store.names() if name.startswith(prefixes))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._store.shape(name)
        if found is None:
            if self._store.names():
                self._missing.append(name)
        elif found != shape:
            self._misshapen.append(f"{name} is {list(found)}, not {list(shape)}")

    def problems(self) -> list[str]:
        """A sentence per kind of problem: missing, misshapen, and tensors that no part of the model declares."""
        extra = sorted(set(self._store.names()) - self._known)
        kinds = (("missing", self._missing), ("misshapen", self._misshapen), ("declared by no part", extra))
        return [f"{len(names)} tensors {kind}: {_listed(names)}" for kind, names in kinds if names]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class LoadProgress:
    """A progress bar over the elements of a checkpoint, on the error stream when that is a terminal."""

    def __init__(self, folder: Path, num_elements: int) -> None:
        self.bar: tqdm[Any] = tqdm(
            total=num_elements,
            desc=f"Loading {folder.name}",
            unit="param",
            unit_scale=True,
            disable=None,
            leave=False,
        )

    def __enter__(self) -> tqdm[Any]:
        return self.bar

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file; ModelLoadError where it is absent or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.parent}: there is no {path.name}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return found
