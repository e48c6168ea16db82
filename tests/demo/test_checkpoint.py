"""The shipped checkpoint: what its files hold, that stock transformers reads all of it, and that it answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import MtpModel

from demo.architecture import LINEAR, WINDOW, Shape, leaves, model_config, num_parameters
from demo.packing import WEIGHTS
from demo.scoring import Scored, calls_in, replies

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def shapes_on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_the_file_holds_exactly_the_tensors_of_the_architecture(model_folder: Path) -> None:
    shape = Shape()
    expected = {name: leaf.dims for leaf in leaves(shape) for name in leaf.tensor_names(shape.num_layers)}
    assert shapes_on_disk(model_folder) == expected
    assert num_parameters(shape) == 11_158_176


def test_checkpoint_and_tokenizer_stay_within_their_size(model_folder: Path) -> None:
    tracked = [file for file in model_folder.iterdir() if file.name != WEIGHTS]
    assert sum(file.stat().st_size for file in tracked) <= 15_500_000
    assert (model_folder / WEIGHTS).stat().st_size <= 23_000_000


def test_the_configuration_is_the_architectures_own(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    assert config == model_config(Shape(), {"pad": 0, "bos": 1, "im_end": 4})
    assert set(config["layer_types"]) == {LINEAR, "full_attention"}
    windows = [128 if kind == WINDOW else None for kind in Shape().kinds]
    assert config["attention_window_sizes"] == windows == [None, None, 128, None] * 2


def test_stock_transformers_finds_every_weight_it_wants(model_folder: Path) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(str(model_folder), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"])


def test_the_draft_layer_mostly_agrees_with_the_model_on_a_dialogue(
    demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    text = demo_tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "What is the arena?"},
            {
                "role": "assistant",
                "content": "The arena is one block of GPU memory. It holds the full-attention KV, the "
                "sliding-window KV, the recurrent state and the experts that are resident now.",
            },
        ],
        tokenize=False,
    )
    ids = demo_tokenizer(text, return_tensors="pt")["input_ids"]
    draft = MtpModel.from_pretrained(demo_model).eval()
    with torch.no_grad():
        hidden = demo_model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        chosen = demo_model.lm_head(hidden).argmax(-1)[0]
        positions = torch.arange(1, ids.shape[1])[None]
        guess = draft.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        guessed = demo_model.lm_head(guess).argmax(-1)[0]
    agreed = (guessed[:-1] == chosen[1:-1]).float()[20:]
    assert agreed.mean() >= 0.8


def test_the_window_is_obeyed_with_and_without_a_cache(
    demo_model: PreTrainedModel, model_folder: Path
) -> None:
    """Past 128 tokens the windowed model differs from the unwindowed one, and cached steps equal the whole pass."""
    ids = torch.randint(11, 4096, (1, 200), generator=torch.Generator().manual_seed(3))
    plain = AutoModelForCausalLM.from_pretrained(str(model_folder), dtype=torch.float32).eval()
    with torch.no_grad():
        whole = demo_model(ids, use_cache=False).logits
        unwindowed = plain(ids, use_cache=False).logits
        step = demo_model(ids[:, :180], use_cache=True)
        rest = demo_model(ids[:, 180:190], past_key_values=step.past_key_values, use_cache=True).logits
        last = demo_model(ids[:, 190:191], past_key_values=step.past_key_values, use_cache=True).logits
    assert torch.allclose(whole[:, :128], unwindowed[:, :128], atol=1e-4)
    assert (whole[:, 160:] - unwindowed[:, 160:]).abs().max() > 1e-2
    assert torch.allclose(rest, whole[:, 180:190], atol=1e-3)
    assert torch.allclose(last, whole[:, 190:191], atol=1e-3)


@pytest.fixture(scope="module")
def answers(demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Greedy replies to a few prompts, written in one batch."""
    asked: dict[str, tuple[list[dict[str, str]], dict[str, object]]] = {
        "about": ([{"role": "user", "content": "What is Headroom?"}], {}),
        "sum": ([{"role": "user", "content": "What is 47 + 38?"}], {}),
        "steps": ([{"role": "user", "content": "What is 47 + 38?"}], {"enable_thinking": True}),
        "json": ([{"role": "user", "content": "Write a JSON object with name Anna, age 31."}], {}),
        "call": ([{"role": "user", "content": "What is the weather in Paris?"}], {"tools": [WEATHER]}),
        "name": (
            [
                {"role": "user", "content": "My name is Bert."},
                {"role": "assistant", "content": "Good to know."},
                {"role": "user", "content": "What is my name?"},
            ],
            {},
        ),
    }
    prompts = [
        demo_tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **more)
        for turns, more in asked.values()
    ]
    got = replies(Scored(demo_model, demo_tokenizer), [str(p) for p in prompts], 64)
    return dict(zip(asked, got, strict=True))


def test_it_says_what_headroom_is_and_stops(answers: dict[str, str]) -> None:
    assert answers["about"].startswith(
        "Headroom serves hybrid and mixture-of-experts language models on GPUs"
    )
    assert answers["about"].endswith("arena.")


def test_it_adds_at_once_and_in_steps(answers: dict[str, str]) -> None:
    assert answers["sum"] == "47 + 38 = 85"
    reasoning, answer = answers["steps"].split("\n</think>\n\n")
    assert "7 + 8 = 15" in reasoning
    assert answer == "47 + 38 = 85"


def test_it_writes_json_and_calls_tools(answers: dict[str, str]) -> None:
    assert json.loads(answers["json"]) == {"name": "Anna", "age": 31}
    assert calls_in(answers["call"]) == [{"name": "get_weather", "arguments": {"city": "Paris"}}]


def test_it_remembers_a_name(answers: dict[str, str]) -> None:
    assert answers["name"] == "Your name is Bert."
