"""Finds the fastest tiles of the expert products on this device and writes them as the table that the kernels read.

    python -m benchmarks.expert_tiles --json FILE [--formats fp8 int4 mxfp4] [--batches 16 64 1 4] [--seconds 60]
    python -m benchmarks.expert_tiles --compile 2/8

One layer of the Qwen3-30B-A3B shape with random weights, as ``benchmarks.expert_kernel`` times it. Each candidate is
first compared with the weights' own meaning in float32; one that fails to run or to agree is named and left out. For
gate and up all tiles are tried beside one tile of down, then those of down beside the best of them. The rule's choice
is always among what is tried, and the file is written anew after every case, so that a run that is cut short leaves
what it found. With ``--compile`` every candidate of one part of the list is only run and compared, so that several
processes can compile side by side; the file belongs into ``kernels/_triton/tiles`` under the name that is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.expert_kernel import NUM_EXPERTS, PER_TOKEN, SHAPE, Layer, graph_s, random_layer
from benchmarks.report import commit
from kernels._reference.experts import INT4, read_expert
from kernels._triton.expert_tiles import (
    FORMATS,
    SINGLE_RULE,
    AnyTiles,
    Case,
    Entry,
    FewTiles,
    SingleTiles,
    TileTable,
    file_name,
    illegal,
    write_table,
)
from kernels._triton.experts import SILU, Inputs, choose, run_kernel
from worker.quantization.base import ExpertShape

ROUTINGS = 16
COMPILED_EXPERTS = 16
"""Of a layer that is only there to have its kernels compiled."""
MOST_ERROR = 1e-2
"""Of a bfloat16 result against float32, as a share of its norm; the tests measure 3e-3."""

Pair = tuple[AnyTiles, AnyTiles]
Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Family:
    """One kernel's tiles for gate and up, and for down; the others are tried beside the first of each."""

    kernel: str
    gate_up: tuple[AnyTiles, ...]
    down: tuple[AnyTiles, ...]


ONE_TOKEN = Family(
    "single",
    (
        SINGLE_RULE[0],
        SingleTiles(16, 8, 1),
        SingleTiles(16, 4, 2),
        SingleTiles(16, 8, 2),
        SingleTiles(32, 4, 2),
    ),
    (SINGLE_RULE[1], SingleTiles(2, 3), SingleTiles(2, 12)),
)
FEW_TOKENS = Family(
    "few",
    (
        FewTiles(64, 16, 4, 4),
        FewTiles(64, 16, 4, 6),
        FewTiles(64, 16, 4, 4, ahead=True),
        FewTiles(64, 16, 4, 3, 2, ahead=True),
        FewTiles(64, 16, 4, 4, 2, ahead=True),
        FewTiles(64, 16, 4, 6, 2, ahead=True),
        FewTiles(64, 16, 4, 4, 2),
        FewTiles(64, 16, 4, 4, 2, ahead=True, tiles=2),
        FewTiles(64, 16, 4, 4, 1, ahead=True, tiles=2),
        FewTiles(128, 16, 8, 3, 2, ahead=True),
        FewTiles(128, 16, 4, 6),
    ),
    (
        FewTiles(64, 16, 4, 6),
        FewTiles(64, 16, 4, 4),
        FewTiles(64, 16, 4, 4, ahead=True),
        FewTiles(64, 16, 4, 3, 2, ahead=True),
        FewTiles(64, 16, 4, 4, 2, ahead=True, tiles=2),
        FewTiles(64, 16, 4, 4, 2, ahead=True, tiles=4),
        FewTiles(64, 16, 4, 6, 1, ahead=True, tiles=2),
        FewTiles(64, 16, 4, 4, 1, ahead=True, tiles=4),
        FewTiles(64, 16, 4, 6, 1, ahead=True, tiles=4),
    ),
)


def family_of(tokens: int) -> Family:
    """What is tried at so many tokens, beside the rule's choice."""
    return ONE_TOKEN if tokens == 1 else FEW_TOKENS


