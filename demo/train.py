"""Trains the demonstration model on one GPU from the files that ``demo.prepare tokens`` wrote.

    python -m demo.train --work WORK --out OUT --seconds 1050 --stop-after 500
    python -m demo.train --work WORK --out OUT --stop-after 560 --resume

The first command measures its own speed and fixes the number of steps that fill --seconds (or takes --steps); later
ones go on from WORK/state.pt. OUT receives the checkpoint, at the end packed as well (as the repository
keeps it), and log.jsonl, which the model card's curves show.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo import checkpoint, optimizer, packing
from demo.architecture import Shape, num_parameters
from demo.network import Function, Losses, Network

MARK = 0x7FFF
MEASURED_STEPS = 150


@dataclass(frozen=True)
class Plan:
    """What one training run does; weights are of tokens as targets, shares of rows."""

    rows: int = 16
    length: int = 4096
    warmup: int = 200
    floor: float = 0.02
    task_share: float = 0.375
    late_task_share: float = 0.5
    late_from: float = 0.7
    written_weight: float = 3.0
    read_weight: float = 0.1
    mtp: float = 0.3
    balance: float = 0.02
    router_z: float = 1e-3
    seed: int = 0


class Feed:
    """Draws batches of rows and target weights on the device, a function of (seed, step) alone."""

    def __init__(self, work: Path, plan: Plan, device: str) -> None:
        self._plan, self._device = plan, device
        self._books = torch.from_numpy(np.load(work / "books.npy").view(np.int16)).to(device)
        self._tasks = torch.from_numpy(np.load(work / "tasks.npy").view(np.int16)).to(device)
        self._span = torch.arange(plan.length + 2, device=device)

    def batch(self, step: int, progress: float) -> tuple[Tensor, Tensor]:
        """Rows [B, T + 2] of ids and the weight of each as a target."""
        plan = self._plan
        rng = np.random.default_rng((plan.seed, step))
        share = plan.late_task_share if progress >= plan.late_from else plan.task_share
        count = int(rng.binomial(plan.rows, share))
        picked = torch.from_numpy(rng.integers(0, len(self._tasks), count)).to(self._device)
        starts = torch.from_numpy(rng.integers(0, len(self._books) - plan.length - 2, plan.rows - count))
        tasks = self._tasks[picked, : plan.length + 2]
        books = self._books[starts.to(self._device)[:, None] + self._span]
        weights = torch.where(tasks < 0, plan.written_weight, plan.read_weight)
        rows = torch.cat((tasks & MARK, books)).long()
        return rows, torch.cat((weights, torch.ones_like(books, dtype=weights.dtype)))


def rate_scale(step: int, total: int, plan: Plan) -> float:
    """Warm-up, then a straight line down to ``floor``."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    return plan.floor + (1 - plan.floor) * max(0.0, 1 - (step - plan.warmup) / max(1, total - plan.warmup))


