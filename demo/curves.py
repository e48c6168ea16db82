"""Draws the training curves of the model card from the log that ``demo.train`` wrote.

python -m demo.curves demo/training_log.jsonl --out demo/curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TOKENS_PER_STEP = 16 * 4096
SCORES = ("copy_in_window", "retrieval_1000", "tool_calls", "json", "two_digit_sums")


def series(lines: list[dict[str, float]], kind: str, name: str) -> tuple[list[float], list[float]]:
    """Million tokens seen and the values of ``name`` in the log's lines of one kind."""
    rows = [line for line in lines if line["kind"] == kind and name in line]
    return [row["step"] * TOKENS_PER_STEP / 1e6 for row in rows], [row[name] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws training curves.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    lines = [json.loads(line) for line in args.log.read_text().splitlines()]
    figure, (loss, bits, scores) = pyplot.subplots(1, 3, figsize=(12, 3.2), dpi=70)
    loss.plot(*series(lines, "train", "main"), label="model")
    loss.plot(*series(lines, "train", "mtp"), label="draft layer")
    loss.set_title("training loss, weighted mixture (nats/token)")
    # The check at a command's end reads four times as much text: another sample, not a point of this curve.
    regular = [line for line in lines if line["kind"] != "check" or line["step"] % 1000 == 0]
    bits.plot(*series(regular, "check", "bits_per_byte"), marker=".", label="a part of the held-out books")
    bits.set_title("bits per byte")
    for name in SCORES:
        scores.plot(*series(lines, "check", name), marker=".", label=name)
    scores.set_title("held-out dialogues, every token right")
    for axis in (loss, bits, scores):
        axis.set_xlabel("million tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.out)
    # Sixty-four colours are enough for lines, at half the size.
    with Image.open(args.out) as picture:
        picture.convert("RGB").quantize(64).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
