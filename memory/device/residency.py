"""Decides on the device which experts have places: hits are stamped, misses take victims, the rest is read in place.

Everything is tensor operations of fixed shape on tables that stay where they are, without a look at a value by the
host, so that ``decide`` and ``publish`` can be captured.
The order within a step: :meth:`Residency.apply` (bans, allows), :meth:`Residency.begin_step` (one scan refills the
queue of victims), then per layer :meth:`Residency.decide`, the experts' products, :meth:`Residency.publish`.

What always holds:

- a victim's address points to the host before the first byte of its place is overwritten (``decide`` comes before the
  kernel that stores), and a new owner's address to the place only after its last byte (``publish`` comes behind it);
- no place stamped in this step, and none that the executing layer owns, is a victim;
- rows that do not stamp (prefill, padding) take no places and move nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels import residency as fused
from memory.device.commands import decode_places
from memory.device.ghosts import Ghosts
from memory.device.residency_rules import (
    FREQUENCY_DECAY,
    FROZEN_MARGIN,
    GHOST_SHIFT,
    RECENCY_WEIGHT,
    THAW_SHARE,
)

FREE, BANNED = -1, -2


class Lane(IntEnum):
    """How an expert of a step was had; rows of the counters. EVICTED counts places that lost an owner, RESCUED experts
    that were copied from a banned place to a usable one (``memory.device.rescue``), STAGED those that a prefill pass
    copied into its ring."""

    HIT = 0
    TEE = 1
    IN_PLACE = 2
    PREFILL_HIT = 3
    PREFILL_IN_PLACE = 4
    EVICTED = 5
    RESCUED = 6
    STAGED = 7


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """``policy``: ``lru`` or ``lfru``. ``queue_places``: victims found by a step's scan at most. ``freezes``: whether a
    step that needs more than the places stops evictions; off, the places churn. ``ranked``: whether a layer's worthiest
    miss meets the least worthy victim, or misses come by their number."""

    policy: str = "lfru"
    queue_places: int = 1024
    freezes: bool = True
    ranked: bool = True


class Residency:
    """Tables of one model's experts over the places of one arena.

    Attributes:
        address: [rows, experts] int64, where the kernel reads an expert.
        owner: [places] int64, row * experts + expert, or FREE (also while its content is on the way), or BANNED.
        stamp: [places] int64, the last step that used a place.
        generation: [places] int64, counts changes of a place's content.
        counts: [lanes, rows] int64, distinct experts per layer and step by :class:`Lane`.
        frozen: [] bool.
        ghosts: who lost a place lately.
    """

    def __init__(
        self,
        host_address: torch.Tensor,
        base_address: int,
        place_bytes: int,
        num_places: int,
        rules: ResidencyRules = ResidencyRules(),
    ) -> None:
        """``host_address`` [rows, experts] int64 on the device of the tables; places lie at ``base_address`` + number *
        ``place_bytes``. All begin banned."""
        if rules.policy not in ("lru", "lfru"):
            raise ValueError(f"policy={rules.policy!r} must be lru or lfru")
        device = host_address.device
        self._rows, self._experts = host_address.shape
        self._host = host_address
        self._base, self._place_bytes, self.num_places = base_address, place_bytes, num_places
        self._rules = rules
        # Each table has one entry more: where masked writes go.
        self._flat_host = torch.cat([host_address.flatten(), host_address.new_zeros(1)])
        self._flat_address = self._flat_host.clone()
        self._owner = torch.full((num_places + 1,), BANNED, dtype=torch.int64, device=device)
        self._stamp = torch.full((num_places + 1,), -1, dtype=torch.int64, device=device)
        self._generation = torch.zeros(num_places + 1, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._stamping = torch.zeros((), dtype=torch.int64, device=device)
        self._uses = torch.zeros(self._rows * self._experts + 1, device=device)
        self._seen = torch.full((self._rows * self._experts + 1,), -1, dtype=torch.int64, device=device)
        self._queue = torch.full((min(rules.queue_places, num_places),), num_places, device=device)
        self._demand = torch.zeros((), dtype=torch.int64, device=device)
        self._taken = torch.full((self._experts,), num_places, dtype=torch.int64, device=device)
        self.frozen = torch.zeros((), dtype=torch.bool, device=device)
        self.ghosts = Ghosts(self._rows, self._experts, device)
        self.counts = torch.zeros(len(Lane), self._rows, dtype=torch.int64, device=device)
        self._ready = torch.full((len(self._queue) + 1,), num_places, dtype=torch.int64, device=device)
        self._fused = fused.fused_residency(self.tables(), self.ghosts.tables(), self.fused_rules())

    def fused_rules(self) -> fused.FusedRules:
        """The rules as the kernels want them told."""
        return fused.FusedRules(
            base=self._base, place_bytes=self._place_bytes, is_lru=self._rules.policy == "lru",
            freezes=self._rules.freezes, decay=FREQUENCY_DECAY, recency=RECENCY_WEIGHT,
            frozen_margin=FROZEN_MARGIN, thaw_share=THAW_SHARE, ghost_shift=GHOST_SHIFT,
            ranked=self._rules.ranked,
        )  # fmt: skip

    def tables(self) -> dict[str, torch.Tensor]:
        """The tables by the names that the fused kernel gives them; each with its entry for masked writes."""
        return {
            "address": self._flat_address,
            "host": self._flat_host,
            "seen": self._seen,
            "uses": self._uses,
            "owner": self._owner,
            "stamp": self._stamp,
            "generation": self._generation,
            "queue": self._queue,
            "ready": self._ready,
            "step": self._step,
            "stamping": self._stamping,
            "demand": self._demand,
            "frozen": self.frozen,
            "taken": self._taken,
            "counts": self.counts,
        }

    @property
    def address(self) -> torch.Tensor:
        """[rows, experts]."""
        return self._flat_address[:-1].view(self._rows, self._experts)

    @property
    def owner(self) -> torch.Tensor:
        """[places]."""
        return self._owner[:-1]

    @property
    def stamp(self) -> torch.Tensor:
        """[places]."""
        return self._stamp[:-1]

    @property
    def generation(self) -> torch.Tensor:
        """[places]."""
        return self._generation[:-1]

    @property
    def host_address(self) -> torch.Tensor:
        """[rows, experts], where each block lies in host memory."""
        return self._host

    @property
    def place_range(self) -> tuple[int, int]:
        """Address of the first place, and the one behind the last."""
        return self._base, self._base + self.num_places * self._place_bytes

    @property
    def resident(self) -> torch.Tensor:
        """[rows, experts] bool."""
        return self.address != self._host

    def apply(self, block: torch.Tensor) -> torch.Tensor:
        """A command block (``memory.device.commands``): owners of banned places point to the host again; places that
        are allowed are free. Answers [places] int64, the owner that each place lost by it, FREE where none."""
        ban, allow = decode_places(block, self.num_places)
        owner = self.owner
        dropped = torch.where(ban & (owner >= 0), owner, self._rows * self._experts)
        self._flat_address.scatter_(0, dropped, self._host_of(dropped))
        self._generation[:-1] += ban
        owner.copy_(torch.where(ban, BANNED, torch.where(allow & (owner == BANNED), FREE, owner)))
        self._stamp[:-1] = torch.where(ban | allow, -1, self.stamp)
        return torch.where(dropped < self._rows * self._experts, dropped, FREE)

    def coldness(self) -> torch.Tensor:
        """[places] float32, between steps: the worth of each place's owner, -1 where it is free, infinite where nothing
        may be put: banned places, and those that the last step used."""
        worth = torch.where(self.owner == FREE, -1.0, self.worth(self.owner))
        return torch.where((self.owner == BANNED) | (self.stamp >= self._step), torch.inf, worth)

    def vacate(self, places: torch.Tensor) -> None:
        """Owners of ``places`` [n] (the number of places where there is none) are read from the host from here on."""
        old = self._owner[places]
        lost = torch.where(old >= 0, old, self._rows * self._experts)
        self._flat_address.scatter_(0, lost, self._host_of(lost))
        self._owner.scatter_(0, places, FREE)
        self._generation.scatter_add_(0, places, torch.ones_like(places))

    def settle(self, places: torch.Tensor, owners: torch.Tensor) -> None:
        """The blocks of ``owners`` [n] are stored in ``places`` [n], which were vacated; nothing is where the owner is
        FREE and the place the number of places."""
        none = self._rows * self._experts
        flat = torch.where(owners >= 0, owners, none)
        self._owner.scatter_(0, places, owners)
        self._stamp.scatter_(0, places, self._seen[flat])
        there = torch.where(owners >= 0, self._base + places * self._place_bytes, 0)
        self._flat_address.scatter_(0, flat, there)
        row = torch.div(flat, self._experts, rounding_mode="floor").clamp_max(self._rows - 1)
        self.counts[Lane.RESCUED].scatter_add_(0, row, (owners >= 0).to(torch.int64))

    def begin_step(self, step: int, num_stamping: int) -> None:
        """Opens a step whose first ``num_stamping`` tokens are stamped and may take places: ages use counts, decides on
        freezing, and refills the queue with the least worthy places."""
        if self._fused is not None:
            self._fused.begin_step(step, num_stamping)
            return
        usable = (self.owner != BANNED).sum()
        thawed = self._demand < THAW_SHARE * usable
        if self._rules.freezes:
            self.frozen.copy_((self._demand > usable) | (self.frozen & ~thawed))
        self._demand.zero_()
        wanted = (self._seen[:-1] == self._step).view(self._rows, self._experts)
        self.ghosts.step(wanted, self.resident, usable >> GHOST_SHIFT)
        self._step.fill_(step)
        self._stamping.fill_(num_stamping)
        self._uses *= FREQUENCY_DECAY
        worth = self.worth(self.owner)
        worth = torch.where(self.owner == FREE, -1.0, worth)
        worth = torch.where(self.owner == BANNED, torch.inf, worth)
        order = torch.argsort(worth, stable=True)[: len(self._queue)]
        self._queue.copy_(torch.where(self.owner[order] == BANNED, self.num_places, order))

    def decide(self, row: int, experts: torch.Tensor, published: int = -1) -> torch.Tensor:
        """Which of a layer's missing experts take a place now.

        Args:
            row: of the layer. experts: [tokens, experts_per_token] int64, -1 in padding.
            published: row of the layer decided before, whose blocks are stored: it is published on the way. -1: none.

        Returns:
            [experts] int64, the address where a chosen expert's block is to be stored, 0 for nowhere.
        """
        if self._fused is not None and experts.numel() <= fused.MAX_PAIRS:
            return self._fused.decide(row, experts, published)[0]
        if published >= 0:
            self.publish(published)
        stamping = torch.arange(len(experts), device=experts.device) < self._stamping
        none = self.num_places
        wanted = self._distinct(experts, stamping)
        place = self._places(row)
        hit, miss = wanted & (place < none), wanted & (place >= none)
        self._stamp.scatter_(0, torch.where(hit, place, none), self._step.expand(self._experts))
        first = row * self._experts
        self._uses[first : first + self._experts] += wanted
        seen = self._seen[first : first + self._experts]
        seen.copy_(torch.where(wanted, self._step, seen))
        self._demand += wanted.sum()
        victim = self._victims(row, miss)
        taken = victim < none
        old = self._owner[victim]
        evicted = taken & (old >= 0)
        lost = torch.where(evicted, old, self._rows * self._experts)
        self._flat_address.scatter_(0, lost, self._host_of(lost))
        self._owner.scatter_(0, victim, FREE)
        self._generation.scatter_add_(0, victim, taken.to(torch.int64))
        self._stamp.scatter_(0, victim, self._step.expand(self._experts))
        self._taken.copy_(victim)
        self._count(row, experts, stamping, wanted, hit, taken, evicted)
        return torch.where(taken, self._base + victim * self._place_bytes, 0)

    def decide_ahead(
        self, row: int, experts: torch.Tensor, published: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`decide`, for blocks that are stored ahead of the layer's products: also [experts] int64, the
        address from which each expert is to be read once they are."""
        if self._fused is not None and experts.numel() <= fused.MAX_PAIRS:
            return self._fused.decide(row, experts, published, with_read=True)
        targets = self.decide(row, experts, published)
        return targets, torch.where(targets > 0, targets, self.address[row])

    def publish(self, row: int) -> None:
        """The blocks that ``decide`` gave places are stored: their owners are entered, and addresses point to them."""
        if self._fused is not None:
            self._fused.publish(row)
            return
        victim, none = self._taken, self.num_places
        taken = victim < none
        own = torch.arange(self._experts, device=victim.device) + row * self._experts
        self._owner.scatter_(0, victim, torch.where(taken, own, FREE))
        there = self._base + victim * self._place_bytes
        first = row * self._experts
        address = self._flat_address[first : first + self._experts]
        address.copy_(torch.where(taken, there, address))

    def _distinct(self, experts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[experts] bool: who is chosen in the given rows."""
        chosen = torch.where(rows.unsqueeze(1) & (experts >= 0), experts, self._experts).flatten()
        found = torch.zeros(self._experts + 1, dtype=torch.bool, device=experts.device)
        return found.scatter_(0, chosen, torch.ones_like(chosen, dtype=torch.bool))[:-1]

    def _places(self, row: int) -> torch.Tensor:
        """[experts] the place of each expert of a layer; the number of places for those on the host."""
        address = self.address[row]
        there = torch.div(address - self._base, self._place_bytes, rounding_mode="floor")
        return torch.where(address == self._host[row], self.num_places, there)

    def _host_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Host addresses by row * experts + expert; the last, unused entry stays 0."""
        return self._flat_host[flat]

    def address_of(self, places: torch.Tensor) -> torch.Tensor:
        """Addresses of ``places`` [n] int64."""
        return self._base + places * self._place_bytes

    def worth(self, flat: torch.Tensor) -> torch.Tensor:
        """The policy's score of experts by row * experts + expert; callers mask what is below 0."""
        held = flat.clamp_min(0)
        if self._rules.policy == "lru":
            return self._seen[held].float() + 1.0
        age = (self._step - self._seen[held]).clamp_min(0).float() + 1.0
        return self._uses[held] + RECENCY_WEIGHT / age

    def _victims(self, row: int, miss: torch.Tensor) -> torch.Tensor:
        """[experts] the place that each missing expert takes, the number of places where it takes none: the n-th miss
        by worth is paired with the n-th of the queue that may be a victim now, and takes it if it is worth more."""
        none, length = self.num_places, len(self._queue)
        if length == 0:
            return torch.full_like(miss, none, dtype=torch.int64)
        owner, stamp = self._owner[self._queue], self._stamp[self._queue]
        ours = torch.div(owner, self._experts, rounding_mode="floor") == row
        fit = (self._queue < none) & (stamp < self._step) & ~ours & (owner != BANNED)
        slot = torch.where(fit, fit.cumsum(0) - 1, length)
        ready = torch.full((length + 1,), none, dtype=torch.int64, device=miss.device)
        ready.scatter_(0, slot, self._queue)
        ready[length:].fill_(none)
        victim = torch.where(miss, ready[self._ranks(row, miss).clamp(0, length)], none)
        return torch.where(self._may_take(row, victim), victim, none)

    def _ranks(self, row: int, miss: torch.Tensor) -> torch.Tensor:
        """[experts] the position of each missing expert among them; anything for the others."""
        if not self._rules.ranked:
            return miss.cumsum(0) - 1
        own = torch.arange(self._experts, device=miss.device)
        worth = torch.where(miss, self.worth(own + row * self._experts), -1.0)
        return torch.empty_like(own).scatter_(0, torch.argsort(worth, descending=True, stable=True), own)

    def _may_take(self, row: int, victim: torch.Tensor) -> torch.Tensor:
        """[experts] bool: the place is free, or the expert is worth more than its owner."""
        owner = self._owner[victim]
        if self._rules.policy == "lru":
            return (owner == FREE) | ~self.frozen
        own = torch.arange(self._experts, device=victim.device) + row * self._experts
        margin = torch.where(self.frozen, FROZEN_MARGIN, 1.0)
        return (owner == FREE) | (self.worth(own) > margin * self.worth(owner))

    def _count(
        self, row: int, experts: torch.Tensor, stamping: torch.Tensor, wanted: torch.Tensor, hit: torch.Tensor,
        taken: torch.Tensor, evicted: torch.Tensor,
    ) -> None:  # fmt: skip
        others = self._distinct(experts, ~stamping) & ~wanted
        there = self._places(row) < self.num_places
        by_lane = {
            Lane.HIT: hit,
            Lane.TEE: taken,
            Lane.IN_PLACE: wanted & ~hit & ~taken,
            Lane.PREFILL_HIT: others & there,
            Lane.PREFILL_IN_PLACE: others & ~there,
            Lane.EVICTED: evicted,
        }
        self.counts[: len(by_lane), row] += torch.stack([by_lane[lane].sum() for lane in by_lane])

    def count_prefill(self, row: int, experts: torch.Tensor, staged: torch.Tensor) -> None:
        """Enters a layer of a prefill pass: ``experts`` [tokens, experts_per_token] chosen, ``staged`` [experts] bool
        read from its ring."""
        chosen = self._distinct(experts, torch.ones_like(experts[:, 0], dtype=torch.bool)) & ~staged
        there = self._places(row) < self.num_places
        self.counts[Lane.PREFILL_HIT, row] += (chosen & there).sum()
        self.counts[Lane.PREFILL_IN_PLACE, row] += (chosen & ~there).sum()

    def audit(self) -> list[str]:
        """What does not hold, between steps: addresses and owners must be a bijection, banned places without owner.
        Looks at values, so the host waits."""
        problems = []
        # One copy each: a look at one value on a GPU would wait for it alone.
        address, host, owner = (t.cpu() for t in (self._flat_address[:-1], self._host.flatten(), self.owner))
        place = torch.div(address - self._base, self._place_bytes, rounding_mode="floor")
        for flat in (address != host).nonzero().flatten().tolist():
            at = int(place[flat])
            name = f"layer row {flat // self._experts}, expert {flat % self._experts}"
            if not 0 <= at < self.num_places or int(address[flat]) != self._base + at * self._place_bytes:
                problems.append(f"{name}: its address is neither the host's nor a place's")
            elif int(owner[at]) != flat:
                problems.append(f"{name}: place {at} belongs to {int(owner[at])}")
        for at in (owner >= 0).nonzero().flatten().tolist():
            flat = int(owner[at])
            if int(address[flat]) != self._base + at * self._place_bytes:
                problems.append(f"place {at}: its owner {flat} is read elsewhere")
        return problems
