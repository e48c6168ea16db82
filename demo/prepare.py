"""Makes the tokenizer, and from the data folder the token files that training reads.

    python -m demo.prepare tokenizer --data DATA --out demo/model
    python -m demo.prepare tokens --data DATA --model demo/model --out WORK --workers 16 --task-tokens 120000000

``tokens`` writes books.npy and valid.npy (one run of ids each), and tasks.npy: rows of dialogues [R, T + 2] in which
bit 15 marks the tokens that the assistant writes; checks.npy holds such rows of held-out dialogues, checked.npy the
number of the dialogue that each of their tokens belongs to (-1: none), checks.json the dialogues' kinds. Files are
uint16 (checked: int16). The same arguments make the same files.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from demo import corpus, vocabulary
from demo.architecture import Shape, model_config
from demo.tasks.sample import draw, render

ROW_TOKENS = 4096
EXTRA = 2
"""A row also holds the targets of its last token and of the draft layer's."""
WRITTEN = 1 << 15
ROWS_PER_PART = 128


def make_tokenizer(data: Path, out: Path, size: int) -> None:
    """Trains on a sixth of each book and on dialogues, and writes every small file of the checkpoint folder."""
    out.mkdir(parents=True, exist_ok=True)
    texts = corpus.books(data)
    sources = corpus.load_sources(data, "".join(texts[:40]))

    def pieces() -> Iterator[str]:
        for text in texts:
            for start in range(0, len(text), 60000):
                yield text[start : start + 10000]
        made = corpus.dialogues(Random(1), sources)
        for _ in range(20000):
            group, sample = next(made)
            if group not in ("retrieval", "reading", "passage"):
                yield render(sample.messages, sample.tools)

    tokenizer = vocabulary.train(pieces(), size)
    shape = Shape(vocab_size=size)
    vocabulary.save(tokenizer, out, shape.max_positions)
    ids = {"pad": vocabulary.PAD, "bos": vocabulary.BOS, "im_end": vocabulary.IM_END}
    (out / "config.json").write_text(json.dumps(model_config(shape, ids), indent=1) + "\n")


def written_by_assistant(ids: np.ndarray, header: list[int]) -> np.ndarray:
    """Marks what follows each assistant header, the closing token included."""
    marks = np.zeros(len(ids), dtype=bool)
    for start in np.flatnonzero(ids == vocabulary.IM_START):
        begin = start + len(header)
        if list(ids[start:begin]) == header:
            ends = np.flatnonzero(ids[begin:] == vocabulary.IM_END)
            marks[begin : begin + (ends[0] + 1 if len(ends) else len(ids))] = True
    return marks


