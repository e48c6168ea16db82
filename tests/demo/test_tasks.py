"""Generated dialogues: the split between training and scoring, and that their answers are right."""

from __future__ import annotations

import json
from random import Random

import jsonschema
import numpy as np
import pytest

from demo import corpus
from demo.architecture import Shape
from demo.prepare import written_by_assistant
from demo.scoring import calls_in
from demo.tasks import arithmetic, copying, retrieval, structured, tools
from demo.tasks.sample import Maker, draw, held_out, render
from demo.train import Plan, rate_scale

ALL_MAKERS = [*arithmetic.MAKERS, *copying.MAKERS, *structured.MAKERS, *tools.MAKERS]


@pytest.mark.parametrize("maker", ALL_MAKERS, ids=lambda m: m.__name__)
def test_training_and_scoring_never_share_a_key(maker: Maker) -> None:
    rng = Random(1)
    trained = {draw(maker, rng, scoring=False).key for _ in range(60)}
    scored = {draw(maker, rng, scoring=True).key for _ in range(20)}
    assert not trained & scored
    assert all(held_out(key) for key in scored)


def test_a_held_out_sum_is_trained_in_no_task_and_no_order() -> None:
    rng = Random(2)
    for maker in (
        arithmetic.two_digit_sum,
        arithmetic.long_sum,
        arithmetic.difference,
        arithmetic.word_problem,
    ):
        for _ in range(300):
            sample = draw(maker, rng, scoring=False)
            numbers = [int(n) for n in sample.key.split("+")]
            assert not held_out(arithmetic.sum_key(*numbers))
            assert sample.key == arithmetic.sum_key(*reversed(numbers))


@pytest.mark.parametrize(("a", "b"), [(47, 38), (99, 99), (10, 20), (5, 995)])
def test_written_steps_end_in_the_sum(a: int, b: int) -> None:
    assert arithmetic.sum_steps(a, b).endswith(f"So {a} + {b} = {a + b}.")


def test_tool_calls_fit_their_schemas() -> None:
    rng = Random(3)
    for _ in range(100):
        sample = tools.one_call(rng)
        (call,) = calls_in(render(sample.messages)) or []
        (schema,) = [
            t["function"]["parameters"] for t in sample.tools or [] if t["function"]["name"] == call["name"]
        ]
        jsonschema.validate(call["arguments"], schema)


def test_json_answers_fit_their_schemas() -> None:
    rng = Random(4)
    for _ in range(100):
        sample = structured.from_schema(rng)
        rule = next(str(m["content"]) for m in sample.messages if "schema:\n" in str(m["content"]))
        jsonschema.validate(
            json.loads(sample.answer), json.JSONDecoder().raw_decode(rule.split("schema:\n")[1])[0]
        )


def test_a_hidden_fact_stands_once_and_far_from_its_question() -> None:
    filler = "The fox ran over the hill. " * 400
    sample = retrieval.one_fact(Random(5), filler, 1000)
    text = str(sample.messages[0]["content"])
    assert text.count(sample.key) == 1
    after = text[text.index(sample.key) :]
    assert len(after) > 0.9 * 1000 * retrieval.CHARS_PER_TOKEN
    assert sample.answer in str(sample.messages[1]["content"])


def test_shares_of_the_mixture_are_kept() -> None:
    stories = [{"name": "s", "sections": ["A fox ran home. " * 40], "qa": [{"q": "Who ran?", "a": "A fox"}]}]
    problems = [{"question": "Ann has one pear and gets another. " * 6, "answer": "1+1=<<1+1=2>>2\n#### 2"}]
    made = corpus.dialogues(Random(6), corpus.Sources("A fox ran home. " * 20000, stories, problems))
    written = dict.fromkeys(corpus.SHARES, 0)
    for _ in range(3000):
        group, sample = next(made)
        written[group] += len(render(sample.messages, sample.tools))
    total = sum(written.values())
    assert all(abs(written[group] / total - share) < 0.05 for group, share in corpus.SHARES.items())
    assert sum(corpus.SHARES.values()) == pytest.approx(1)


def test_what_the_assistant_writes_is_marked_to_its_closing_token() -> None:
    header = [3, 50, 60]
    ids = np.array([3, 70, 60, 9, 4, 60, 3, 50, 60, 20, 21, 4, 60, 3, 50, 60, 22, 4], dtype=np.uint16)
    marks = written_by_assistant(ids, header)
    assert np.flatnonzero(marks).tolist() == [9, 10, 11, 16, 17]


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    plan = Plan(warmup=10, floor=0.1)
    rates = [rate_scale(step, 110, plan) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1)
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)


def test_the_vocabulary_leaves_a_bit_for_the_mark() -> None:
    assert Shape().vocab_size < 1 << 15