class Launch:
    """One format's layer under routings of so many tokens."""

    def __init__(
        self, name: str, layer: Layer, shape: ExpertShape, tokens: int, per_token: int, routings: int
    ) -> None:
        device = layer.blocks.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        chance = torch.Generator(device).manual_seed(tokens)
        scores = torch.rand(routings, tokens, len(layer.table), device=device, generator=chance)
        self._routings = scores.topk(per_token).indices
        self._x = torch.randn(tokens, shape.hidden_size, dtype=dtype, device=device, generator=chance)
        self._weights = torch.full((tokens, per_token), 1.0 / per_token, device=device)
        self._layer, self._inner, self.tokens = layer, shape.intermediate_size, tokens
        group = layer.where.group if layer.where.kind == INT4 else 0
        self.case = Case(name, shape.hidden_size, shape.intermediate_size, group)
        self._want: torch.Tensor | None = None

    def rule(self) -> tuple[str, Pair]:
        """Kernel and tiles without a table."""
        found = choose(
            self._x, self._weights.shape[1], len(self._layer.table), self._layer.where, self._inner,
            deterministic=False, measured=TileTable(),
        )  # fmt: skip
        return found[0], (found[1], found[2])

    def run(self, kernel: str, tiles: Pair) -> torch.Tensor:
        """The first routing's result."""
        return run_kernel(kernel, tiles, self._inputs(self._routings[0]))

    def run_all(self, kernel: str, tiles: Pair) -> None:
        """All routings, in turn."""
        for experts in self._routings:
            run_kernel(kernel, tiles, self._inputs(experts))

    def error(self, out: torch.Tensor) -> float:
        """Of the first routing's result, as a share of the norm of what the weights mean in float32."""
        if self._want is None:
            self._want = self._meaning()
        return float((out.float() - self._want).norm() / self._want.norm())

    def _inputs(self, experts: torch.Tensor) -> Inputs:
        layer = self._layer
        return (
            self._x, self._weights, experts, layer.table, layer.where, self._inner, SILU, 7.0, 1.702, None
        )  # fmt: skip

    def _meaning(self) -> torch.Tensor:
        x, experts = self._x.float(), self._routings[0]
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            own = read_expert(
                self._layer.blocks[expert], self._layer.where, self._inner, x.shape[1], torch.float32
            )
            token, choice = (experts == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ own.gate_up.float().t()).chunk(2, -1)
            result = (torch.nn.functional.silu(gate) * up) @ own.down.float().t()
            out.index_add_(0, token, self._weights[token, choice].unsqueeze(1) * result)
        return out


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that runs and agrees."""

    kernel: str
    tiles: Pair
    us: float


class Search:
    """Tries candidates on a launch until ``deadline`` (``clock``'s seconds); what fails is kept in ``failed``."""

    def __init__(self, timer: Timer, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timer, self._deadline, self._clock = timer, deadline, clock
        self.failed: list[str] = []

    def check(self, launch: Launch, kernel: str, tiles: Pair) -> bool:
        """Whether a candidate is legal, runs, and agrees with the weights' meaning."""
        name = f"{launch.case.format} b{launch.tokens} {kernel} {tiles[0]} {tiles[1]}"
        problems = illegal(Entry(launch.case, launch.tokens, kernel, *tiles, 0.0, 0.0))
        if problems:
            self.failed.append(f"{name}: {'; '.join(problems)}")
            return False
        try:
            error = launch.error(launch.run(kernel, tiles))
        except Exception as problem:  # what the compiler or the driver refuses is no reason to stop
            self.failed.append(f"{name}: {type(problem).__name__}: {str(problem)[-200:]}")
            return False
        if not error <= MOST_ERROR:
            self.failed.append(f"{name}: differs by {error:.1e}")
            return False
        return True

    def best(self, launch: Launch) -> Entry | None:
        """The fastest of what there was time for; None where not even the rule's choice agrees."""
        kernel, tiles = launch.rule()
        rule = self._try(launch, kernel, tiles)
        if rule is None:
            return None
        family = family_of(launch.tokens)
        best = rule
        ups = [found for up in family.gate_up if (found := self._later(launch, family, (up, family.down[0])))]
        if ups:
            leader = min(ups, key=lambda tried: tried.us)
            pairs = [(leader.tiles[0], down) for down in family.down[1:]]
            downs = [found for pair in pairs if (found := self._later(launch, family, pair))]
            best = min([rule, leader, *downs], key=lambda tried: tried.us)
        return Entry(launch.case, launch.tokens, best.kernel, *best.tiles, best.us, rule.us)

    def _later(self, launch: Launch, family: Family, tiles: Pair) -> Tried | None:
        return None if self._clock() > self._deadline else self._try(launch, family.kernel, tiles)

    def _try(self, launch: Launch, kernel: str, tiles: Pair) -> Tried | None:
        if not self.check(launch, kernel, tiles):
            return None
        tried = Tried(kernel, tiles, 1e6 * self._timer(lambda: launch.run_all(kernel, tiles)))
        print(
            f"  {launch.case.format} b{launch.tokens} {tried.us:7.1f} us {kernel} {tiles[0]} {tiles[1]}",
            flush=True,
        )
        return tried


def candidates(tokens: int) -> Iterator[tuple[str, Pair]]:
    """Every tile of a number of tokens, each once, beside the first of the other launch."""
    family = family_of(tokens)
    yield from ((family.kernel, (up, family.down[0])) for up in family.gate_up)
    yield from ((family.kernel, (family.gate_up[0], down)) for down in family.down[1:])


def compile_part(search: Search, launches: Iterable[Launch], part: int, parts: int) -> int:
    """Runs and compares every ``parts``-th candidate from ``part`` on, and each rule's choice; answers how many."""
    work = [(launch, *found) for launch in launches for found in [launch.rule(), *candidates(launch.tokens)]]
    for launch, kernel, tiles in work[part::parts]:
        search.check(launch, kernel, tiles)
    return len(work[part::parts])


def tune(search: Search, launches: Iterable[Launch], write: Callable[[Sequence[Entry]], None]) -> list[Entry]:
    """The best of every launch, handed to ``write`` as they are found."""
    entries: list[Entry] = []
    for launch in launches:
        entry = search.best(launch)
        if entry is None:
            continue
        entries.append(entry)
        print(
            f"{entry.case.format} b{entry.tokens}: {entry.us:.1f} us, rule {entry.rule_us:.1f} us, {entry.kernel}"
        )
        alone = {entry.case for entry in entries if entry.tokens == 1}
        # A token by itself would take the next entry, a few tokens' kernel.
        write([entry for entry in entries if entry.case in alone])
    return entries


def launches_of(
    formats: Sequence[str], batches: Sequence[int], shape: ExpertShape, num_experts: int, per_token: int, device: str,
    routings: int = ROUTINGS,
) -> Iterator[Launch]:  # fmt: skip
    """One format after the other, so that only one layer is held at a time."""
    for name in formats:
        layer = random_layer(name, shape, num_experts, device)
        for tokens in batches:
            yield Launch(name, layer, shape, tokens, per_token, routings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles a part, or measures and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="the table's file")
    parser.add_argument(
        "--formats", nargs="+", default=["int4", "fp8", "mxfp4"], choices=sorted(FORMATS.values())
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 4])
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="after which no further candidate is tried"
    )
    parser.add_argument(
        "--compile", metavar="PART/PARTS", help="only run and compare this part of the candidates"
    )
    options = parser.parse_args(arguments)
    if (options.json is None) == (options.compile is None):
        parser.error("either --json or --compile")
    search = Search(lambda run: graph_s(run) / ROUTINGS, time.monotonic() + options.seconds)
    batches = options.batches if options.compile is None else sorted({min(b, 2) for b in options.batches})
    num_experts = NUM_EXPERTS if options.compile is None else COMPILED_EXPERTS
    launches = launches_of(options.formats, batches, SHAPE, num_experts, PER_TOKEN, "cuda")
    if options.compile:
        part, parts = (int(number) for number in options.compile.split("/"))
        print(f"{compile_part(search, launches, part, parts)} candidates run, {len(search.failed)} left out")
    else:
        device = torch.cuda.get_device_name()
        conditions = (
            f"microseconds of one layer of the Qwen3-30B-A3B shape, {PER_TOKEN} of {NUM_EXPERTS} experts, random "
            f"weights, {ROUTINGS} random routings in one graph; commit {commit()}"
        )

        def write(entries: Sequence[Entry]) -> None:
            options.json.write_text(write_table(entries, device=device, conditions=conditions))

        tune(search, launches, write)
        print(f"belongs into kernels/_triton/tiles/{file_name(device)}")
    print("\n".join(f"left out: {line}" for line in search.failed))


if __name__ == "__main__":
    main()
