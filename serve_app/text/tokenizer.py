"""A checkpoint's tokenizer: text to ids, an id to its bytes, and what the folder says about special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.errors import ModelLoadError


@dataclass(frozen=True)
class TextModel:
    """What the text layer knows of a model.

    Attributes:
        tokenizer: the loaded ``tokenizer.json``.
        token_bytes: the bytes of every id, in order; empty for special tokens and for holes in the vocabulary.
        special_ids: ids of tokens that are marks and not text.
        names: special tokens by their role (``bos_token``, ``eos_token`` ...), as chat templates expect them.
        chat_template: Jinja source, or empty.
        spelled: by each special token's text, that text in ordinary tokens.
    """

    tokenizer: Tokenizer
    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    names: dict[str, str] = field(default_factory=dict)
    chat_template: str = ""
    spelled: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids."""
        # As a batch of one: that lets go of Python's lock, so that other threads run on beside a long text.
        [found] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def piece(self, token_id: int) -> str:
        """The token's name for people: its text, or the mark itself for special tokens."""
        if token_id in self.special_ids or not self.bytes_of(token_id):
            return self.tokenizer.id_to_token(token_id) or ""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes an id stands for; empty for special tokens and unknown ids."""
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""

    def bytes_of_all(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that a model's tokens stand for, one after the other."""
        table = self.token_bytes
        try:
            return b"".join([table[token_id] for token_id in token_ids])
        except IndexError:  # an id that the model has and its tokenizer does not
            return b"".join(map(self.bytes_of, token_ids))


def load_text_model(folder: Path, chat_template_file: str = "") -> TextModel:
    """Reads tokenizer and template of a checkpoint; raises ModelLoadError naming what is missing or not understood."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder.name!r} has no tokenizer.json; save the model's fast tokenizer into the folder "
            "(tokenizer.save_pretrained)."
        )
    tokenizer = Tokenizer.from_file(str(path))
    settings = _read_json(folder / "tokenizer_config.json")
    template = _own_template(chat_template_file) or _folder_template(folder, settings)
    return describe(tokenizer, settings, template)


def describe(tokenizer: Tokenizer, settings: dict[str, Any], template: str) -> TextModel:
    """A :class:`TextModel` of a loaded tokenizer and the contents of ``tokenizer_config.json``."""
    special = frozenset(
        token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    names = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token")
        and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    token_bytes = _token_bytes(tokenizer, special)
    spelled = _spelled(tokenizer, special, token_bytes)
    return TextModel(tokenizer, token_bytes, special, names, template, spelled)


def _spelled(
    tokenizer: Tokenizer, special: frozenset[int], token_bytes: Sequence[bytes]
) -> dict[str, tuple[int, ...]]:
    found = {}
    tokenizer.encode_special_tokens = True  # as text, for the moment
    for token_id in special:
        text = tokenizer.id_to_token(token_id) or ""
        ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        # Some tokenizers put a blank in front of every text.
        blank = bool(ids) and token_bytes[ids[0]] == b" " and not text.startswith(" ")
        found[text] = ids[1:] if blank else ids
    tokenizer.encode_special_tokens = False
    return found


def _token_bytes(tokenizer: Tokenizer, special: frozenset[int]) -> list[bytes]:
    to_bytes = _byte_reader(json.loads(tokenizer.to_str()).get("decoder"))
    added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in special:
            continue
        table[token_id] = added[token_id].encode() if token_id in added else to_bytes(token)
    return table


def _byte_reader(decoder: Any) -> Any:
    """How a vocabulary entry becomes bytes: by the byte-level alphabet, or as text with byte-fallback entries."""
    kinds = {step["type"] for step in _decoder_steps(decoder)}
    if "ByteLevel" in kinds:
        alphabet = {character: byte for byte, character in enumerate(byte_alphabet())}

        def byte_level(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()

        return byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:

        def sentence_piece(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()

        return sentence_piece
    raise ModelLoadError(
        f"tokenizer.json has a decoder of kind {', '.join(sorted(kinds)) or 'none'}; ByteLevel, ByteFallback and "
        "Metaspace are understood."
    )


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for entry in decoder["decoders"] for step in _decoder_steps(entry)]
    return [decoder]


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (as in GPT-2: printable Latin-1
    bytes stand for themselves, the others for the characters from U+0100 on, in order)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + extra))
            extra += 1
    return characters


def _own_template(file: str) -> str:
    if not file:
        return ""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelLoadError(f"chat_template={file!r}: there is no such file.")
    return path.read_text(encoding="utf-8")


def _folder_template(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = (
        settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or ""
    )
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default") or next(iter(named.values()), ""))
    return str(template)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path.name} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
