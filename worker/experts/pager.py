"""Joins the host store, the arena's expert places and the residency tables into what a model's layers call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kernels.experts import Ahead, BlockFormat, run_experts
from kernels.pointwise import GatedActivation
from kernels.residency import gather
from memory.api import PlaceRange, StepCommands
from memory.device.commands import encode_places
from memory.device.host_experts import HostExperts
from memory.device.place_cap import PlaceCap
from memory.device.rescue import RESCUE_BYTES, Rescuer
from memory.device.residency import Residency, ResidencyRules
from memory.device.residency_check import ResidencyCheck
from worker.errors import ConfigError, EngineDead
from worker.execution.staging import Uploads
from worker.experts.link import ExpertLink
from worker.experts.miss_lane import LaneChoice, LayerShape, measure_lanes
from worker.experts.pass_ring import PassRing
from worker.experts.use import ExpertUse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagerOptions:
    """``expert_bytes``: bytes of places in use at most, 0: all that the ledger allows. ``checked_places``: places whose
    content is compared with its hash per step. ``rescue_bytes``: most bytes a step of experts whose places are banned
    that are carried over to colder places. ``deterministic``: no token's bits depend on the tokens beside it.
    ``miss_lane``: how missing experts that get a place are brought, one of :data:`worker.experts.miss_lane.LANES`."""

    expert_bytes: int = 0
    rules: ResidencyRules = field(default_factory=ResidencyRules)
    checked_places: int = 1
    rescue_bytes: int = RESCUE_BYTES
    deterministic: bool = False
    miss_lane: str = "tee"


class ExpertPager:
    """One model's paged experts. :meth:`attach` comes once, before the first step.

    A step: :meth:`begin_step`, then :meth:`run` for each layer in order, then :meth:`end_step`.
    """

    def __init__(self, host: HostExperts, options: PagerOptions) -> None:
        self.host = host
        self.options = options
        limit = options.expert_bytes // host.place_bytes if options.expert_bytes else None
        if limit == 0:
            raise ConfigError(
                [
                    f"expert_bytes={options.expert_bytes} is less than one expert's place of {host.place_bytes} bytes"
                ]
            )
        self._cap = PlaceCap(limit)
        self._residency: Residency | None = None
        self._rescuer: Rescuer | None = None
        self._check: ResidencyCheck | None = None
        self._still = False
        self.layer_shape: LayerShape | None = None
        """of a layer; entered as layers are read"""
        self.lanes = LaneChoice(default="gather" if options.miss_lane == "gather" else "tee")
        """how missing experts are brought, by the number of tokens"""
        self._ring: PassRing | None = None
        self._side: torch.cuda.Stream | None = None
        self.link: ExpertLink | None = None
        """how fast missing experts come, where that is known; else it is measured at start"""
        self.inner_size = 0
        """of the widest expert; entered as layers are read"""
        self.use: ExpertUse | None = None
        """who is told what each layer of a step chose"""

    @property
    def residency(self) -> Residency:
        """The tables; RuntimeError before ``attach``."""
        if self._residency is None:
            raise RuntimeError("the arena is attached before the first step")
        return self._residency

    @property
    def num_places(self) -> int:
        """Places that experts may use now."""
        return self._cap.num_places

    def limit_places(self, num_places: int) -> None:
        """Caps the places in use from the next step on, never raising an earlier cap."""
        self._cap.lower(num_places)

    def attach(self, grid: torch.Tensor) -> None:
        """Takes the arena's expert grid, [places, place_bytes] uint8."""
        device = grid.device
        self._residency = Residency(
            self.host.addresses().to(device),
            grid.data_ptr(),
            grid.stride(0),
            grid.shape[0],
            self.options.rules,
        )
        self._rescuer = Rescuer(self._residency, grid, self.options.rescue_bytes)
        self._check = ResidencyCheck(
            self._residency,
            grid,
            self.host.hashes.to(device),
            self.host.block_bytes,
            self.options.checked_places,
        )
        self._measure_lanes(grid)
        # Nothing is banned or rescued by this, but its kernels are compiled and loaded: the first that takes places
        # would else have every stream wait for that.
        self._rescuer.apply([block.to(device) for block in encode_places([PlaceRange(0, 0)], ())])

    def _measure_lanes(self, grid: torch.Tensor) -> None:
        """Once, over the first arena that is large enough; nothing lies there yet."""
        wanted = self.options.miss_lane == "measured" and not self.lanes.times
        if wanted and grid.is_cuda and self.layer_shape is not None and len(grid) >= self.host.num_experts:
            row = self.host.block_bytes.index(self.host.place_bytes)
            self.lanes = measure_lanes(self.layer_shape, self.host.addresses()[row].to(grid.device), grid)
            log.info("experts: %s", self.lanes.line())

    def begin_step(
        self, step: int, commands: StepCommands, num_stamping: int, uploads: Uploads | None = None
    ) -> None:
        """Carries bans and allows out and opens a step whose first ``num_stamping`` tokens may page. ``uploads`` takes
        the commands to the device without waiting."""
        ban, allow = self._cap.update(commands.ban, commands.allow)
        residency = self.residency
        assert self._rescuer is not None
        blocks = list(encode_places(ban, allow))
        if uploads is None:
            blocks = [block.to(residency.owner.device) for block in blocks]
        else:
            blocks = [uploads.put(block.numpy()) for block in blocks]
            uploads.flush()
        self._rescuer.apply(blocks)
        residency.begin_step(step, num_stamping)

    def run(
        self,
        row: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        where: BlockFormat,
        inner: int,
        activation: GatedActivation,
    ) -> torch.Tensor:
        """One layer. Misses that get a place are stored there by the products that read them, and published behind the
        layer's combine, by the next layer's decision; or they are gathered and published ahead of the products."""
        residency = self.residency
        if self._ring is not None:
            return self._run_pass(self._ring, row, x, weights, experts, where, inner, activation)
        experts = experts.contiguous()  # kept for launches that run beside the next
        tee, ahead = self._bring(row, experts)
        out = run_experts(
            x,
            weights,
            experts,
            residency.address[row],
            where,
            inner,
            activation,
            tee,
            self.options.deterministic,
            ahead,
        )
        if not self._still and row == len(self.host.layers) - 1:
            residency.publish(row)
        if not self._still and self.use is not None:
            self.use.take(row, experts)
        return out

    def _bring(self, row: int, experts: torch.Tensor) -> tuple[torch.Tensor | None, Ahead | None]:
        """Decides; answers where the products are to store what they read, or what is brought ahead of them. The layer
        before is published on the way: its blocks are stored."""
        residency = self.residency
        if self._still:
            return None, None
        if not self.lanes.gathers(len(experts)):
            return residency.decide(row, experts, row - 1), None
        targets, table = residency.decide_ahead(row, experts, row - 1)
        gather(residency.address[row], targets, self.host.block_bytes[row])
        return None, Ahead(table, *residency.place_range, held=targets)

    def _run_pass(
        self,
        ring: PassRing,
        row: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        where: BlockFormat,
        inner: int,
        activation: GatedActivation,
    ) -> torch.Tensor:
        """One layer of a prefill pass: nothing is stamped, nothing takes a place."""
        table, same_path = ring.table(row), self.options.deterministic
        ring.count(row, experts)
        out = run_experts(x, weights, experts, table, where, inner, activation, None, same_path)
        ring.done(row)
        return out

    def make_ring(self, ring: PlaceRange | None) -> PassRing:
        """The staging of a prefill pass that begins now, through places that the ledger has banned for it."""
        rate = self.link.bytes_per_s if self.link is not None else 0.0
        device = self.residency.address.device
        if self._side is None and device.type == "cuda":
            self._side = torch.cuda.Stream(
                device
            )  # one for all passes: torch hands out only so many different ones
        return PassRing(self.residency, self.host.block_bytes, ring, rate, self._side)

    @contextmanager
    def passing(self, ring: PassRing) -> Iterator[None]:
        """Within it layers are those of the prefill pass that ``ring`` serves."""
        self._ring = ring
        try:
            yield
        finally:
            self._ring = None

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Within it layers are computed from where their experts are, and nothing is decided (verification)."""
        self._still = True
        try:
            yield
        finally:
            self._still = False

    def end_step(self) -> None:
        """Checks a few places behind the step's last layer, in the order of the stream."""
        if self._check is not None:
            self._check.step()

    @property
    def found(self) -> torch.Tensor:
        """[3] int64 on the device: places that did not hold their expert's bytes, then row and expert of the first."""
        return torch.zeros(3, dtype=torch.int64) if self._check is None else self._check.found

    @property
    def num_checked(self) -> int:
        """Places that were compared, or are about to be in the stream's order."""
        return 0 if self._check is None else self._check.num_checked

    def raise_if_corrupt(self, found: torch.Tensor | None = None) -> None:
        """EngineDead naming layer and expert when a place did not hold its expert's bytes. ``found``: a copy on the
        host of what :attr:`found` was; None: what it is, which waits for the device."""
        count, row, expert = (self.found if found is None else found).tolist()
        if count:
            raise EngineDead(
                f"expert {expert} of layer {self.host.layers[row]} in device memory is not what was loaded"
                f" ({count} places differ from their hash)"
            )


