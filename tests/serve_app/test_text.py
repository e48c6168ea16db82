"""The text layer: incremental decoding, stop strings, templates, tokenizer families, and which folders are models."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from serve_app.text.chat_template import ChatTemplate
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.model_folder import FAKE_MODEL, TEXT_FILES, resolve_model
from serve_app.text.tokenizer import TextModel, describe, load_text_model
from tests.helpers.tokenizers import CHATML_TEMPLATE, byte_tokenizer, write_fake_model
from worker.errors import InvalidRequest, ModelLoadError

BYTES = describe(byte_tokenizer(), {"eos_token": "<|im_end|>"}, CHATML_TEMPLATE)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is completed first; of those, the one that starts first."""
    hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (min(hits)[1], min(hits)[0]) if hits else None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab漢é👩\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab漢é", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 120), max_size=20),
)
@example(text="aab", stops=["ab"], cuts=[])
@example(text="ab漢", stops=["b漢", "漢"], cuts=[1, 2, 3])
def test_any_split_of_the_tokens_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    token_ids = BYTES.encode(text)
    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    decoder = Detokenizer(BYTES, stops)
    out, counted, stopped = "", 0, None
    for start, end in pairwise(edges):
        step = decoder.push(token_ids[start:end])
        out, counted, stopped = out + step.text, counted + step.num_tokens, step.stop
        if stopped is not None:
            break
    hit = first_stop(text, stops)
    if hit is None:
        assert stopped is None
        assert out + decoder.finish().text == text
        assert counted == len(token_ids)
    else:
        assert stopped is not None
        assert out == text[: hit[0]]
        assert counted == len(text[: hit[1]].encode())


@settings(max_examples=200, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=24), st.text(alphabet="aé漢👩", max_size=8).map(str.encode)),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_any_split_of_any_bytes_gives_the_same_text(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = Detokenizer(BYTES)
    out = "".join(decoder.push(list(data[start:end])).text for start, end in pairwise(edges))
    assert out + decoder.finish().text == data.decode(errors="replace")


def test_what_could_become_a_stop_string_is_held_back() -> None:
    decoder = Detokenizer(BYTES, ["stop"])
    assert decoder.push(BYTES.encode("do not s")).text == "do not "
    assert decoder.push(BYTES.encode("to")).text == ""
    assert decoder.push(BYTES.encode("ne")).text == "stone"


def test_half_a_character_at_the_end_shows_as_a_replacement() -> None:
    decoder = Detokenizer(BYTES)
    assert decoder.push([0xE6, 0xBC]).text == ""
    assert decoder.finish().text == "\ufffd"


def test_special_tokens_are_left_out_unless_wanted() -> None:
    ids = BYTES.encode("a<|im_end|>b")
    assert len(ids) == 3
    assert Detokenizer(BYTES).push(ids).text == "ab"
    assert Detokenizer(BYTES, keep_special=BYTES.special_ids).push(ids).text == "a<|im_end|>b"


def test_ids_beyond_the_tokenizer_are_no_text() -> None:
    ids = [ord("a"), len(BYTES.token_bytes) + 7, ord("b")]
    assert Detokenizer(BYTES).push(ids).text == "ab"
    assert Detokenizer(BYTES, keep_special=frozenset(ids[1:2])).push(ids).text == "ab"


def sentence_piece_model() -> TextModel:
    """A byte-fallback vocabulary as Llama's has."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁hi"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "h")][:0], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return describe(tokenizer, {"eos_token": {"content": "</s>"}}, "")


def test_byte_fallback_vocabularies_are_read() -> None:
    model = sentence_piece_model()
    text = "hi 漢 hi"
    decoder = Detokenizer(model)
    pieces = [decoder.push([token_id]).text for token_id in model.encode(text)]
    assert "".join(pieces) == text
    assert model.names == {"eos_token": "</s>"}


def test_other_tokenizer_families_are_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        describe(tokenizer, {}, "")


def test_templates_have_what_checkpoints_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{% if enable_thinking %}think{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": text} for text in ("a<", "b", "c")]
    rendered = template.render(messages, [{"name": "é<'"}], {"enable_thinking": True})
    assert rendered == "<s>a<b" + '[{"name": "é<\'"}]' + "4think"
    with pytest.raises(InvalidRequest, match="no bad"):
        template.render([{"role": "bad", "content": ""}])


def test_templates_run_in_a_sandbox() -> None:
    escape = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequest, match="chat template"):
        escape.render([])
    with pytest.raises(ModelLoadError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_a_client_cannot_replace_the_conversation_by_a_variable() -> None:
    rendered = ChatTemplate("{{ messages[0].content }}", {}).render(
        [{"role": "user", "content": "mine"}], None, {"messages": [{"content": "other"}]}
    )
    assert rendered == "mine"


def test_the_template_is_found_where_checkpoints_keep_it(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load_text_model(tmp_path).chat_template == ""
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_text_model(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_text_model(tmp_path).chat_template == "J"
    own = tmp_path / "own.jinja"
    own.write_text("O")
    assert load_text_model(tmp_path, str(own)).chat_template == "O"
    with pytest.raises(ModelLoadError, match="no such file"):
        load_text_model(tmp_path, "nowhere.jinja")


def test_the_folder_of_the_fake_engine_is_what_its_program_writes(tmp_path: Path) -> None:
    written = write_fake_model(tmp_path)
    assert {file.name for file in FAKE_MODEL.iterdir()} == {file.name for file in written.iterdir()}
    for file in written.iterdir():
        assert file.read_bytes() == (FAKE_MODEL / file.name).read_bytes(), file.name


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), weights=True) == tmp_path
    assert resolve_model("", weights=True) == FAKE_MODEL


def test_gguf_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    for name in (str(tmp_path / "model-Q4.gguf"), str(tmp_path)):
        with pytest.raises(ModelLoadError, match="safetensors"):
            resolve_model(name, weights=True)


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path), weights=True)
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve_model(str(tmp_path / "missing" / "deep"), weights=True)


class FakeHub(ModuleType):
    """Stands in for huggingface_hub."""

    def __init__(self, folder: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """Records the call; fails for names that end in ``missing``."""
        self.calls.append((name, revision, allow_patterns))
        if name.endswith("missing"):
            raise OSError("404: no such repository")
        return str(self.folder)


def test_hub_names_go_through_the_hubs_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("owner/name", "v1", weights=False) == tmp_path
    assert hub.calls == [("owner/name", "v1", list(TEXT_FILES))]
    assert resolve_model("owner/name", weights=True) == tmp_path
    assert hub.calls[1][1] is None
    assert "*.safetensors" in hub.calls[1][2]
    with pytest.raises(ModelLoadError, match=r"'v2'.*no such repository"):
        resolve_model("owner/missing", "v2", weights=True)
    with pytest.raises(ModelLoadError, match=r"'v2' needs a hub name"):
        resolve_model(str(tmp_path), "v2", weights=True)


def test_a_hub_name_without_the_client_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="needs the package huggingface_hub"):
        resolve_model("owner/name", weights=True)
