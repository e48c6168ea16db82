"""Expert kernels on a GPU against each format's meaning in float64, at the odd sizes that published models have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.experts import run_experts
from kernels.pointwise import GatedActivation
from tests.helpers.formats import CONFIGS, make_expert
from worker.experts.block_format import block_format
from worker.quantization.base import ExpertShape
from worker.quantization.choose import find_format

pytestmark = pytest.mark.gpu

NUM_EXPERTS, PER_TOKEN, HIDDEN = 5, 2, 160
# Beyond rounding of activations and weights to bfloat16 nothing is lost.
TOLERANCE = 8e-3


def product(matrices: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = matrices["gate_proj"] @ x, matrices["up_proj"] @ x
    return matrices["down_proj"] @ (gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("inner", [32, 64, 96, 192, 2880])
@pytest.mark.parametrize("name", CONFIGS)
def test_products_mean_what_the_checkpoint_means(
    name: str, inner: int, record_property: Callable[[str, object], None]
) -> None:
    shape = ExpertShape(HIDDEN, inner)
    format = find_format(CONFIGS[name], "bfloat16")
    made = [make_expert(CONFIGS[name], shape, seed) for seed in range(NUM_EXPERTS)]
    size = format.block_layout(shape).num_bytes
    blocks = torch.full((NUM_EXPERTS, size), 0xA5, dtype=torch.uint8)
    for expert, block in zip(made, blocks, strict=True):
        format.pack(expert.tensors, shape, block)
    there = blocks.cuda()
    table = torch.arange(NUM_EXPERTS, device="cuda") * size + there.data_ptr()
    where = block_format(format.block_layout(shape))
    rng = np.random.default_rng(inner)
    worst = 0.0
    for tokens in (1, 3, 40, 150):
        experts = torch.from_numpy(
            np.stack([rng.permutation(NUM_EXPERTS)[:PER_TOKEN] for _ in range(tokens)])
        )
        if tokens > 1:
            experts[-1] = -1
        x = torch.from_numpy(rng.standard_normal((tokens, HIDDEN))).bfloat16()
        weights = torch.rand(tokens, PER_TOKEN)
        wanted = np.zeros((tokens, HIDDEN))
        for token in range(tokens):
            for choice in range(PER_TOKEN):
                if (expert := int(experts[token, choice])) >= 0:
                    share = float(weights[token, choice])
                    wanted[token] += share * product(made[expert].meaning, x[token].double().numpy())
        answers = []
        for deterministic in (False, True):
            out = run_experts(
                x.cuda(), weights.cuda(), experts.cuda(), table, where, inner, GatedActivation(),
                deterministic=deterministic,
            )  # fmt: skip
            found = out.double().cpu().numpy()
            error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            assert error < TOLERANCE
            worst = max(worst, float(error))
            answers.append(out)
        if tokens > 1:
            assert not answers[1][-1].any(), "a padding row is not zero"
            alone = run_experts(
                x[:1].cuda(), weights[:1].cuda(), experts[:1].cuda(), table, where, inner, GatedActivation(),
                deterministic=True,
            )  # fmt: skip
            assert torch.equal(alone[0], answers[1][0]), "a token's bits depend on the tokens beside it"
    record_property("figure", f"experts {name}, I = {inner}: relative error {worst:.1e}")
