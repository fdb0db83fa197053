"""What a new tier takes: where a record lies, and how it is loaded and stored. Everything else is there already."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.config import Tier
from penstock.runtime.streams import Streams
from penstock.tiers.storage import Records, SegmentPlan, record_sizes
from penstock.tiers.tier import Allocation, TierMemory
from tests.lib.streams import inline, separate, simulated
from tests.parity.compare import otherwise
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, prepared, shares

KIB = 1 << 10


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


# What it is held to.

NVME = "nvme"
SMALL = {"tile_bytes": 4 * KIB}
MOVEMENTS: tuple[tuple[Callable[[], Streams], Movement], ...] = (
    (inline, Movement(3, NVME, NVME, NVME).but(**SMALL)),
    (simulated, Movement(3, NVME, NVME, NVME, "forward").but(**SMALL)),
    (separate, Movement(2, NVME, "cpu", NVME, "none").but(**SMALL)),
    (separate, Movement(1, "cpu", NVME, "cpu").but(**SMALL)),
    (simulated, Movement(3, "device", NVME, "device").but(**SMALL)),
    (separate, Movement(3, NVME, NVME, NVME, "forward").but(**SMALL, streamed_updates=0.5)),
    (
        separate,
        Movement(
            params=shares(device=0.4, cpu=0.3, nvme=0.3),
            grads=shares(device=0.2, cpu=0.5, nvme=0.3),
            optimizer=shares(device=0.5, cpu=0.2, nvme=0.3),
        ).but(**SMALL),
    ),
)


@pytest.fixture(autouse=True)
def _instead_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.memory_budget.NvmeTier", DictionaryTier)


def test_it_changes_no_bit() -> None:
    what, before = Arithmetic(precision="bf16", accumulation=2, clip=0.5), threading.active_count()
    assert otherwise(what, MOVEMENTS, Movement(params="cpu", grads="cpu", optimizer="cpu"), steps=2) == []
    assert threading.active_count() == before


def test_state_moves_there_and_is_saved_from_there(tmp_path: Path) -> None:
    def values(optimizer: penstock.Optimizer, model: nn.Module) -> list[Tensor]:
        return [t for p in model.parameters() for t in (optimizer.full_param(p), optimizer.full_state(p, "exp_avg"))]

    # What of the gradients is there gives the placement a folder for the rest.
    model, optimizer = prepared(Arithmetic(), Movement(grads=NVME).but(**SMALL), separate())
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    optimizer.step()
    optimizer.offload_states(to=NVME)
    expected = values(optimizer, model)
    optimizer.save(tmp_path / "state")
    optimizer.close()
    model, optimizer = prepared(Arithmetic(), Movement(params=NVME, optimizer=NVME).but(**SMALL), separate())
    optimizer.load(tmp_path / "state")
    assert all(map(torch.equal, values(optimizer, model), expected))
    optimizer.reload_states()
    assert all(map(torch.equal, values(optimizer, model), expected))
    optimizer.close()
