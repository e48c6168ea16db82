"""Scores GSM8K over HTTP on one or more OpenAI-compatible endpoints, with confidence intervals and their difference.

    python -m benchmarks.accuracy --data gsm8k_test.jsonl.xz \\
        --endpoint resident=http://127.0.0.1:8000/v1 --endpoint paged=http://127.0.0.1:8001/v1

Every endpoint answers the same questions greedily; the share of right final numbers is stated with its 95 % interval,
and every further endpoint's paired difference to the first with the same. A request that fails counts as wrong and is
listed. Exit code 1: a request failed, or an endpoint differs from the first by more than chance. Data: one JSON object
per line with ``question`` and ``answer`` ("... #### 18"), plain or .xz.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from benchmarks.intervals import paired_difference, wilson_interval
from benchmarks.report import NOT_APPLICABLE, Conditions, Report, publish, report_parser

INSTRUCTION = (
    "Solve the problem step by step. End with a line of four number signs and the result, as in: #### 42"
)
_MARKED = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CALCULATION = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True, slots=True)
class Question:
    """A word problem, its worked answer and the number at its end."""

    text: str
    worked: str
    number: Decimal


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server under test: its ``name`` in the report, ``url`` up to ``/v1``, ``model`` or "" for its first."""

    name: str
    url: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one endpoint did with one question; ``error`` is set when it gave no answer."""

    is_right: bool
    num_tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions are asked."""

    shots: tuple[Question, ...] = ()
    concurrency: int = 16
    max_tokens: int = 512
    timeout_s: float = 600.0


def read_questions(path: Path) -> list[Question]:
    """All questions of a .jsonl or .jsonl.xz file; ValueError names a line without a final number."""
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    questions = []
    for count, line in enumerate(text.decode("utf-8").rstrip("\n").split("\n"), start=1):
        entry = json.loads(line)
        marked = _MARKED.search(entry["answer"])
        if marked is None:
            raise ValueError(f"{path.name}, line {count}: the answer has no '#### number'")
        questions.append(Question(entry["question"], entry["answer"], _decimal(marked[1])))
    return questions


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends in: behind the last ``####``, else the last number of the text."""
    found = _MARKED.findall(text) or _NUMBER.findall(text)
    try:
        return _decimal(found[-1]) if found else None
    except InvalidOperation:
        return None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def messages(question: Question, shots: Sequence[Question]) -> list[dict[str, str]]:
    """The conversation: the instruction, worked examples as earlier turns, the question."""
    turns = [{"role": "system", "content": INSTRUCTION}]
    for shot in shots:
        turns.append({"role": "user", "content": shot.text})
        turns.append({"role": "assistant", "content": _CALCULATION.sub("", shot.worked)})
    return [*turns, {"role": "user", "content": question.text}]


async def ask_all(endpoint: Endpoint, questions: Sequence[Question], asking: Asking) -> list[Outcome]:
    """One outcome per question, in order."""
    import openai

    slots = asyncio.Semaphore(asking.concurrency)
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="none", timeout=asking.timeout_s) as client:
        model = endpoint.model or (await client.models.list()).data[0].id

        async def ask(question: Question) -> Outcome:
            async with slots:
                try:
                    return _outcome(question, await _complete(client, model, question, asking))
                except openai.OpenAIError as error:
                    return Outcome(False, error=f"{type(error).__name__}: {error}")

        return list(await asyncio.gather(*(ask(question) for question in questions)))


async def _complete(client: Any, model: str, question: Question, asking: Asking) -> Any:
    return await client.chat.completions.create(
        model=model,
        messages=messages(question, asking.shots),
        temperature=0.0,
        max_tokens=asking.max_tokens,
    )


def _outcome(question: Question, completion: Any) -> Outcome:
    text = completion.choices[0].message.content or ""
    tokens = completion.usage.completion_tokens if completion.usage else 0
    return Outcome(final_number(text) == question.number, tokens, text)