class Checks:
    """Scores on held-out text during training: bits per byte, and dialogues whose every written token is right."""

    def __init__(self, work: Path, plan: Plan, device: str, bytes_per_token: float) -> None:
        length = plan.length + 2
        valid = np.load(work / "valid.npy").astype(np.int64)
        count = len(valid) // length // plan.rows * plan.rows
        self._valid = torch.from_numpy(valid[: count * length].reshape(count, length)).to(device)
        self._bits = 1 / (math.log(2) * bytes_per_token)
        rows = np.load(work / "checks.npy").view(np.int16)
        rows = np.pad(rows, ((0, -len(rows) % plan.rows), (0, 0)))[:, :length]
        numbers = np.load(work / "checked.npy")
        numbers = np.pad(numbers, ((0, len(rows) - len(numbers)), (0, 0)), constant_values=-1)[
            :, 1 : length - 1
        ]
        self._kinds: list[str] = json.loads((work / "checks.json").read_text())
        marked = torch.from_numpy(rows[:, 1 : length - 1] < 0)
        self._numbers = torch.where(marked, torch.from_numpy(numbers).long(), -1).to(device)
        self._rows = torch.from_numpy(rows & MARK).long().to(device)
        self._batch = plan.rows

    def run(self, network: Network, params: dict[str, Tensor], batches: int) -> dict[str, float]:
        """Bits per byte over ``batches`` batches of books, and the share of right dialogues of each kind.

        Gradients stay on, unused: turned off, every function would be compiled a second time.
        """
        ones = torch.ones_like(self._valid[: self._batch], dtype=torch.float32)
        chunks = list(self._valid.split(self._batch))
        chunks = chunks[:: max(1, len(chunks) // batches)][:batches]
        losses = [network.losses(params, rows, ones).main.detach() for rows in chunks]
        out = {"bits_per_byte": float(torch.stack(losses).mean()) * self._bits}
        wrong = torch.zeros(len(self._kinds) + 1, device=self._rows.device)
        whole = torch.zeros_like(wrong)
        for rows, numbers in zip(
            self._rows.split(self._batch), self._numbers.split(self._batch), strict=True
        ):
            correct = network.losses(params, rows, ones).correct
            wrong.index_add_(0, numbers.flatten() + 1, (~correct).float())
            whole.index_add_(0, numbers.flatten() + 1, torch.ones_like(correct, dtype=torch.float32))
        right = ((wrong == 0) & (whole > 0)).tolist()[1:]
        for kind in dict.fromkeys(self._kinds):
            marks = [ok for ok, k in zip(right, self._kinds, strict=True) if k == kind]
            out[kind] = sum(marks) / len(marks)
        return out


def total_loss(losses: Losses, plan: Plan) -> Tensor:
    return (
        losses.main + plan.mtp * losses.mtp + plan.balance * losses.balance + plan.router_z * losses.router_z
    )


def gradients(network: Network, params: dict[str, Tensor], rows: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Gradients of one batch, taken off the parameters."""
    total_loss(network.losses(params, rows, torch.ones_like(rows, dtype=torch.float32)), plan).backward()
    taken = {name: p.grad.float() for name, p in params.items() if p.grad is not None}
    for p in params.values():
        p.grad = None
    return taken


def disagreement(plain: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative difference of a leaf's gradient: rounding gives a few hundredths, a wrong kernel about one."""
    return max(float((plain[n] - other[n]).norm() / (plain[n].norm() + 1e-9)) for n in plain)


def choose_network(
    shape: Shape, plan: Plan, params: dict[str, Tensor], rows: Tensor, say: Callable[..., None]
) -> Network:
    """The network with as many functions compiled as compile here and give the plain network's gradients."""
    plain_network = Network(shape, plan.length, str(rows.device))
    plain = gradients(plain_network, params, rows, plan)
    for left in ((), ("linear_inputs",), ("linear_inputs", "linear_outputs", "solve_chunks")):
        torch._dynamo.reset()

        def wrap(function: Function, left: tuple[str, ...] = left) -> Function:
            if function.__name__ in left:
                return function
            return torch.compile(function, dynamic=False, fullgraph=True)

        network = Network(shape, plan.length, str(rows.device), wrap)
        try:
            difference = disagreement(plain, gradients(network, params, rows, plan))
        except Exception as error:  # whatever a compiler raises: say it, try less
            say("not compiled", left=left, error=f"{type(error).__name__}: {error}"[:1500])
            for p in params.values():
                p.grad = None
            continue
        say("compiled", left=left, difference=round(difference, 4))
        if difference < 0.2:
            return network
    return plain_network


class Run:
    """One command's share of a training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.plan = Plan(rows=args.rows, length=args.length, seed=args.seed)
        self.shape, self.args, self.device = Shape(vocab_size=args.vocab_size), args, args.device
        self.start = time.monotonic()
        self.network = Network(self.shape, self.plan.length, self.device)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        rates = optimizer.Rates(matrix=args.matrix_rate, other=args.other_rate)
        masters = optimizer.initial(self.shape, self.plan.seed, self.device)
        self.optimizer = optimizer.Optimizer(self.shape, masters, rates, dtype)
        self.total, self.spent = args.steps, 0.0
        if args.resume:
            state = torch.load(args.work / "state.pt", map_location=self.device, weights_only=True)
            self.optimizer.restore(state["optimizer"])
            self.total, self.spent = state["total"], state["spent"]
        self.feed = Feed(args.work, self.plan, self.device)
        self.checks = Checks(args.work, self.plan, self.device, args.valid_bytes_per_token)
        args.out.mkdir(parents=True, exist_ok=True)
        self.log = (args.out / "log.jsonl").open("a")

    def say(self, kind: str, **values: object) -> None:
        line = json.dumps(
            {"kind": kind, "step": self.optimizer.steps, "time": round(self.clock(), 1), **values}
        )
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def clock(self) -> float:
        return time.monotonic() - self.start

    def save(self) -> None:
        """State for the next command beside the data; the checkpoint in OUT."""
        state = {"optimizer": self.optimizer.state(), "total": self.total, "spent": self.spent + self.clock()}
        torch.save(state, self.args.work / "state.pt")
        checkpoint.save(self.optimizer.masters, self.shape, self.args.out)

    def check(self, batches: int) -> None:
        scores = self.checks.run(self.network, self.optimizer.params, batches)
        self.say("check", **{name: round(value, 4) for name, value in scores.items()})

    def step(self) -> Losses:
        """One update."""
        n = self.optimizer.steps
        rows, weights = self.feed.batch(n, n / self.total)
        losses = self.network.losses(self.optimizer.params, rows, weights)
        total_loss(losses, self.plan).backward()
        self.optimizer.step(rate_scale(n, self.total, self.plan))
        return losses

    def measure(self) -> None:
        """First steps of a run: sets the number of steps that fill the planned seconds."""
        self.total = self.total or 10**9
        for n in range(MEASURED_STEPS):
            losses = self.step()
            if n in (0, 1, 2, MEASURED_STEPS // 3):
                self.say("first", main=round(float(losses.main), 4), mtp=round(float(losses.mtp), 4))
                begin = self.clock()
        float(losses.main)
        rate = (MEASURED_STEPS - 1 - MEASURED_STEPS // 3) / (self.clock() - begin)
        if self.total == 10**9:
            self.total = int(MEASURED_STEPS + rate * (self.args.seconds - self.clock()))
        tokens = rate * self.plan.rows * self.plan.length
        self.say("speed", steps_per_s=round(rate, 2), tokens_per_s=round(tokens), total_steps=self.total)
        if tokens < self.args.least_speed:
            raise SystemExit(f"{tokens:.0f} tokens/s is under --least-speed {self.args.least_speed}")

    def train(self) -> None:
        args = self.args
        if self.device == "cuda" and not args.plain:
            rows, _ = self.feed.batch(0, 0.0)
            self.network = choose_network(self.shape, self.plan, self.optimizer.params, rows, self.say)
        if not args.resume:
            self.measure()
        kept, last_save, sums = self.optimizer.steps, self.clock(), []
        while self.optimizer.steps < self.total and self.clock() < args.stop_after:
            losses = self.step()
            sums.append(torch.stack((losses.main, losses.mtp, losses.balance, losses.router_z)).detach())
            if self.optimizer.steps % args.log_every == 0:
                main, mtp, balance, z = torch.stack(sums).mean(0).tolist()
                sums.clear()
                self.say(
                    "train", main=round(main, 4), mtp=round(mtp, 4), balance=round(balance, 4), z=round(z, 3)
                )
                if not math.isfinite(main):
                    raise SystemExit("the loss is not finite")
            if self.optimizer.steps % args.check_every == 0:
                self.check(2)
            if self.clock() - last_save > args.save_every_s:
                self.save()
                last_save = self.clock()
        self.say("stopped", of=self.total, steps=self.optimizer.steps - kept)
        self.save()
        packing.pack_folder(args.out)
        self.check(8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plain", action="store_true", help="do not compile")
    parser.add_argument("--vocab-size", type=int, default=Shape().vocab_size)
    parser.add_argument("--rows", type=int, default=Plan.rows)
    parser.add_argument("--length", type=int, default=Plan.length)
    parser.add_argument("--seconds", type=float, default=1050, help="planned length of the whole run")
    parser.add_argument(
        "--steps", type=int, default=0, help="planned steps of the whole run, instead of --seconds"
    )
    parser.add_argument(
        "--stop-after", type=float, default=1e9, help="seconds after which this command stops"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix-rate", type=float, default=optimizer.Rates.matrix)
    parser.add_argument("--other-rate", type=float, default=optimizer.Rates.other)
    parser.add_argument(
        "--least-speed", type=float, default=0.0, help="tokens/s under which the run gives up"
    )
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--check-every", type=int, default=1000)
    parser.add_argument("--save-every-s", type=float, default=150)
    parser.add_argument("--valid-bytes-per-token", type=float, default=3.552)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    run = Run(args)
    run.say("model", parameters=num_parameters(run.shape), plan=asdict(run.plan))
    run.train()


if __name__ == "__main__":
    main()
