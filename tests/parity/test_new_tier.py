"""What a new tier takes: where a record lies, and how it is loaded and stored. Everything else is there already."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from penstock.config import Tier
from penstock.tiers.storage import Records, SegmentPlan, record_sizes
from penstock.tiers.tier import Allocation, TierMemory
from tests.lib.streams import inline, separate, simulated
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, shares, train

# The tier: a dictionary of bytes with a delay.


class Later:
    """A transfer that a thread makes."""

    def __init__(self, future: "Future[float]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()

    @property
    def ended(self) -> float:
        return self._future.result()


class DictionaryRecords(Records):
    def __init__(self, plan: SegmentPlan, records: dict[int, Tensor], late: ThreadPoolExecutor) -> None:
        super().__init__(plan, [record.numel() for record in records.values()])
        self._records, self._late = records, late

    def load(self, number: int, into: Tensor) -> Later:
        return self._copy(into[: self.record_bytes(number)], self._records[number])

    def store(self, number: int, source: Tensor) -> Later:
        return self._copy(self._records[number], source[: self.record_bytes(number)])

    def cut(self, tile: int, start: int, plan: SegmentPlan) -> "DictionaryRecords":
        (nbytes,) = record_sizes(plan)
        return DictionaryRecords(plan, {0: self._records[tile][start : start + nbytes]}, self._late)

    def _copy(self, target: Tensor, source: Tensor) -> Later:
        def copy() -> float:
            time.sleep(0.0005)
            target.copy_(source)
            return time.monotonic()

        return Later(self._late.submit(copy))


class DictionarySlab(Allocation):
    def __init__(self, late: ThreadPoolExecutor) -> None:
        self._late = late

    def make(self, plan: SegmentPlan, *, unset: bool = False) -> DictionaryRecords:
        sizes = enumerate(record_sizes(plan))
        return DictionaryRecords(plan, {n: torch.zeros(size, dtype=torch.uint8) for n, size in sizes}, self._late)

    def close(self) -> None:
        pass


class DictionaryTier(TierMemory):
    name = Tier.NVME  # in the place of files: `config.py` would name another one

    def __init__(self, *_: object, **__: object) -> None:
        self._late = ThreadPoolExecutor(4, "late")

    def reserve(self, wanted: Mapping[str, Sequence[SegmentPlan]], *, pin: bool = True) -> dict[str, Allocation]:
        return {storage: DictionarySlab(self._late) for storage in wanted}

    def close(self) -> None:
        self._late.shutdown()


def test_a_tier_of_forty_lines_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.memory_budget.NvmeTier", DictionaryTier)
    what, before = Arithmetic(precision="bf16", accumulation=2, clip=0.5), threading.active_count()
    third = shares(device=0.4, cpu=0.3, nvme=0.3)
    small = {"tile_bytes": 1 << 12}
    runs = (
        (inline(), Movement(3, "cpu", "cpu", "cpu")),
        (inline(), Movement(3, "nvme", "nvme", "nvme").but(**small)),
        (simulated(), Movement(3, "nvme", "nvme", "nvme", "forward").but(**small)),
        (separate(), Movement(3, "nvme", "nvme", "nvme", "forward").but(**small, streamed_updates=0.5)),
        (separate(), Movement(3, params=third, grads=third, optimizer=third).but(**small)),
    )
    expected, *found = (bits(train(what, how, streams=streams, steps=2)) for streams, how in runs)
    assert [each == expected for each in found] == [True] * 4
    assert threading.active_count() == before