def figures(endpoint: Endpoint, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """One row of the report."""
    right = sum(outcome.is_right for outcome in outcomes)
    low, high = wilson_interval(right, len(outcomes))
    return {
        "endpoint": endpoint.name,
        "questions": len(outcomes),
        "right": right,
        "accuracy": right / len(outcomes),
        "low_95": low,
        "high_95": high,
        "failed": sum(bool(outcome.error) for outcome in outcomes),
        "tokens": sum(outcome.num_tokens for outcome in outcomes),
        "seconds": round(seconds, 1),
    }


def comparison(
    first: tuple[Endpoint, list[Outcome]], other: tuple[Endpoint, list[Outcome]]
) -> tuple[bool, str]:
    """Whether two endpoints differ by more than chance, and their paired difference as a sentence."""
    (base, before), (changed, after) = first, other
    rights = [[outcome.is_right for outcome in outcomes] for outcomes in (before, after)]
    mean, low, high = paired_difference(rights[0], rights[1])
    differing = sum(a != b for a, b in zip(*rights, strict=True))
    reworded = sum(a.text != b.text for a, b in zip(before, after, strict=True))
    differs = not low <= 0.0 <= high
    verdict = "they differ" if differs else "no difference is shown"
    return differs, (
        f"{changed.name} - {base.name}: {100 * mean:+.2f} points (95 %: {100 * low:+.2f} to {100 * high:+.2f}), "
        f"{differing} of {len(before)} questions judged differently, {reworded} answered in other words: {verdict}."
    )


def run(
    endpoints: Sequence[Endpoint], questions: Sequence[Question], asking: Asking, conditions: Conditions
) -> tuple[Report, bool]:
    """Asks every endpoint in turn; answers the report, and whether all requests were answered and no endpoint differs
    from the first."""
    rows, notes, all_outcomes = [], [], []
    for endpoint in endpoints:
        started = time.monotonic()
        outcomes = asyncio.run(ask_all(endpoint, questions, asking))
        rows.append(figures(endpoint, outcomes, time.monotonic() - started))
        all_outcomes.append((endpoint, outcomes))
        notes += [
            f"{endpoint.name} failed: {error}" for error in sorted({o.error for o in outcomes if o.error})[:5]
        ]
    compared = [comparison(all_outcomes[0], other) for other in all_outcomes[1:]]
    notes += [sentence for _, sentence in compared]
    sound = not any(row["failed"] for row in rows) and not any(differs for differs, _ in compared)
    return Report("accuracy on GSM8K", conditions, tuple(rows), tuple(notes)), sound


def parse_endpoint(text: str) -> Endpoint:
    """``NAME=URL`` or ``NAME=URL,MODEL``."""
    name, equals, rest = text.partition("=")
    url, _, model = rest.partition(",")
    if not (name and equals and url.startswith("http")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL or NAME=URL,MODEL")
    return Endpoint(name, url.rstrip("/"), model)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when a request failed, since the figures are then of something else, or when endpoints
    differ."""
    parser = report_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="gsm8k test questions, .jsonl or .jsonl.xz")
    parser.add_argument(
        "--endpoint", type=parse_endpoint, action="append", required=True, help="NAME=URL[,MODEL]"
    )
    parser.add_argument("--limit", type=int, help="only the first so many questions")
    parser.add_argument("--shots", type=int, default=0, help="worked examples ahead of each question")
    parser.add_argument("--shots-data", type=Path, help="where they come from (the training questions)")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--weights", default="trained", help="trained or random, for the report")
    parser.add_argument("--server-hardware", default="not stated", help="for the report")
    options = parser.parse_args(arguments)
    if bool(options.shots) != bool(options.shots_data):
        parser.error("--shots and --shots-data go together")
    shots = tuple(read_questions(options.shots_data)[: options.shots]) if options.shots else ()
    questions = read_questions(options.data)[: options.limit]
    asking = Asking(shots, options.concurrency, options.max_tokens)
    conditions = Conditions(
        model=", ".join(
            f"{entry.name}: {entry.model or 'first of ' + entry.url}" for entry in options.endpoint
        ),
        weights=options.weights,
        prompts=f"GSM8K ({options.data.name}), {len(questions)} questions, {len(shots)} shots, greedy",
        cache=NOT_APPLICABLE,
        batch=f"up to {asking.concurrency}",
        context=f"at most {asking.max_tokens} generated tokens",
        resident="as the endpoints' names say",
        hardware=options.server_hardware,
    )
    report, sound = run(options.endpoint, questions, asking, conditions)
    publish(report, options.json)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