class PagedExperts:
    """The routed experts of one layer."""

    def __init__(
        self, pager: ExpertPager, layer: int, where: BlockFormat, inner: int, activation: GatedActivation
    ) -> None:
        pager.inner_size = max(pager.inner_size, inner)
        self._pager = pager
        self._row = pager.host.row(layer)
        self._where, self._inner, self._activation = where, inner, activation

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the chosen experts, [tokens, H]."""
        return self._pager.run(
            self._row, x.contiguous(), weights, experts, self._where, self._inner, self._activation
        )


class TableExperts:
    """The routed experts of one layer, all resident: the same kernel over constant addresses."""

    def __init__(
        self,
        blocks: torch.Tensor,
        where: BlockFormat,
        inner: int,
        activation: GatedActivation,
        deterministic: bool = False,
    ) -> None:
        """``blocks`` [experts, block_bytes] uint8 on the device."""
        self._blocks = blocks
        self._table = torch.arange(len(blocks), device=blocks.device) * blocks.stride(0) + blocks.data_ptr()
        self._where, self._inner, self._activation = where, inner, activation
        self._deterministic = deterministic

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the chosen experts, [tokens, H]."""
        return run_experts(
            x.contiguous(),
            weights,
            experts,
            self._table,
            self._where,
            self._inner,
            self._activation,
            deterministic=self._deterministic,
        )