class _Part:
    """Makes rows for one seed in a worker process; holds what the process loads once."""

    def __init__(self, data: Path, model: Path, work: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._header = [vocabulary.IM_START, *self._tokenizer.encode("assistant\n").ids]
        self._books = np.load(work / "books.npy", mmap_mode="r")
        runs = [
            self._books[n : n + 400000]
            for n in range(0, len(self._books), max(400001, len(self._books) // 40))
        ]
        text = "\n".join(self._tokenizer.decode(run.tolist()) for run in runs)
        self.sources = corpus.load_sources(data, text)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each dialogue and the end of text, what the assistant wrote marked."""
        out = []
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            ids = np.array([*encoding.ids, vocabulary.END], dtype=np.uint16)
            out.append(ids | (written_by_assistant(ids, self._header) * np.uint16(WRITTEN)))
        return out

    def _encoded(self, rng: Random) -> Iterator[np.ndarray]:
        made = corpus.dialogues(rng, self.sources)
        while True:
            yield from self.encode([render(s.messages, s.tools) for _, s in (next(made) for _ in range(256))])

    def rows(self, seed: int) -> np.ndarray:
        """Rows filled with whole dialogues; what is left at a row's end is book text."""
        rng, length = Random(seed), ROW_TOKENS + EXTRA
        out = np.empty((ROWS_PER_PART, length), dtype=np.uint16)
        waiting: list[np.ndarray] = []
        made = self._encoded(rng)
        for row in out:
            used = 0
            while used < length:
                fitting = [n for n, ids in enumerate(waiting) if len(ids) <= length - used]
                if not fitting and len(waiting) < 24:
                    ids = next(made)
                    if len(ids) <= length:
                        waiting.append(ids)
                    continue
                if not fitting:
                    spot = rng.randrange(len(self._books) - length)
                    row[used:] = self._books[spot : spot + length - used] | np.uint16(WRITTEN)
                    break
                ids = waiting.pop(fitting[0])
                row[used : used + len(ids)] = ids
                used += len(ids)
        return out


_PART: list[_Part] = []


def _start(data: Path, model: Path, work: Path) -> None:
    _PART.append(_Part(data, model, work))


def _rows(seed: int) -> np.ndarray:
    return _PART[0].rows(seed)


def _encode_book(job: tuple[Path, str]) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(job[0] / "tokenizer.json"))
    return np.array(
        [vocabulary.BOS, *tokenizer.encode(job[1], add_special_tokens=False).ids, vocabulary.END], np.uint16
    )


def make_checks(data: Path, model: Path, work: Path, each: int) -> None:
    """Held-out dialogues of every scored kind, packed into rows, to be followed during training."""
    part, rng, length = _Part(data, model, work), Random(5), ROW_TOKENS + EXTRA
    rows, numbers, kinds = [np.empty(0, np.uint16)], [np.empty(0, np.int16)], []
    for kind, maker in corpus.scored_makers(part.sources).items():
        for _ in range(each):
            sample = draw(maker, rng, scoring=True)
            ids = part.encode([render(sample.messages, sample.tools)])[0]
            if len(ids) > length:
                continue
            if len(rows[-1]) + len(ids) > length:
                rows.append(np.empty(0, np.uint16))
                numbers.append(np.empty(0, np.int16))
            rows[-1] = np.concatenate([rows[-1], ids])
            numbers[-1] = np.concatenate([numbers[-1], np.full(len(ids), len(kinds), np.int16)])
            kinds.append(kind)
    np.save(work / "checks.npy", np.stack([np.pad(row, (0, length - len(row))) for row in rows]))
    np.save(
        work / "checked.npy", np.stack([np.pad(n, (0, length - len(n)), constant_values=-1) for n in numbers])
    )
    (work / "checks.json").write_text(json.dumps(kinds))


def make_tokens(data: Path, model: Path, work: Path, workers: int, task_tokens: int, seed: int) -> None:
    """Writes books.npy, valid.npy and tasks.npy into ``work``."""
    work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with Pool(workers) as pool:
        for source, target in (("books_valid", "valid"), ("books_train", "books")):
            texts = corpus.books(data, source)
            runs = pool.map(_encode_book, [(model, text) for text in texts], chunksize=1)
            np.save(work / f"{target}.npy", np.concatenate(runs))
            size, count = sum(len(t.encode()) for t in texts), sum(map(len, runs))
            print(
                f"{target}: {count} tokens, {size / count:.3f} bytes each, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    parts = -(-task_tokens // (ROWS_PER_PART * ROW_TOKENS))
    with Pool(workers, _start, (data, model, work)) as pool:
        rows = np.concatenate(pool.map(_rows, range(seed, seed + parts), chunksize=1))
    np.save(work / "tasks.npy", rows)
    make_checks(data, model, work, 64)
    share = (rows >= WRITTEN).mean()
    print(f"tasks: {rows.size} tokens, {share:.3f} marked, {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("tokenizer", "tokens"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--vocab-size", type=int, default=Shape().vocab_size)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--task-tokens", type=int, default=120_000_000)
    parser.add_argument("--seed", type=int, default=1000)
    args = parser.parse_args()
    if args.step == "tokenizer":
        make_tokenizer(args.data, args.out, args.vocab_size)
    else:
        make_tokens(args.data, args.model, args.out, args.workers, args.task_tokens, args.seed)


if __name__ == "__main__":
    main()
