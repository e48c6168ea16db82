"""Records which experts a model chooses for given texts, and replays the record against caches of experts.

A record is a folder with one ``routing.npz``: per text its token ids and, for each layer and token, the chosen set of
experts as its rank among all sets of that size (two bytes instead of four).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Record:
    """Routing of several texts. ``chosen`` is [layers, tokens, experts_per_token], ascending expert numbers.

    ``ids`` [tokens] joins the texts; ``ends`` [texts] says where each stops; ``is_chat`` [texts] tells chats from
    documents.
    """

    ids: np.ndarray
    ends: np.ndarray
    is_chat: np.ndarray
    chosen: np.ndarray
    num_experts: int

    def texts(self, chats: bool) -> list[slice]:
        """Token ranges of the chats, or of the documents."""
        starts = [0, *self.ends[:-1].tolist()]
        pairs = zip(starts, self.ends.tolist(), self.is_chat.tolist(), strict=True)
        return [slice(a, b) for a, b, chat in pairs if bool(chat) == chats]


def rank_sets(chosen: np.ndarray) -> np.ndarray:
    """Rank of each ascending set (last axis) in the combinatorial number system, as uint16."""
    ranks = np.zeros(chosen.shape[:-1], dtype=np.int64)
    for place in range(chosen.shape[-1]):
        table = np.array([comb(n, place + 1) for n in range(int(chosen.max()) + 1)])
        ranks += table[chosen[..., place]]
    if ranks.max() > np.iinfo(np.uint16).max:
        raise ValueError("these sets have more than 65,536 possibilities: a rank does not fit two bytes")
    return ranks.astype(np.uint16)


def unrank_sets(ranks: np.ndarray, size: int, num_experts: int) -> np.ndarray:
    """Inverse of ``rank_sets``: ascending sets of ``size`` as uint8 on a new last axis."""
    left = ranks.astype(np.int64)
    out = np.zeros((*ranks.shape, size), dtype=np.uint8)
    for place in range(size - 1, -1, -1):
        table = np.array([comb(n, place + 1) for n in range(num_experts)])
        picked = np.searchsorted(table, left, side="right") - 1
        out[..., place] = picked
        left -= table[picked]
    return out


def equal_lengths(texts: Sequence[Sequence[int]], most: int = 64) -> Iterator[list[int]]:
    """Numbers of texts of one length, at most ``most`` at a time: such a batch needs no padding."""
    groups: dict[int, list[int]] = {}
    for n, ids in enumerate(texts):
        groups.setdefault(len(ids), []).append(n)
    for numbers in groups.values():
        for first in range(0, len(numbers), most):
            yield numbers[first : first + most]


@torch.no_grad()
def record(model: PreTrainedModel, texts: Sequence[Sequence[int]], is_chat: Sequence[bool]) -> Record:
    """Runs each text through the model from an empty state and takes the router's choices."""
    size = model.config.num_experts_per_tok
    parts: list[np.ndarray] = [np.empty(0)] * len(texts)
    for numbers in equal_lengths(texts):
        batch = torch.tensor([list(texts[n]) for n in numbers], device=model.device)
        logits = model(batch, use_cache=False, output_router_logits=True, logits_to_keep=1).router_logits
        picked = torch.stack([layer.float().softmax(-1).topk(size, dim=-1).indices for layer in logits])
        sets = picked.sort(-1).values.unflatten(1, batch.shape).to("cpu", torch.uint8).numpy()
        for place, n in enumerate(numbers):
            parts[n] = sets[:, place]
    lengths = [len(ids) for ids in texts]
    return Record(
        ids=np.concatenate([np.array(ids, dtype=np.uint16) for ids in texts]),
        ends=np.cumsum(lengths).astype(np.int32),
        is_chat=np.array(is_chat, dtype=bool),
        chosen=np.concatenate(parts, axis=1),
        num_experts=model.config.num_experts,
    )


def save(what: Record, folder: Path) -> None:
    """Writes ``folder/routing.npz``."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / "routing.npz",
        ids=what.ids,
        ends=what.ends,
        is_chat=what.is_chat,
        ranks=rank_sets(what.chosen),
        shape=np.array([what.chosen.shape[-1], what.num_experts]),
    )


def load(folder: Path) -> Record:
    """Reads what ``save`` wrote."""
    with np.load(folder / "routing.npz") as file:
        size, experts = file["shape"].tolist()
        chosen = unrank_sets(file["ranks"], size, experts)
        return Record(file["ids"], file["ends"], file["is_chat"], chosen, experts)


def loads(what: Record) -> np.ndarray:
    """Share of the choices that each expert got, over its fair share: [layers, experts]."""
    layers, tokens, size = what.chosen.shape
    counts = np.stack([np.bincount(layer.ravel(), minlength=what.num_experts) for layer in what.chosen])
    assert counts.shape[0] == layers
    return counts * what.num_experts / (tokens * size)


def reuse(what: Record, chats: bool) -> float:
    """Mean share of a token's experts that the token before it chose too, over layers and neighbours in a text."""
    kept, size = [], what.chosen.shape[-1]
    for span in what.texts(chats):
        for layer in what.chosen[:, span]:
            kept += [len(set(a) & set(b)) / size for a, b in pairwise(layer.tolist())]
    return float(np.mean(kept))


def lru_hit_rate(what: Record, chats: bool, capacity: int) -> float:
    """Share of hits when each layer keeps its ``capacity`` most recently used experts, texts one after another."""
    hits = uses = 0
    for layer in what.chosen:
        kept: OrderedDict[int, None] = OrderedDict()
        for span in what.texts(chats):
            for token in layer[span].tolist():
                for expert in token:
                    uses += 1
                    if expert in kept:
                        hits += 1
                        kept.move_to_end(expert)
                    else:
                        kept[expert] = None
                        if len(kept) > capacity:
                            kept.popitem(last=False)
    return hits / uses
