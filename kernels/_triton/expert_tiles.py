"""Chooses the tiles of a launch of expert products: those measured on this device where there are any, else a rule.

What was measured is data: a file per device name under ``tiles``, which ``benchmarks.expert_tiles`` writes. The rule is
for devices, formats and widths that no file lists. A deterministic launch always takes the rule's tiles: its results
must not depend on the number of tokens, nor on a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from kernels._reference.experts import DENSE, FP8_BLOCK, FP8_BLOCK_SIZE, INT4, MXFP4

FORMATS = {DENSE: "bf16", FP8_BLOCK: "fp8", INT4: "int4", MXFP4: "mxfp4"}
SHARED_BYTES = 232_448 - 4_096
"""Of a multiprocessor's shared memory that a program's stages may take (compute capability 9), less what else lies
there."""
DECODE_TOKENS = 64
"""Up to so many tokens a launch is bound by reading weights, beyond it by multiplying."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The general kernels' tile, and the row dots': output rows, columns of the contraction (for row dots groups of 128
    of them, in MXFP4 of 32), tokens."""

    rows: int
    columns: int
    tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class FewTiles:
    """A few tokens' tile: output rows (in the first launch half of them gate's, half up's), tokens, spans of a step,
    and tiles that a program walks through. ``ahead``: scales are read a step before they are used, and the second
    launch finds its experts before it waits for the first."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    spans: int = 1
    ahead: bool = False
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class SingleTiles:
    """A warp's tile for one token on tensor cores. First launch: rows, half of them gate's, spans of a step, stages.
    Second: rows of each choice, and in ``num_stages`` the spans that are under way (``spans`` is 1)."""

    rows: int
    num_stages: int
    spans: int = 1


@dataclass(frozen=True, slots=True)
class WideTiles:
    """Many tokens' tile: tokens, output rows (of gate and of up each), columns of the contraction."""

    tokens: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int


AnyTiles = Tiles | FewTiles | SingleTiles | WideTiles
KERNELS: dict[str, type[Any]] = {
    "one": Tiles,
    "single": SingleTiles,
    "few": FewTiles,
    "many": Tiles,
    "wide": WideTiles,
}

ONE_RULE = {
    DENSE: (Tiles(1, 4, 1, 2, 1), Tiles(1, 2, 1, 2, 1)),
    FP8_BLOCK: (Tiles(2, 16, 1, 4, 1), Tiles(1, 2, 1, 2, 1)),
    INT4: (Tiles(8, 2, 1, 2, 1), Tiles(8, 8, 1, 4, 1)),
    MXFP4: (Tiles(4, 16, 1, 4, 1), Tiles(2, 8, 1, 2, 1)),
}
FEW_RULE = {
    FP8_BLOCK: (FewTiles(128, 16, 4, 6), FewTiles(64, 16, 4, 6)),
    INT4: (FewTiles(128, 16, 4, 6), FewTiles(64, 16, 4, 4)),
    MXFP4: (FewTiles(64, 16, 4, 4, 2), FewTiles(64, 16, 4, 4, 2)),
}
SINGLE_RULE = (SingleTiles(16, 6, 2), SingleTiles(2, 6))
NARROW_TOKENS, MIDDLE_TOKENS = 24, 48
"""Tokens that an expert has on average up to which wide tiles of 32 and of 64 tokens were the fastest on an H200."""


def general_rule(kind: int, tokens: int, *, deterministic: bool) -> tuple[Tiles, Tiles]:
    """The general kernels' tiles: small ones where reading weights is all the time, wide ones where multiplying is.
    Found by trying all on an H200 with the Qwen3-30B-A3B shape."""
    if deterministic:
        tiles = Tiles(64, 128, 32, 4, 3)
    elif tokens <= DECODE_TOKENS:
        tiles = {
            DENSE: Tiles(64, 128, 16, 4, 3),
            FP8_BLOCK: Tiles(128, 128, 16, 4, 3),
            INT4: Tiles(64, 128, 16, 4, 3),
            MXFP4: Tiles(64, 128, 16, 4, 5),
        }[kind]
    else:
        tiles = Tiles(128, 64, 128, 8, 3) if kind == DENSE else Tiles(64, 128, 64, 4, 3)
    return tiles, tiles


