"""Scores of the demonstration model on data it was not trained on: held-out books and held-out dialogues.

Every function runs stock transformers (with the windows applied); a dialogue is scored by its greedy reply.
"""

from __future__ import annotations

import bz2
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import MtpModel

from demo import corpus
from demo.expert_routing import equal_lengths
from demo.tasks import arithmetic, conversation, copying, retrieval, structured, tools
from demo.tasks.sample import Sample, draw
from demo.vocabulary import IM_END
from worker.models.transformers_window import caching_works

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Scored:
    """A loaded model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def bytes_of_ids(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each id stands for: in byte-level BPE one character of a token is one byte."""
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, number in tokenizer.get_vocab().items():
        sizes[number] = len(token)
    return sizes


def bzip2_bits_per_byte(data: Path, name: str) -> float:
    """What ``bzip2 -9`` needs for the same books, in bits per byte."""
    text = "\x1e".join(corpus.books(data, name)).encode()
    return 8 * len(bz2.compress(text, 9)) / len(text)


@torch.no_grad()
def bits_per_byte(scored: Scored, data: Path, window: int, every: int, batch: int = 8) -> tuple[float, int]:
    """Bits per byte on the held-out books, and the tokens scored.

    Each book is cut into windows of ``window`` tokens, of which every ``every``-th is read from nothing; its first
    token, which nothing predicts, counts neither as bits nor as bytes.
    """
    tokenizer = scored.tokenizer.backend_tokenizer
    sizes = bytes_of_ids(tokenizer)
    windows = []
    for text in corpus.books(data, "books_valid"):
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
        windows += [ids[n : n + window] for n in range(0, len(ids) - window + 1, window * every)]
    nats, num_bytes, num_tokens = 0.0, 0, 0
    for first in range(0, len(windows), batch):
        rows = torch.from_numpy(np.stack(windows[first : first + batch])).to(scored.model.device)
        logits = scored.model(rows, use_cache=False).logits[:, :-1].float()
        nats += float(functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
        num_bytes += int(sizes[rows[:, 1:].cpu().numpy()].sum())
        num_tokens += rows[:, 1:].numel()
    return nats / math.log(2) / num_bytes, num_tokens


def prompt_of(scored: Scored, sample: Sample, thinking: bool = False) -> str:
    """The dialogue without its last reply, as the chat template writes it."""
    text = scored.tokenizer.apply_chat_template(
        sample.messages[:-1],
        tools=sample.tools,
        add_generation_prompt=True,
        enable_thinking=thinking,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text


@torch.no_grad()
def replies(scored: Scored, prompts: Sequence[str], most: int, batch: int = 25) -> list[str]:
    """Greedy replies of at most ``most`` tokens, marks kept and control tokens dropped, in the order of the prompts."""
    scored.tokenizer.padding_side = "left"
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    out = [""] * len(prompts)
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        inputs = scored.tokenizer([prompts[n] for n in chosen], return_tensors="pt", padding=True)
        inputs = inputs.to(scored.model.device)
        made = scored.model.generate(
            **inputs, max_new_tokens=most, do_sample=False, use_cache=caching_works()
        )
        texts = scored.tokenizer.batch_decode(
            made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for n, text in zip(chosen, texts, strict=True):
            out[n] = text
    return out


def copies(scored: Scored, count: int, seed: int) -> float:
    """Exact copies of held-out strings whose prompt and reply fit in one attention window of 128 tokens."""
    rng, samples = Random(seed), []
    while len(samples) < count:
        sample = draw(copying.copy, rng, scoring=True)
        whole = prompt_of(scored, sample) + sample.answer
        if len(scored.tokenizer(whole)["input_ids"]) < 128:
            samples.append(sample)
    got = replies(scored, [prompt_of(scored, s) for s in samples], 100, batch=50)
    return sum(text == s.answer for text, s in zip(got, samples, strict=True)) / count


def retrieved(
    scored: Scored, sources: corpus.Sources, count: int, distance: int, most_tokens: int, seed: int
) -> float:
    """Held-out codes found again at least ``distance`` tokens later; the filler is held-out book text."""
    rng, samples = Random(seed), []
    while len(samples) < count:
        text = corpus.filler(rng, sources, distance * 5 + 2000)
        target = int(distance * 1.12)
        sample = draw(lambda r, t=text, n=target: retrieval.one_fact(r, t, n), rng, scoring=True)
        prompt = prompt_of(scored, sample)
        after = prompt[prompt.index(sample.key) + len(sample.key) :]
        between = after[: after.rindex("What is the secret code")]
        if len(scored.tokenizer(between)["input_ids"]) >= distance:
            samples.append((prompt, sample.answer))
    got = replies(scored, [prompt for prompt, _ in samples], most_tokens, batch=4)
    return sum(answer in text for text, (_, answer) in zip(got, samples, strict=True)) / count


def calls_in(text: str) -> list[dict[str, object]] | None:
    """Tool calls of a reply; None where one is not an object with a name and arguments."""
    found = []
    for body in CALL.findall(text):
        try:
            call = json.loads(body)
        except json.JSONDecodeError:
            return None
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            return None
        found.append(call)
    return found


def fits(value: object, schema: dict[str, object]) -> bool:
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError:
        return False
    return True


def tool_calls(scored: Scored, count: int, seed: int) -> tuple[float, float]:
    """Held-out requests answered by calls that their tools' schemas accept; and by exactly the call asked for."""
    rng = Random(seed)
    samples = [draw(tools.one_call, rng, scoring=True) for _ in range(count)]
    got = replies(scored, [prompt_of(scored, s) for s in samples], 120)
    valid = right = 0
    for text, sample in zip(got, samples, strict=True):
        assert sample.tools is not None
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        made = calls_in(text)
        if made and all(c["name"] in schemas and fits(c["arguments"], schemas[c["name"]]) for c in made):
            valid += 1
            right += made == [json.loads(sample.answer)]
    return valid / count, right / count


def json_answers(scored: Scored, count: int, seed: int) -> tuple[float, float]:
    """Held-out objects: replies that parse and fit the schema in the request; and that hold the right values."""
    rng = Random(seed)
    samples = [draw(structured.from_schema, rng, scoring=True) for _ in range(count)]
    got = replies(scored, [prompt_of(scored, s) for s in samples], 120)
    valid = right = 0
    for text, sample in zip(got, samples, strict=True):
        rule = next(str(m["content"]) for m in sample.messages if "schema:\n" in str(m["content"]))
        schema = json.JSONDecoder().raw_decode(rule.split("schema:\n")[1])[0]
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            continue
        if fits(value, schema):
            valid += 1
            right += value == json.loads(sample.answer)
    return valid / count, right / count


def sums(scored: Scored, count: int, thinking: bool, seed: int) -> float:
    """Held-out sums of two two-digit numbers with the right result, answered at once or after written steps."""
    rng = Random(seed)
    samples = [draw(arithmetic.two_digit_sum, rng, scoring=True) for _ in range(count)]
    got = replies(
        scored, [prompt_of(scored, s, thinking) for s in samples], 120 if thinking else 30, batch=50
    )
    last = [re.findall(r"\d+", text.rsplit("</think>", 1)[-1])[-1:] for text in got]
    return sum(found == [s.answer] for found, s in zip(last, samples, strict=True)) / count


def facts(scored: Scored) -> float:
    """First wording of each question about Headroom answered word for word."""
    asked = [Sample("", "", [{"role": "user", "content": q[0]}, {}], None, a) for q, a in conversation.FACTS]
    got = replies(scored, [prompt_of(scored, s) for s in asked], 80)
    return sum(text == s.answer for text, s in zip(got, asked, strict=True)) / len(asked)


def held_out_texts(
    scored: Scored, data: Path, documents: int, tokens: int, chats: int
) -> Iterator[tuple[list[int], bool]]:
    """Token ids of held-out passages and of held-out dialogues (True), for routing and draft scores."""
    encode = scored.tokenizer.backend_tokenizer.encode
    books = corpus.books(data, "books_valid")
    rng = Random(11)
    for n in range(documents):
        text = books[n % len(books)]
        spot = text.index(" ", rng.randrange(len(text) - tokens * 8)) + 1
        yield encode(text[spot : spot + tokens * 8], add_special_tokens=False).ids[:tokens], False
    groups = (arithmetic, copying, structured, conversation) * 2 + (conversation, tools)
    for n in range(chats):
        makers = groups[n % len(groups)].MAKERS
        sample = draw(rng.choices(list(makers), list(makers.values()))[0], rng, scoring=True)
        text = scored.tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
        yield encode(str(text), add_special_tokens=False).ids, True


@torch.no_grad()
def mtp_agreement(scored: Scored, texts: Sequence[tuple[list[int], bool]]) -> tuple[float, float]:
    """Share of positions where the draft layer's best token is the model's own: in dialogues, and in books.

    The draft guesses the token after next from the hidden state and the next token; the model says it one step later
    with the same tokens behind it. In dialogues only what the assistant writes counts.
    """
    model = scored.model
    draft = MtpModel.from_pretrained(model).to(model.device).eval()
    header = scored.tokenizer.backend_tokenizer.encode(
        "<|im_start|>assistant\n", add_special_tokens=False
    ).ids
    same: dict[bool, list[Tensor]] = {True: [], False: []}
    for numbers in equal_lengths([ids for ids, _ in texts]):
        rows = torch.tensor([texts[n][0] for n in numbers], device=model.device)
        hidden = model.get_decoder()(input_ids=rows, use_cache=False).last_hidden_state
        chosen = model.lm_head(hidden).argmax(-1)
        positions = torch.arange(1, rows.shape[1], device=model.device).expand(len(numbers), -1)
        guess = draft.forward_layer(0, hidden[:, :-1], positions, None, input_ids=rows[:, 1:])
        equal = (model.lm_head(guess).argmax(-1)[:, :-1] == chosen[:, 1:-1]).cpu()
        for n, row in zip(numbers, equal, strict=True):
            ids, is_chat = texts[n]
            counted = written(ids, header) if is_chat else np.ones(len(ids), dtype=bool)
            same[is_chat].append(row[torch.from_numpy(counted[2:])])
    return float(torch.cat(same[True]).float().mean()), float(torch.cat(same[False]).float().mean())


def written(ids: Sequence[int], header: Sequence[int]) -> np.ndarray:
    """Marks the tokens of the assistant's replies."""
    marks, inside = np.zeros(len(ids), dtype=bool), False
    for n in range(len(ids)):
        if list(ids[n - len(header) : n]) == list(header):
            inside = True
        marks[n] = inside
        inside = inside and ids[n] != IM_END
    return marks
