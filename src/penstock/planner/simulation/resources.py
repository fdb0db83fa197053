"""Tiers without memory, and parameters without values: what an engine is built of that is only simulated."""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock.config import PARAM, Tier
from penstock.planner.simulation.engine_internals import (
    Allocation,
    Arena,
    Blueprint,
    FirstValues,
    FlatValues,
    HostMemory,
    HostTier,
    MemoryBudget,
    MemorySegment,
    PrepareRequest,
    Records,
    Resources,
    Segment,
    SegmentPlan,
    Striping,
    TierMemory,
    UnitSpec,
    budget_of,
    record_sizes,
)
from penstock.planner.simulation.fake_tensor import fake_tensor, rounded
from penstock.planner.simulation.recorder import Recorder


class SimulatedResources(Resources):
    """Tiers that note what would be taken of them.

    Arguments:
        recorder: take the bytes.
        pinnable_bytes: how much host memory can be pinned on the machine that is meant; `None` sets no limit.
        fill: gives what rests on the device values; `None` where nobody reads them.

    Attributes:
        blueprint: of the engine that is built of them.
        budget: what that takes of each memory.
    """

    blueprint: Blueprint
    budget: MemoryBudget

    def __init__(
        self, recorder: Recorder, pinnable_bytes: int | None = None, fill: Callable[[Tensor], None] | None = None
    ) -> None:
        self._recorder = recorder
        self._fill = fill
        self._pinnable_bytes = pinnable_bytes

    def check(self, blueprint: Blueprint, model: nn.Module, device: torch.device) -> None:
        """Keep what was drawn, and refuse nothing: whether it fits is what the simulation is to tell."""
        self.blueprint, self.budget = blueprint, budget_of(blueprint, model, device)

    def tiers(self, request: PrepareRequest, device: torch.device) -> Sequence[TierMemory]:
        """Make tiers that note their bytes."""
        recorder, options = self._recorder, request.options
        limits = [limit for limit in (options.pinned_bytes, self._pinnable_bytes) if limit is not None]

        class CountedArena(FakeArena):
            """Of this simulation."""

            recorder = self._recorder

        folders = max(len(request.placement.nvme_folders()), 1)
        return [
            _CountedTier(Tier.DEVICE, recorder, lambda: self._on_device),
            _FakeHost(device, min(limits, default=None), tile_bytes=options.tile_bytes, arena=CountedArena),
            _CountedTier(Tier.NVME, recorder, lambda: partial(_records, Striping(folders))),
        ]

    def _on_device(self, plan: SegmentPlan) -> tuple[Segment, int]:
        tensors = [fake_tensor(cell.numel, cell.dtype) for cell in plan.cells]
        if self._fill is not None and plan.storage == PARAM:
            tensors = [torch.empty(cell.numel, dtype=cell.dtype, device="cpu") for cell in plan.cells]
            for tensor in tensors:
                self._fill(tensor)
        return MemorySegment(plan, tensors), sum(rounded(tensor.nbytes) for tensor in tensors)

    def source(self, *given: Any) -> FirstValues:
        """Give parameters no values."""
        return _NoValues()


class _FakeHost(HostTier):
    """Host memory that is only counted. Whoever runs is told what is not pinned, and nobody who only plans to."""

    def _warn(self, pageable: Mapping[str, int]) -> None:
        """Say nothing: what copies of it cost is in the program."""


class _NoValues(FirstValues):
    """Nobody has values."""

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[FlatValues] | None]]:
        """Yield the units in order."""
        for number, _ in enumerate(specs):
            yield number, None


class FakeArena(Arena):
    """An allocation of host memory that is only counted.

    Attributes:
        recorder: takes its bytes.
    """

    recorder: Recorder

    def __init__(self, capacity: int, device: torch.device, *, pin: bool = True, ring: bool = False) -> None:
        del ring
        self.capacity = capacity
        self.used = 0
        self.pinned = pin and self.recorder.back_end == "accelerator"
        self._device = device
        self._allocation = fake_tensor(capacity, torch.uint8) if capacity else None
        self.recorder.add(Tier.CPU, capacity)

    @staticmethod
    def available() -> HostMemory | None:
        """Say nothing: whether it fits is told afterwards."""
        return None

    @property
    def pageable(self) -> bool:
        """Whether the device that is meant copies from it and it is not pinned."""
        return self.recorder.back_end == "accelerator" and not self.pinned

    def fault_in(self) -> None:
        """Touch nothing."""

    def close(self) -> None:
        """Give the bytes back."""
        if self._allocation is not None:
            self.recorder.add(Tier.CPU, -self.capacity)
        self._allocation = None
        self.used = 0


#: Makes a segment, and counts its bytes.
_Maker = Callable[[SegmentPlan], tuple[Segment, int]]


class _CountedTier(TierMemory):
    """Memory or files that are only counted.

    Arguments:
        name: which tier it is.
        recorder: take the bytes.
        maker: returns what makes the segments of one storage.
    """

    def __init__(self, name: Tier, recorder: Recorder, maker: Callable[[], _Maker]) -> None:
        self.name = name
        self._recorder = recorder
        self._maker = maker

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        """Take nothing yet: a segment is counted when it is made."""
        del pin
        return {storage: _CountedAllocation(self._maker(), self._recorder, self.name) for storage in wanted}


class _CountedAllocation(Allocation):
    """What segments of one storage would be made of."""

    def __init__(self, make: _Maker, recorder: Recorder, tier: Tier) -> None:
        self._make, self._recorder, self._tier = make, recorder, tier
        self._nbytes = 0

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> Segment:
        """Make the next segment."""
        del unset
        segment, nbytes = self._make(plan)
        self._nbytes += nbytes
        self._recorder.add(self._tier, nbytes)
        return segment

    def close(self) -> None:
        """Give its bytes back."""
        self._recorder.add(self._tier, -self._nbytes)
        self._nbytes = 0


def _records(striping: Striping, plan: SegmentPlan) -> tuple[Segment, int]:
    """Lay records out over the folders, as the files would have them."""
    places = striping.place(record_sizes(plan))
    return FakeRecords(plan, places), sum(nbytes for *_, nbytes in places)


class FakeRecords(Records):
    """Records in files that are not there.

    Arguments:
        places: the folder, offset and bytes of each tile's record.
    """

    def __init__(self, plan: SegmentPlan, places: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(plan, [nbytes for *_, nbytes in places])
        self._places = places

    def folder(self, number: int) -> int:
        """Give the number of the folder that a tile's record is in."""
        return self._places[number][0]

    def load(self, number: int, into: Tensor) -> NoReturn:
        """Refuse; streams of a simulation run nothing."""
        raise AssertionError("nothing is loaded in a simulation")

    def store(self, number: int, source: Tensor) -> NoReturn:
        """Refuse; streams of a simulation run nothing."""
        raise AssertionError("nothing is stored in a simulation")

    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "FakeRecords":
        """Make a section with records of its own from a byte of a tile's record on."""
        folder, offset, _ = self._places[tile]
        places = []
        for nbytes in record_sizes(plan):
            places.append((folder, offset + start, nbytes))
            start += nbytes
        return FakeRecords(plan, places)
