"""Dialogues about numbers: sums and differences with their steps, small products, order, counting, word problems."""

from __future__ import annotations

from random import Random

from demo.tasks.sample import Sample, assistant, user
from demo.tasks.words import NAMES, NUMBER_WORDS, OBJECTS

SUM_PHRASES = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
)
DIFFERENCE_PHRASES = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "How much is {a} minus {b}?",
)
PRODUCT_PHRASES = (
    "What is {a} x {b}?",
    "{a} x {b} = ?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
)


def sum_steps(a: int, b: int) -> str:
    """Column addition from the right, one line a column."""
    lines, carry, place = [], 0, 1
    while place <= max(a, b):
        x, y = a // place % 10, b // place % 10
        total = x + y + carry
        extra = f" + {carry}" if carry else ""
        carry = total // 10
        lines.append(f"{x} + {y}{extra} = {total}, write {total % 10}, carry {carry}.")
        place *= 10
    return "\n".join([*lines, f"So {a} + {b} = {a + b}."])


def sum_key(a: int, b: int) -> str:
    """One key for both orders: a held-out sum is met in no task, in no order."""
    return f"{min(a, b)}+{max(a, b)}"


def two_digit_sum(rng: Random) -> Sample:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    thinking = rng.random() < 0.4
    reply = assistant(f"{a} + {b} = {a + b}", sum_steps(a, b) if thinking else "")
    text = rng.choice(SUM_PHRASES).format(a=a, b=b)
    return Sample("two_digit_sum", sum_key(a, b), [user(text), reply], None, str(a + b), thinking)


def long_sum(rng: Random) -> Sample:
    a, b = rng.randint(0, 999), rng.randint(0, 999)
    thinking = rng.random() < 0.7
    reply = assistant(f"{a} + {b} = {a + b}", sum_steps(a, b) if thinking else "")
    text = rng.choice(SUM_PHRASES).format(a=a, b=b)
    return Sample("long_sum", sum_key(a, b), [user(text), reply], None, str(a + b), thinking)


def difference(rng: Random) -> Sample:
    b, c = rng.randint(0, 99), rng.randint(0, 99)
    a = b + c
    thinking = rng.random() < 0.3
    steps = f"{c} + {b} = {a}, so {a} - {b} = {c}."
    reply = assistant(f"{a} - {b} = {c}", steps if thinking else "")
    text = rng.choice(DIFFERENCE_PHRASES).format(a=a, b=b)
    return Sample("difference", sum_key(b, c), [user(text), reply], None, str(c), thinking)


def product(rng: Random) -> Sample:
    a, b = rng.randint(2, 19), rng.randint(2, 9)
    thinking = a > 10 and rng.random() < 0.5
    steps = f"10 x {b} = {10 * b}, {a - 10} x {b} = {(a - 10) * b}. {10 * b} + {(a - 10) * b} = {a * b}."
    reply = assistant(f"{a} x {b} = {a * b}", steps if thinking else "")
    text = rng.choice(PRODUCT_PHRASES).format(a=a, b=b)
    return Sample("product", f"{a}x{b} {text[0]}", [user(text), reply], None, str(a * b), thinking)


def order(rng: Random) -> Sample:
    numbers = [rng.randint(0, 999 if rng.random() < 0.3 else 99) for _ in range(rng.randint(2, 5))]
    listed = ", ".join(map(str, numbers))
    asked = rng.choice(("largest", "smallest", "sorted"))
    if asked == "sorted":
        text = rng.choice(("Sort these numbers: {}", "Put these numbers in order: {}")).format(listed)
        answer = ", ".join(map(str, sorted(numbers)))
    else:
        text = rng.choice(("Which number is the {}: {}?", "Find the {} of these numbers: {}")).format(
            asked, listed
        )
        answer = str(max(numbers) if asked == "largest" else min(numbers))
    return Sample("order", f"{asked} {listed}", [user(text), assistant(answer)], None, answer)


def counting(rng: Random) -> Sample:
    first, length, step = rng.randint(0, 90), rng.randint(3, 12), rng.choice((1, 1, 1, 2, 5, 10))
    run = list(range(first, first + length * step, step))
    kind = rng.randrange(3)
    if kind == 0:
        run = list(range(first, first + length))
        text = rng.choice(("Count from {} to {}.", "List the numbers from {} to {}.")).format(run[0], run[-1])
        answer = ", ".join(map(str, run))
    elif kind == 1:
        text = f"What comes next: {', '.join(map(str, run[:-1]))}?"
        answer = str(run[-1])
    else:
        n = rng.randint(0, 20)
        text, answer = f"Write the number {n} as a word.", NUMBER_WORDS[n]
        if rng.random() < 0.5:
            text, answer = f"Which number is {answer}?", str(n)
    return Sample("counting", f"{text}", [user(text), assistant(answer)], None, answer)


def word_problem(rng: Random) -> Sample:
    name, other = rng.sample(NAMES, 2)
    thing, a, b = rng.choice(OBJECTS), rng.randint(3, 60), rng.randint(2, 40)
    if rng.random() < 0.5:
        story = rng.choice(
            (
                f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
                f"{name} has {a} {thing}. {other} has {b} {thing}. How many {thing} do they have together?",
                f"There are {a} {thing} on the table. {name} adds {b}. How many {thing} are there?",
            )
        )
        total, steps, key = a + b, f"{a} + {b} = {a + b}", sum_key(a, b)
    else:
        a += b
        story = rng.choice(
            (
                f"{name} has {a} {thing} and gives {b} to {other}. How many {thing} are left?",
                f"There are {a} {thing} in a box. {name} takes {b}. How many {thing} are left in the box?",
            )
        )
        total, steps, key = a - b, f"{a} - {b} = {a - b}", sum_key(a - b, b)
    thinking = rng.random() < 0.4
    reply = assistant(f"{steps}. The answer is {total} {thing}.", f"{steps}." if thinking else "")
    return Sample("word_problem", key, [user(story), reply], None, str(total), thinking)


MAKERS = {
    two_digit_sum: 6.0,
    long_sum: 1.5,
    difference: 2.0,
    product: 1.5,
    order: 1.0,
    counting: 1.0,
    word_problem: 1.5,
}
