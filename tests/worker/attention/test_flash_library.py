"""Where a FlashAttention library is looked for, and what is said where it does not serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from worker.attention import flash, flash_library
from worker.attention.base import AttentionShape
from worker.attention.choice import choose_backend
from worker.attention.flash_library import FlashLibrary, candidates, find_library, load
from worker.config import WorkerConfig
from worker.errors import ConfigError

GPU = torch.device("cuda:0")
SHAPE = AttentionShape(8, 2, 64, 0.125)


@dataclass
class Argument:
    name: str
    type: str
    default_value: object = None

    def has_default_value(self) -> bool:
        return self.default_value is not None


@dataclass
class Operator:
    """Stands for a library's operator: its arguments, and what it was called with."""

    arguments: list[Argument]
    calls: list[tuple[object, ...]] = field(default_factory=list)

    @property
    def default(self) -> SimpleNamespace:
        return SimpleNamespace(_schema=SimpleNamespace(arguments=self.arguments))

    def __call__(self, *values: object) -> None:
        self.calls.append(values)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that cannot be imported without harm, first on the path."""
    monkeypatch.delenv(flash_library.VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("vllm", "vllm_flash_attn"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')")
    inner = tmp_path / "vllm" / "vllm_flash_attn"
    inner.mkdir()
    (inner / "_vllm_fa3_C.abi3.so").touch()
    (tmp_path / "vllm_flash_attn" / "_vllm_fa2_C.abi3.so").touch()
    return tmp_path


def test_libraries_are_found_without_importing_what_they_came_with(installed: Path) -> None:
    found = [(version, str(path.relative_to(installed))) for version, path in candidates()]
    assert found == [
        (3, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),
        (2, "vllm_flash_attn/_vllm_fa2_C.abi3.so"),
    ]


def test_a_named_file_comes_before_all_others(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash_library.VARIABLE, "/some/_vllm_fa2_C.so")
    assert list(candidates()) == [(2, Path("/some/_vllm_fa2_C.so"))]


def test_what_does_not_load_says_so(installed: Path) -> None:
    assert load(3, installed / "absent.so") == f"{installed / 'absent.so'} is not there"
    assert "does not load" in str(load(3, installed / "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"))
    assert find_library(torch.device("cpu")) == "FlashAttention runs on a GPU, not on cpu"


def test_arguments_go_by_name_and_others_do_nothing() -> None:
    operator = Operator(
        [
            Argument("q", "Tensor"),
            Argument("new", "Optional[Tensor]"),
            Argument("sm_margin", "int"),
            Argument("cp_world_size", "int"),
            Argument("softcap", "float"),
            Argument("is_causal", "bool"),
            Argument("given", "int", 5),
        ]
    )
    library = FlashLibrary(3, Path("x.so"), operator, None)
    library.call({"q": "query", "is_causal": True, "unknown": 1})
    assert operator.calls == [("query", None, 0, 1, 0.0, True, 5)]
    assert library.takes("softcap")
    assert not library.takes("s_aux")
    assert library.schedule({}) is None


@pytest.mark.parametrize(
    ("shape", "version", "words"),
    [
        (SHAPE, 3, None),
        (AttentionShape(8, 2, 64, 0.125, kv_dtype="float8_e4m3fn"), 3, "scale per token and head"),
        (AttentionShape(8, 2, 64, 0.125, kv_dtype="float32"), 3, "not in float32"),
        (AttentionShape(8, 2, 320, 0.125), 3, "head_dim=320"),
        (AttentionShape(8, 2, 64, 0.125, has_sinks=True), 3, "knows no attention sinks"),
        (AttentionShape(8, 2, 64, 0.125, window=40), 2, "window of 40"),
        (AttentionShape(8, 2, 64, 0.125, window=128), 2, None),
    ],
)
def test_an_unusable_library_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, shape: AttentionShape, version: int, words: str | None
) -> None:
    library = FlashLibrary(version, Path("lib.so"), Operator([Argument("q", "Tensor")]), None)
    monkeypatch.setattr(flash, "find_library", lambda device: library)
    reason = flash.FlashAttention().unusable_reason(shape, GPU)
    assert reason is None if words is None else words in str(reason)


def test_the_choice_falls_back_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash, "find_library", lambda device: "no library is installed")
    with caplog.at_level("INFO"):
        assert choose_backend(WorkerConfig(model="any"), [SHAPE], GPU).name == "triton"
    assert "attention_backend=triton; flash is not usable: no library is installed" in caplog.text
    with pytest.raises(ConfigError, match="flash is not usable: no library"):
        choose_backend(WorkerConfig(model="any", attention_backend="flash"), [SHAPE], GPU)
    odd = AttentionShape(8, 2, 48, 0.125)
    assert choose_backend(WorkerConfig(model="any"), [odd], GPU).name == "torch"
    with pytest.raises(ConfigError, match="no such attention backend"):
        choose_backend(WorkerConfig(model="any", attention_backend="other"), [SHAPE], GPU)
