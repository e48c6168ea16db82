"""Checkpoints are read by our own reader as the library reads them, and onto a GPU in bounded host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.tiny import tiny_folder
from worker.config import WorkerConfig
from worker.errors import ModelLoadError
from worker.execution.loading import load_model, peak_host_bytes
from worker.execution.pinned_reader import CHUNK_BYTES, PinnedReader, SafetensorsFile
from worker.execution.weights import CheckpointFiles


def write(path: Path) -> dict[str, torch.Tensor]:
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3, 4, 2).to(torch.bfloat16),
        "c": torch.randn(9).to(torch.float8_e4m3fn),
        "d": torch.arange(6, dtype=torch.int32),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, str(path))
    return tensors


def test_places_and_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for name, tensor in write(path).items():
        with SafetensorsFile(path) as file:
            dtype, shape, offset = file.place(name)
            found = torch.empty(tensor.nbytes, dtype=torch.uint8)
            file.read_into(memoryview(found.numpy()), offset)
        assert (dtype, shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(found, tensor.flatten().view(torch.uint8))


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    path.write_bytes(path.read_bytes()[:-3])
    last = torch.empty(24, dtype=torch.uint8)
    with SafetensorsFile(path) as file, pytest.raises(ModelLoadError, match="bytes early"):
        file.read_into(memoryview(last.numpy()), path.stat().st_size - 8)
    path.write_bytes(b"\x10\0\0\0\0\0\0\0nonsense that is no json")
    with pytest.raises(ModelLoadError, match="not a readable"):
        SafetensorsFile(path)


@pytest.mark.gpu
def test_a_tensor_of_several_buffers_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"large": torch.randn(1000, 3001), "small": torch.randn(3).to(torch.bfloat16)}
    save_file(tensors, str(path))
    reader = PinnedReader(torch.device("cuda"), chunk_bytes=1 << 20)
    with SafetensorsFile(path) as file:
        found = {name: reader.read(file, name) for name in tensors for _ in range(2)}
    for name, tensor in tensors.items():
        assert torch.equal(found[name].cpu(), tensor)


@pytest.mark.gpu
def test_loading_takes_two_buffers_of_host_memory(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    size = 3 << 30
    save_file({"large": torch.zeros(size, dtype=torch.uint8)}, str(tmp_path / "model.safetensors"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_host_bytes()
    store = CheckpointFiles(tmp_path)
    found = store.read("large", (size,), "normal", torch.device("cuda"))
    store.close()
    grown = peak_host_bytes() - before
    record_property(
        "figure", f"loading 3.2 GB onto the GPU: host memory grew by {grown / 1e6:.0f} MB at most"
    )
    assert found.shape == (size,)
    assert grown < 4 * CHUNK_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_a_gpu_holds_the_weights_that_a_cpu_reads(family: str) -> None:
    folder = str(tiny_folder(family))
    here = load_model(WorkerConfig(model=folder, device="cpu", dtype="float32"))
    there = load_model(WorkerConfig(model=folder, device="cuda", dtype="float32"))
    token_ids = torch.arange(9)
    assert torch.equal(there.model.decoder.embed(token_ids.cuda()).cpu(), here.model.decoder.embed(token_ids))
    with safe_open(
        str(next(folder_file for folder_file in Path(folder).glob("*.safetensors"))), "pt"
    ) as file:
        assert torch.equal(
            file.get_tensor("model.embed_tokens.weight")[:9], here.model.decoder.embed(token_ids)
        )
