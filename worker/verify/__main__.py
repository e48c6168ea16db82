"""``python -m worker.verify MODEL``: proves on this machine that paged experts give what resident ones do.

The given tokens are scored step by step with all experts dequantised and resident, and again with experts paged into
three numbers of places, one of them so few that places change owners all the time. A model that is too large for this
is compared with a reference that holds one layer at a time (``--reference streamed``). Exit code 0: all agree; 1:
some case differs, its layer and expert are named; 2: the model cannot be loaded, or a prompt not be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from worker.config import LOAD_MODES, WorkerConfig
from worker.errors import ConfigError, HeadroomError
from worker.model_folder import read_model_info
from worker.verify.compare import CASES, Verifier
from worker.verify.fitting import KINDS, choose_reference

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROMPTS, _TOKENS = 4, 48
_ARENA_BYTES = 1 << 28


def made_up_prompts(vocab_size: int, num: int = _PROMPTS, tokens: int = _TOKENS) -> list[list[int]]:
    """Random ids, the same at every call: text is better, but needs a tokenizer."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, tokens).tolist() for _ in range(num)]


def read_prompts(path: Path, folder: Path) -> list[list[int]]:
    """One prompt a line: a JSON list of token ids, or text for the folder's tokenizer.json. ConfigError for a file
    that gives none of at least three tokens, and for a line that is no prompt for this model."""
    vocab_size = read_model_info(folder, WorkerConfig(model=str(folder))).vocab_size
    found = []
    tokenizer = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("["):
            found.append(_read_ids(line, vocab_size, f"--prompts {path}, line {number}"))
        elif line.strip():
            if tokenizer is None:
                tokenizer = _read_tokenizer(folder)
            found.append(list(tokenizer.encode(line).ids))
    found = [tokens for tokens in found if len(tokens) >= 3]
    if not found:
        raise ConfigError([f"--prompts {path}: holds no prompt of at least three tokens"])
    return found


def _read_ids(line: str, vocab_size: int, where: str) -> list[int]:
    try:
        ids = json.loads(line)
    except ValueError as error:
        raise ConfigError([f"{where}: not JSON ({error})"]) from error
    if not all(type(token) is int for token in ids):
        raise ConfigError([f"{where}: not a list of token ids"])
    strange = [token for token in ids if not 0 <= token < vocab_size]
    if strange:
        raise ConfigError([f"{where}: token id {strange[0]} is not in the vocabulary of {vocab_size}"])
    return list(ids)


def _read_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError([f"--prompts: {path} is not there, and texts need it; give token ids"])
    return Tokenizer.from_file(str(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m worker.verify", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, help="a file: a JSON list of token ids or a text per line")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--reference",
        choices=KINDS,
        default="auto",
        help="resident, or streamed: one layer at a time over all steps (auto: resident where it fits)",
    )
    parser.add_argument(
        "--load",
        choices=LOAD_MODES,
        default="checkpoint",
        help="random: made-up weights of the folder's config.json",
    )
    parser.add_argument("--arena-bytes", type=int, default=_ARENA_BYTES)
    options = parser.parse_args(arguments)
    try:
        config = WorkerConfig(
            model=str(options.model), device=options.device, dtype=options.dtype, load=options.load
        )
        if options.prompts is not None:
            prompts = read_prompts(options.prompts, options.model)
        else:
            prompts = made_up_prompts(max(1, read_model_info(options.model, config).vocab_size))
        reference, sentence = choose_reference(options.reference, config, options.arena_bytes)
        print(sentence, flush=True)
        verifier = Verifier(config, prompts, options.arena_bytes, reference)
        failed = False
        for case in CASES:
            outcome = verifier.run(case)
            failed |= not outcome.passes(verifier.tolerance)
            print(outcome.line(verifier.tolerance), flush=True)
    except (HeadroomError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("paged experts differ from resident ones" if failed else "paged experts equal resident ones")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
