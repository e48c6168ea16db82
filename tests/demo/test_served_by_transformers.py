"""The transformers engine serves the shipped checkpoint with its windows, past 128 tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from transformers import PreTrainedModel

from worker.api import GenerateRequest, SamplingParams
from worker.config import WorkerConfig
from worker.engines.transformers import TransformersEngine


def test_its_tokens_are_the_references_past_the_window(
    demo_model: PreTrainedModel, model_folder: Path
) -> None:
    prompt = torch.randint(11, 4096, (170,), generator=torch.Generator().manual_seed(8)).tolist()
    expected, ids = [], list(prompt)
    with torch.no_grad():
        for _ in range(6):
            # The whole sequence anew for each token: no cache that could hide a wrong window.
            logits = demo_model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
            ids.append(int(logits.argmax()))
            expected.append(ids[-1])
    engine = TransformersEngine(WorkerConfig(model=str(model_folder), device="cpu", dtype="float32"))
    try:
        asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest("r", tuple(prompt), asked))

        async def read() -> list[int]:
            return [token async for event in engine.stream("r") for token in event.token_ids]

        assert asyncio.run(read()) == expected
    finally:
        engine.close()
