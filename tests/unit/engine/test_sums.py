"""Checksums of records that updates take in passing: the same as of the bytes in the files, and taken once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.rules.rule import RecordChecksums
from penstock.runtime.aio import File, Transfer, checksum
from penstock.runtime.host_memory import page_aligned
from penstock.runtime.streams import Streams
from penstock.tiers.nvme import FileRecords
from tests.lib.engines import prepared
from tests.lib.memory import shorten_rings
from tests.lib.models import seeded
from tests.lib.streams import inline, separate, simulated

WIDTH, BLOCKS = 40, 2
KINDS = ("params", "grads", "optimizer")


class Block(nn.Module):
    """Its parameters leave gaps of zeros behind them; one is trained and never used, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(700))
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


@dataclass(frozen=True)
class Row:
    name: str
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    precision: str = "bf16"
    master: str = "remainder"
    storages: tuple[str, ...] = KINDS
    overlap: str = "forward"
    streams: Callable[[], Streams] = inline
    tile_bytes: int = 4096
    options: tuple[tuple[str, Any], ...] = ()
    groups: bool = True

    def prepare(self) -> tuple[nn.Module, penstock.Optimizer]:
        def stock(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}]
            return self.optimizer(groups if self.groups else parameters, lr=1e-2)

        return prepared(
            seeded(lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))), 3),
            self.streams,
            stock=stock,
            precision=self.precision,
            master=self.master,
            overlap=self.overlap,
            tile_bytes=self.tile_bytes,
            **{kind: "nvme" if kind in self.storages else "cpu" for kind in KINDS},
            **dict(self.options),
        )


late = partial(simulated, most_seconds=0.0003)
INT8 = (("state_dtype", "int8"),)
ROWS = [
    Row("default"),
    Row("fp32", precision="fp32", streams=separate, tile_bytes=6144),
    Row("int8", options=INT8, tile_bytes=5120),
    Row("int8, one group", options=(*INT8, ("update_threads", 3)), groups=False, streams=separate),
    Row("bf16 states", master="fp32", overlap="none", options=(("state_dtype", "bf16"), ("rounding", "stochastic"))),
    Row("optimizer alone", storages=("optimizer",), streams=late),
    Row("gradients alone", storages=("grads",)),
    Row("amsgrad", optimizer=partial(torch.optim.Adam, amsgrad=True)),
    Row("sgd", optimizer=torch.optim.SGD),
    Row("in backward", overlap="backward", streams=separate),
    Row("large tiles", tile_bytes=1 << 20),
]
#: Whose update is not summed in passing.
OTHERS = [
    Row("another rule", optimizer=torch.optim.RMSprop),
    Row("no checksums", options=(("checksums", False),)),
]


def backward(model: nn.Module, optimizer: penstock.Optimizer, scale: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float32).view(4, WIDTH)
    optimizer.backward(model(x).float().square().mean() * scale)


def iterate(model: nn.Module, optimizer: penstock.Optimizer, scale: float = 1.0) -> None:
    backward(model, optimizer, scale)
    optimizer.step()
    optimizer.zero_grad()


def stored(optimizer: penstock.Optimizer) -> Iterator[tuple[str, int, int]]:
    """Of every record that was written: its name, its checksum, and that of what is in the file."""
    for unit in optimizer._engine.context.units:
        for storage in unit.storages.values():
            for segment in storage.segments:
                for number in range(segment.tiles if isinstance(segment, FileRecords) else 0):
                    assert isinstance(segment, FileRecords)
                    place, written = segment._places[number], segment._transfers[number]
                    if written is not None and segment._checksums:
                        buffer = page_aligned(place.nbytes)
                        place.file.read(place.offset, buffer).wait()
                        yield segment.name(number), written.checksum, checksum(buffer)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[Transfer]:
    """All that are started, of rings that hold few records."""
    started: list[Transfer] = []
    start = File._start

    def note(self: File, *args: Any, **kwargs: Any) -> Transfer:
        started.append(start(self, *args, **kwargs))
        return started[-1]

    monkeypatch.setattr(File, "_start", note)
    shorten_rings(monkeypatch)
    return started


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_sum_of_each_record_is_that_of_its_bytes(row: Row, transfers: list[Transfer]) -> None:
    model, optimizer = row.prepare()
    for _ in range(2):
        iterate(model, optimizer)
        optimizer.synchronize()
        records = list(stored(optimizer))
        assert records or row.storages == ("grads",)
        assert [(name, kept) for name, kept, _ in records] == [(name, found) for name, _, found in records]


@pytest.mark.parametrize("row", ROWS[:4], ids=lambda row: row.name)
def test_the_threads_of_files_sum_nothing_of_an_update(row: Row, transfers: list[Transfer]) -> None:
    model, optimizer = row.prepare()
    iterate(model, optimizer)
    backward(model, optimizer)
    optimizer.synchronize()
    del transfers[:]
    optimizer.step()
    optimizer.synchronize()
    kinds = {"param", "grad", "exp_avg and exp_avg_sq"} | ({"master"} if row.precision == "bf16" else set())
    if "int8" in row.name:
        kinds = kinds - {"exp_avg and exp_avg_sq"} | {"exp_avg and exp_avg_scale and exp_avg_sq and exp_avg_sq_scale"}
    assert {kinds_of(transfer) for transfer in transfers if not transfer._write} == kinds
    assert {kinds_of(transfer) for transfer in transfers if transfer._write} == kinds - {"grad"}
    assert [transfer.what for transfer in transfers if transfer._native.checksum] == []
    assert all(transfer.checksum for transfer in transfers if transfer._write)


def kinds_of(transfer: Transfer) -> str:
    return transfer.what.split(" of ")[0]


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.name)
def test_other_updates_sum_as_they_did(row: Row, transfers: list[Transfer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordChecksums, "of", lambda *_: pytest.fail("nothing is summed in passing"))
    model, optimizer = row.prepare()
    for _ in range(2):
        iterate(model, optimizer)
        optimizer.synchronize()
    checksums = dict(row.options).get("checksums", True)
    assert all(bool(transfer._native.checksum) == checksums for transfer in transfers if transfer._write)
    assert all(kept == found for _, kept, found in stored(optimizer))


@pytest.mark.parametrize("streams", [inline, late])
def test_a_tile_that_may_not_be_updated_is_put_back_as_it_was(
    streams: Callable[[], Streams], transfers: list[Transfer]
) -> None:
    """In backward: its gradient is not finite."""
    model, optimizer = Row("", overlap="backward", streams=streams).prepare()
    iterate(model, optimizer)
    optimizer.synchronize()
    before = [optimizer.full_param(p) for p in model.parameters()]
    backward(model, optimizer, float("inf"))
    with pytest.warns(UserWarning, match="The step was skipped"):
        assert optimizer.step().skipped
    optimizer.synchronize()
    assert all(kept == found for _, kept, found in stored(optimizer))
    assert all(torch.equal(optimizer.full_param(p), b) for p, b in zip(model.parameters(), before, strict=True))