def wide_rule(element_size: int, per_expert: float) -> tuple[WideTiles, WideTiles]:
    """Many tokens' tiles by the tokens that an expert has on average: narrow ones while reading weights takes longer
    than multiplying. Wide dtypes take a quarter of the room."""
    if element_size > 2:
        return (WideTiles(32, 32, 32, 4, 2),) * 2
    if per_expert <= NARROW_TOKENS:
        return (WideTiles(32, 128, 64, 4, 4),) * 2
    if per_expert <= MIDDLE_TOKENS:
        return (WideTiles(64, 128, 64, 8, 4),) * 2
    return WideTiles(128, 128, 64, 8, 3), WideTiles(128, 256, 64, 8, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """What tiles depend on: a format (and for INT4 the inputs that share a scale, else 0), H and I."""

    format: str
    hidden: int
    inner: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """Kernel and tiles for launches of up to ``tokens`` tokens of a case; ``us``: what was measured at that number,
    ``rule_us``: what the rule's tiles took in the same run."""

    case: Case
    tokens: int
    kernel: str
    gate_up: AnyTiles
    down: AnyTiles
    us: float
    rule_us: float


class TileTable:
    """The entries of one device."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        """ValueError, naming all of them, where tiles cannot run or two entries speak of the same launch."""
        self._entries: dict[Case, list[Entry]] = {}
        problems = []
        for entry in sorted(entries, key=lambda entry: entry.tokens):
            own = self._entries.setdefault(entry.case, [])
            if own and own[-1].tokens == entry.tokens:
                problems.append(f"{entry.case}, {entry.tokens} tokens: listed twice")
            problems += [f"{entry.case}, {entry.tokens} tokens: {problem}" for problem in illegal(entry)]
            own.append(entry)
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def entries(self) -> list[Entry]:
        """All of them."""
        return [entry for own in self._entries.values() for entry in own]

    def find(self, case: Case, tokens: int) -> Entry | None:
        """The entry with the smallest number of tokens that is not below; None where the rule is to decide."""
        return next((entry for entry in self._entries.get(case, ()) if entry.tokens >= tokens), None)


def illegal(entry: Entry) -> list[str]:
    """What is wrong with an entry: the reasons for which its tiles could not run."""
    kind = next((kind for kind, name in FORMATS.items() if name == entry.case.format), None)
    if kind is None:
        return [f"there is no format {entry.case.format!r}"]
    problems = []
    if entry.kernel in ("one", "single") and entry.tokens != 1:
        problems.append(f"a kernel {entry.kernel!r} serves one token")
    for name, tiles, columns in (
        ("gate_up", entry.gate_up, entry.case.hidden),
        ("down", entry.down, entry.case.inner),
    ):
        if type(tiles) is not KERNELS.get(entry.kernel):
            problems.append(f"{name}: {type(tiles).__name__} are no tiles of a kernel {entry.kernel!r}")
            continue
        sizes = [value for field in fields(tiles) if type(value := getattr(tiles, field.name)) is int]
        if any(size < 1 for size in sizes):
            problems.append(f"{name}: a size is below 1")
        elif any(
            getattr(tiles, size, 1).bit_count() != 1 for size in ("rows", "columns", "tokens", "num_warps")
        ):
            problems.append(f"{name}: rows, columns, tokens and warps are powers of two")
        else:
            found = _unfit(entry.kernel, tiles, kind, entry.case.group, columns, is_down=name == "down")
            problems += [f"{name}: {problem}" for problem in found]
    return problems


def _unfit(kernel: str, tiles: AnyTiles, kind: int, group: int, columns: int, *, is_down: bool) -> list[str]:
    """What keeps a tile from this format at so many columns of the contraction."""
    bits = {DENSE: 16, FP8_BLOCK: 8}.get(kind, 4)
    group = {FP8_BLOCK: FP8_BLOCK_SIZE, INT4: group, MXFP4: 32}.get(kind, columns)
    problems = []
    if isinstance(tiles, FewTiles | SingleTiles):
        whole = {FP8_BLOCK: 16, INT4: 32, MXFP4: 64}.get(kind)
        if whole is None or columns % whole:
            problems.append(f"rows of {columns} weights do not lie in whole pieces")
        elif kind == INT4 and group % 128 and group < columns:
            problems.append(f"a span of 128 columns is not within groups of {group}")
        if tiles.spans not in (1, 2):
            problems.append("a step has one span or two")
    if isinstance(tiles, FewTiles):
        if tiles.rows < 16 * tiles.num_warps or tiles.num_warps % 4 or tiles.tokens < 16:
            problems.append("sixteen rows at least for a warp, warps by fours, sixteen tokens")
        step = 64 * tiles.spans * tiles.rows + (1024 // bits) * tiles.spans * tiles.tokens
        shared = (tiles.num_stages - 1) * step
    elif isinstance(tiles, SingleTiles):
        if not is_down and tiles.rows not in (16, 32):
            problems.append("a warp has 16 rows or 32")
        shared = 0 if is_down else tiles.num_stages * 64 * tiles.spans * tiles.rows
    elif kernel == "one":
        assert isinstance(tiles, Tiles)
        if kind >= INT4 and (group.bit_count() != 1 or not 32 <= group <= 256):
            problems.append(f"groups of {group} do not make a tile")
        if kind == FP8_BLOCK and FP8_BLOCK_SIZE % tiles.rows:
            problems.append("rows do not divide a block of scales")
        shared = 0
    elif isinstance(tiles, Tiles):
        if kind != DENSE and group % tiles.columns:
            problems.append(f"{tiles.columns} columns do not divide groups of {group}")
        if tiles.rows < 16 or tiles.tokens < 16 or tiles.columns < (32 if kind >= INT4 else 16):
            problems.append("a tile is smaller than a tensor core's")
        shared = tiles.num_stages * tiles.columns * (tiles.rows * bits // 8 + 2 * tiles.tokens)
    else:
        if min(tiles.rows, tiles.tokens, tiles.columns) < 16:
            problems.append("a tile is smaller than a tensor core's")
        both = tiles.rows if is_down else 2 * tiles.rows
        shared = tiles.num_stages * tiles.columns * 2 * (both + tiles.tokens)
    if shared > SHARED_BYTES:
        problems.append(f"{shared} bytes of stages are more than shared memory's {SHARED_BYTES}")
    return problems


def read_table(text: str) -> TileTable:
    """A file's table; ValueError where it is malformed."""
    try:
        return TileTable(_entry(entry) for entry in json.loads(text)["entries"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no table of tiles: {error!r}") from error


def _entry(found: Mapping[str, Any]) -> Entry:
    expected = {"format", "hidden", "inner", "group", "tokens", "kernel", "gate_up", "down", "us", "rule_us"}
    if set(found) != expected:
        raise ValueError(f"an entry has {sorted(set(found) ^ expected)} too much or too little")
    kind = KERNELS.get(found["kernel"])
    if kind is None:
        raise ValueError(f"there is no kernel {found['kernel']!r}; there are {sorted(KERNELS)}")
    numbers = [found[name] for name in ("hidden", "inner", "group", "tokens")]
    for name, value in (*enumerate(numbers), *found["gate_up"].items(), *found["down"].items()):
        if type(value) is not (bool if name == "ahead" else int):
            raise ValueError(f"{name}={value!r} is no size")
    case = Case(found["format"], found["hidden"], found["inner"], found["group"])
    gate_up, down = kind(**found["gate_up"]), kind(**found["down"])
    return Entry(
        case, found["tokens"], found["kernel"], gate_up, down, float(found["us"]), float(found["rule_us"])
    )


def write_table(entries: Iterable[Entry], **conditions: str) -> str:
    """A file's text; ``conditions`` say how it was measured."""
    listed = []
    for entry in sorted(entries, key=lambda entry: (entry.case.format, entry.tokens)):
        tiles = {"gate_up": asdict(entry.gate_up), "down": asdict(entry.down)}
        times = {"us": round(entry.us, 2), "rule_us": round(entry.rule_us, 2)}
        listed.append(
            {**asdict(entry.case), "tokens": entry.tokens, "kernel": entry.kernel, **tiles, **times}
        )
    return json.dumps({**conditions, "entries": listed}, indent=1) + "\n"


def file_name(device: str) -> str:
    """The name of a device's file."""
    return "".join(letter if letter.isalnum() else "_" for letter in device) + ".json"


@cache
def table_of(device: str) -> TileTable:
    """The table of a device by its name, read once; empty where there is none."""
    path = Path(__file__).parent / "tiles" / file_name(device)
    try:
        return read_table(path.read_text())
    except FileNotFoundError:
        return TileTable()
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
