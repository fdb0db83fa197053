"""What one step of one rank consists of, in bytes and seconds, before anything is placed; and what memory there is."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

from penstock.config import TierName
from penstock.planner.simulation.program import Collective

KINDS = ("params", "grads", "optimizer")
TIERS: tuple[TierName, ...] = ("device", "cpu", "nvme")

#: More bytes than there are: so many may be ahead, or kept, where nobody says how many are.
UNKNOWN = 1 << 62
#: What has a fraction of its bytes on each tier: "params", "grads", "optimizer".
Fractions = Mapping[str, Mapping[TierName, float]]


class Figures(Protocol):
    """What a machine does in a second: `penstock.planner.machine.Machine`, or anything like it."""

    def value(self, name: str) -> float:
        """Give a figure; `ConfigError` where the machine has none."""

    def has(self, name: str) -> bool:
        """Whether the machine has a figure."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One rank's step for one choice of activations and recomputing, wherever the state is.

    "In all" is of one step; "of a pass" is of the forward, or the backward, of one micro-batch. What is gathered or
    reduced is this rank's part, which it copies itself.

    Attributes:
        params_bytes: parameters that are trained, as they rest in memory.
        frozen_bytes: parameters that are not trained, as they rest in memory.
        own_params_bytes: those trained parameters that this rank updates: its shard.
        grads_bytes: its shard of the gradients, in the dtype in which they rest.
        optimizer_bytes: its shard of the master weights and of every state.
        update_bytes: what the update of its shard reads and writes.
        reduced_bytes: its shard of a gradient as it comes out of a reduction.
        reductions: how often gradients are reduced in all.
        micro_batches: how many there are.
        forward_s, backward_s: seconds of compute of a pass; backward has what it computes again.
        forward_gathered_bytes, backward_gathered_bytes: what of the parameters a pass gathers, if none is resident: not
            what is still there from the pass before.
        ahead_bytes: what may be on its way before its pass begins, or after it has ended.
        kept_bytes: of files: what rings may hold still, so that it is not read again.
        activations: the tier to which saved tensors go; `None` where they stay.
        activations_bytes: what of them goes there in a pass.
        activation_peak_bytes: what activations take at their peak, by tier; it grows with the batch.
        fixed_bytes: what else there is at the peak wherever the state is, by tier.
        passing_bytes: what buffers may take that come and go with the placement, by tier. The bound does not count
            them; proposals leave room for them.
        forward_collectives, backward_collectives: those of a pass, gathers and reductions.
        streamed: the most of the updates of state that rests off the device that the device may do, from 0 to 1.
        rule: the optimizer's rule, as figures call it: "adamw".
        ranks: among how many the state is sharded.
        copies: how many copies of the sharded state there are, each among so many ranks.
        ranks_of_host: how many are on a host; 0 where nobody says it: as many as the machine has devices.
        sharded: the kinds of which each of them has a part.
    """

    params_bytes: int
    own_params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    update_bytes: int
    reduced_bytes: int
    forward_s: float
    backward_s: float
    forward_gathered_bytes: int = 0
    backward_gathered_bytes: int = 0
    ahead_bytes: int = UNKNOWN
    kept_bytes: int = UNKNOWN
    frozen_bytes: int = 0
    reductions: int = 1
    micro_batches: int = 1
    activations: TierName | None = None
    activations_bytes: int = 0
    activation_peak_bytes: Mapping[TierName, int] = field(default_factory=dict)
    fixed_bytes: Mapping[TierName, int] = field(default_factory=dict)
    passing_bytes: Mapping[TierName, int] = field(default_factory=dict)
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    streamed: float = 0.0
    rule: str = ""
    ranks: int = 1
    copies: int = 1
    ranks_of_host: int = 0
    sharded: frozenset[str] = frozenset()

    @property
    def kind_bytes(self) -> dict[str, int]:
        """Bytes of each kind at rest."""
        return {
            "params": self.params_bytes + self.frozen_bytes,
            "grads": self.grads_bytes,
            "optimizer": self.optimizer_bytes,
        }

    def there(self, tier: TierName) -> int:
        """Count what is on a tier wherever the state is."""
        return self.fixed_bytes.get(tier, 0) + self.activation_peak_bytes.get(tier, 0)

    @property
    def in_shards(self) -> "Load":
        """The same with each parameter resting on one rank: as it is where some of them are in files."""
        if self.params_bytes <= self.own_params_bytes:
            return self
        frozen = self.frozen_bytes * self.own_params_bytes // self.params_bytes
        return replace(self, params_bytes=self.own_params_bytes, frozen_bytes=frozen)

    def beside(self, nbytes: Mapping[TierName, int]) -> "Load":
        """Add bytes to what is on each tier wherever the state is."""
        tiers = {**self.fixed_bytes, **nbytes}
        return replace(self, fixed_bytes={t: self.fixed_bytes.get(t, 0) + nbytes.get(t, 0) for t in tiers})

    def over(self, ranks: int) -> "Load":
        """Shard the state at rest over more ranks; times and what is gathered stay as they are."""

        def part(nbytes: int, kind: str) -> int:
            return ceil(nbytes * self.ranks / ranks) if kind in self.sharded else nbytes

        return replace(
            self,
            params_bytes=part(self.params_bytes, "params"),
            frozen_bytes=part(self.frozen_bytes, "params"),
            own_params_bytes=part(self.own_params_bytes, "optimizer"),
            grads_bytes=part(self.grads_bytes, "grads"),
            optimizer_bytes=part(self.optimizer_bytes, "optimizer"),
            ranks=ranks,
        )


@dataclass(frozen=True)
class Limits:
    """How many bytes a rank may take of each tier. A tier without a limit is not there.

    Attributes:
        bytes: what there is.
        reserve: what is to be left free.
        shared: device and host are one memory, whose limit is that of "cpu": as on a cpu.
    """

    bytes: Mapping[TierName, int]
    reserve: Mapping[TierName, int] = field(default_factory=dict)
    shared: bool = False

    def of(self, tier: TierName) -> int:
        """Count what may be taken of a tier; 0 where it is not there."""
        return max(0, self.bytes.get(tier, 0) - self.reserve.get(tier, 0))

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """Where state can be, fastest first. Of one memory it is on the device."""
        if not self.shared:
            return tuple(tier for tier in TIERS if tier in self.bytes)
        return ("device", "nvme") if "nvme" in self.bytes else ("device",)

    def room(self, tier: TierName) -> int:
        """Count what may be taken of one of `tiers`: of a memory that is shared, all of it."""
        return self.of("cpu") if self.shared and tier == "device" and "cpu" in self.bytes else self.of(tier)

    def taken(self, tier: TierName, taken: Mapping[TierName, float]) -> float:
        """Sum up what is taken of the memory of one of `tiers`."""
        return taken.get(tier, 0) + (taken.get("cpu", 0) if self.shared and tier == "device" else 0)

    def excess(self, peak_bytes: Mapping[TierName, float]) -> dict[TierName, int]:
        """Say by how many bytes peaks exceed what may be taken, by tier; empty where they do not."""
        over = {tier: round(self.taken(tier, peak_bytes)) - self.room(tier) for tier in self.tiers}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}

    def less(self, nbytes: Mapping[TierName, int]) -> "Limits":
        """Leave so much more free."""
        more: Mapping[TierName, int] = nbytes
        if self.shared:
            more = {"cpu": nbytes.get("device", 0) + nbytes.get("cpu", 0), "nvme": nbytes.get("nvme", 0)}
        kept = {tier: self.reserve.get(tier, 0) + more.get(tier, 0) for tier in self.bytes}
        return replace(self, reserve=kept)

    def with_room(self, tier: TierName, nbytes: int) -> "Limits":
        """Set how much may be taken of a tier."""
        return replace(self, bytes={**self.bytes, tier: nbytes + self.reserve.get(tier, 0)})
