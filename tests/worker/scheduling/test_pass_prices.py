"""What chunks of prefill passes cost: a long prompt's passes all take as long, and as long as the link needs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.helpers.fake_runner import expert_spec, full_spec
from tests.helpers.scheduling import make_desk
from worker.experts.passes import PassFacts, plan_passes
from worker.scheduling.limits import PassPrice, RingRule

QWEN = PassFacts(48, 128, 8, 4_720_128, 0, 2048, 768, attention_flops=4.0 * 48 * 32 * 128)


def test_a_chunk_costs_what_it_sees() -> None:
    price = PassPrice(equal_context=1000.0, expert_tokens=1.0)
    assert price.cost(0, 2000) == 2000 + 2000
    assert price.cost(1000, 500) == 500 * 2.25
    for computed, length in ((0, 1), (0, 700), (5000, 64), (100_000, 4096)):
        assert abs(price.tokens(computed, price.cost(computed, length)) - length) <= 1
    assert price.tokens(300, 0.0) == 0


def test_the_price_of_a_real_model_is_what_was_measured() -> None:
    """8,192 tokens of Qwen3-30B-A3B in FP8 take 138 ms and 44 of attention on an H200."""
    size = plan_passes(QWEN, 0, 70_000)
    assert size.price is not None
    assert size.price.cost(0, 8192) / 8192 == pytest.approx(182 / 138, abs=0.01)
    assert size.price.expert_tokens * 88 * 48 == pytest.approx(0.4 * 59_400, rel=0.01)
    assert plan_passes(QWEN, 4096, 70_000).price is None, "whoever asks for a size gets it"
    assert plan_passes(QWEN, -1, 70_000).price is None


@pytest.mark.parametrize(
    ("resident", "length", "num_passes"),
    [
        (0, 8192, 1), (40, 8192, 1), (40, 16_384, 1), (40, 19_392, 1), (0, 20_000, 2), (40, 32_000, 3), (0, 32_000, 3),
        (128, 32_000, 4),
    ],
)  # fmt: skip
def test_passes_of_a_long_prompt_take_as_long_each(resident: int, length: int, num_passes: int) -> None:
    """At 40 of 128 resident, 24,000 tokens' worth is what the link needs; a pass holds 19,392."""
    size = plan_passes(QWEN, 0, 70_000)
    assert size.price is not None
    desk = make_desk(
        (full_spec(), expert_spec()),
        "arena",
        1 << 24,
        pass_tokens=size.tokens,
        ring=RingRule(48, 128),
        price=size.price,
        max_step_tokens=256,
        max_model_len=70_000,
        prefix_cache=False,
    )
    desk.scheduler.note_resident(48 * resident)
    desk.ask("p", [n % 200 for n in range(length)], max_tokens=2)
    desk.finish()
    desk.check_answers()
    chunks = [plan.num_tokens for plan in desk.runner.plans if plan.staged]
    assert len(chunks) == num_passes
    assert sum(chunks) == length
    assert max(chunks) <= size.tokens
    costs = [size.price.cost(sum(chunks[:at]), chunk) for at, chunk in enumerate(chunks)]
    assert max(costs) < 1.05 * min(costs)
    assert all(left >= right for left, right in pairwise(chunks)), "what sees more is to be shorter"
    if num_passes > 1 and resident:
        assert min(costs) > 48 * (128 - resident) * size.price.expert_tokens, "the link is not done before"


def test_prompts_share_what_a_pass_may_cost() -> None:
    price = PassPrice(equal_context=200.0, expert_tokens=1.0)
    desk = make_desk(
        (full_spec(), expert_spec()), "arena", 1 << 19, pass_tokens=256, price=price, max_step_tokens=32,
        prefix_cache=False,
    )  # fmt: skip
    for number in range(2):
        desk.ask(f"p{number}", [(number * 31 + i * 7) % 200 for i in range(400)], max_tokens=2)
    desk.finish()
    desk.check_answers()
    passes = [plan for plan in desk.runner.plans if plan.staged]
    assert len(passes) == 4
    assert any(plan.num_rows == 2 for plan in passes)
    for plan in passes:
        chunks = zip(plan.num_computed.tolist(), plan.query_len.tolist(), strict=True)
        assert sum(price.cost(computed, length) for computed, length in chunks) <= 1.05 * price.cost(0, 256)
