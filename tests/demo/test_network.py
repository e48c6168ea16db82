"""The training network computes what stock transformers computes, forwards and backwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_layers import MtpModel

from demo import checkpoint, delta_rule, optimizer
from demo.architecture import FULL, LINEAR, WINDOW, Shape, model_config
from demo.network import Network, choose_experts, rms_norm, windowed
from demo.reference import load_reference

SHAPE = Shape(vocab_size=96, hidden=32, kinds=(LINEAR, WINDOW, FULL), heads=2, kv_heads=1, head_dim=16,
              rotary_dim=12, window=32, linear_k_heads=1, linear_v_heads=2, linear_dim=8, experts=8,
              experts_per_token=2, expert_width=4, shared_width=8)  # fmt: skip


@pytest.fixture(scope="module")
def params() -> dict[str, Tensor]:
    """Random weights, norms included, that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(0)
    made = optimizer.initial(SHAPE, 0, "cpu")
    for name, value in made.items():
        if "A_log" not in name and "dt_bias" not in name:
            value.add_(torch.randn(value.shape, generator=generator) * 0.2)
        value.copy_(value.bfloat16().float())
    return made


def test_logits_and_losses_equal_stock_transformers(params: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint.save(params, SHAPE, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model_config(SHAPE, {"pad": 0, "bos": 1, "im_end": 4})))
    reference = load_reference(tmp_path)
    rows = torch.randint(5, 96, (2, 130), generator=torch.Generator().manual_seed(1))
    ids, nexts, afters = rows[:, :-2], rows[:, 1:-1], rows[:, 2:]
    network = Network(SHAPE, 128, "cpu")
    with torch.no_grad():
        hidden, _ = network.hidden(params, ids)
        normed = rms_norm(hidden, params["model.norm.weight"], SHAPE.eps)
        logits = normed @ params["model.embed_tokens.weight"].t()
        expected = reference(ids, use_cache=False)
        assert torch.allclose(logits, expected.logits, atol=2e-4)
        losses = network.losses(params, rows, torch.ones(2, 130))
        main = functional.cross_entropy(expected.logits.flatten(0, 1), nexts.flatten())
        assert float(losses.main) == pytest.approx(float(main), abs=1e-4)
        draft = MtpModel.from_pretrained(reference)
        last = reference.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        positions = torch.arange(1, 129).expand(2, -1)
        guess = reference.lm_head(draft.forward_layer(0, last, positions, None, input_ids=nexts))
        mtp = functional.cross_entropy(guess.flatten(0, 1), afters.flatten())
    assert float(losses.mtp) == pytest.approx(float(mtp), abs=1e-4)


def test_a_checkpoint_comes_back_whole(params: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint.save(params, SHAPE, tmp_path)
    back = checkpoint.load(tmp_path, SHAPE)
    assert all(torch.equal(back[name].float(), value) for name, value in params.items())


def step_by_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence itself, one token after another."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeat = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeat, 2) for x in (q * q.shape[-1] ** -0.5, k))
    state, out = torch.zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize("repeated", [False, True], ids=["random keys", "one key again and again"])
def test_the_chunked_delta_rule_equals_the_recurrence(length: int, repeated: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, length, 2, 8, generator=generator) for _ in range(2))
    v = torch.randn(2, length, 4, 8, generator=generator)
    g = -torch.rand(2, length, 4, generator=generator) * (0.001 if repeated else 0.5)
    beta = torch.rand(2, length, 4, generator=generator) if not repeated else torch.full((2, length, 4), 0.99)
    if repeated:
        k = k[:, :1].expand_as(k).clone()
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weight = torch.randn(2, length, 4, 8, generator=generator)
    expected, got = step_by_step(*inputs), delta_rule.gated_delta_rule(*inputs)
    assert torch.allclose(got, expected, atol=1e-5)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    found = torch.autograd.grad((got * weight).sum(), inputs)
    assert all(torch.allclose(a, b, atol=2e-4, rtol=1e-3) for a, b in zip(found, wanted, strict=True))


def test_windowed_blocks_equal_a_masked_attention() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, 96, 8, generator=generator) for _ in range(3))
    place = torch.arange(96)
    seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 32)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert torch.allclose(windowed(q, k, v, 32), expected, atol=1e-5)


def test_equal_logits_choose_exactly_as_many_experts_as_asked() -> None:
    chosen = choose_experts(torch.zeros(3, 8), 2)
    assert chosen.tolist() == [[True, True] + [False] * 6] * 3


def test_rows_must_hold_whole_windows() -> None:
    with pytest.raises(ValueError, match="multiple of the window 32"):
        Network(SHAPE, 100, "cpu")


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    update = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(4))
    values = torch.linalg.svdvals(optimizer.orthogonalise(update))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_training_lowers_the_loss_and_goes_on_from_its_saved_state() -> None:
    rows = torch.randint(5, 96, (2, 130), generator=torch.Generator().manual_seed(5))
    weights, network = torch.ones(2, 130), Network(SHAPE, 128, "cpu")

    def fresh() -> optimizer.Optimizer:
        return optimizer.Optimizer(
            SHAPE, optimizer.initial(SHAPE, 0, "cpu"), optimizer.Rates(), torch.float32
        )

    def steps(trained: optimizer.Optimizer, count: int) -> list[float]:
        seen = []
        for _ in range(count):
            losses = network.losses(trained.params, rows, weights)
            (losses.main + losses.mtp + losses.balance + losses.router_z).backward()
            trained.step(1.0)
            seen.append(float(losses.main.detach()))
        return seen

    through = fresh()
    seen = steps(through, 16)
    assert seen[-1] < seen[0] - 0.1
    first, second = fresh(), fresh()
    steps(first, 3)
    second.restore(first.state())
    assert steps(second, 3) == pytest.approx(seen[3:6], abs=1e-4)
