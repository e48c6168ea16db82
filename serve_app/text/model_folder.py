"""Turns ``model=`` into a folder on this machine: a local folder as it is, a hub name through the hub's client."""

from __future__ import annotations

import re
from pathlib import Path

from worker.errors import ModelLoadError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""What the text layer needs of a checkpoint."""
WEIGHT_FILES = ("*.safetensors",)


FAKE_MODEL = Path(__file__).parent / "fake_model"
"""A tokenizer of one token per byte, a plain ChatML template and a scripted answer: what engine=fake serves when no
model is named."""


def resolve_model(model: str, revision: str = "", *, weights: bool) -> Path:
    """The folder that holds ``model``.

    Args:
        model: a folder, or ``owner/name`` on the hub; empty: :data:`FAKE_MODEL`.
        revision: branch, tag or commit of a hub name.
        weights: whether the tensors are needed; without them only the small text files are fetched.

    Raises:
        ModelLoadError: no such folder or hub name, a revision of a folder, the hub cannot be reached, or the file is
            of a kind that is not read (GGUF).
    """
    if not model:
        return FAKE_MODEL
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        raise ModelLoadError(_gguf_sentence(path.name))
    if path.is_dir():
        if revision:
            raise ModelLoadError(f"revision={revision!r} needs a hub name in model=; {model!r} is a folder.")
        return _checked_folder(path)
    if path.exists():
        raise ModelLoadError(
            f"model={model!r} is a file; name the folder that holds config.json and tensors."
        )
    if not _HUB_NAME.fullmatch(model):
        raise ModelLoadError(f"model={model!r}: there is no such folder, and it is no hub name (owner/name).")
    return _checked_folder(_fetch(model, revision, weights))


def _fetch(name: str, revision: str, weights: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelLoadError(
            f"model={name!r} is no folder here, and fetching it needs the package huggingface_hub."
        ) from error
    patterns = [*TEXT_FILES, *WEIGHT_FILES] if weights else list(TEXT_FILES)
    try:
        # The client draws a progress bar on stderr by itself.
        folder = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns)
    except Exception as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelLoadError(f"model={name!r}{at} could not be fetched from the hub: {error}") from error
    return Path(folder)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        gguf = sorted(entry.name for entry in folder.glob("*.gguf"))
        if gguf:
            raise ModelLoadError(_gguf_sentence(gguf[0]))
        raise ModelLoadError(f"The folder {str(folder)!r} has no config.json: it is not a checkpoint.")
    return folder


def _gguf_sentence(name: str) -> str:
    return (
        f"{name!r} is a GGUF file, which is not read here; use the model's safetensors checkpoint "
        "(a folder with config.json, tokenizer.json and *.safetensors)."
    )
