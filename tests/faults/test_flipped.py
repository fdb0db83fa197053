"""Bytes of records that have changed in a file before an update reads them: refused, named, and not stored over."""

import errno
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from torch import Tensor

import penstock
from penstock.engine.unit.unit import Unit
from penstock.runtime.aio import File
from penstock.runtime.host_memory import page_aligned
from penstock.runtime.streams import Streams
from penstock.tiers.nvme import FileRecords
from tests.faults.test_disks import flip
from tests.lib.memory import shorten_rings
from tests.lib.streams import inline, simulated
from tests.unit.engine.test_sums import Row, backward, iterate

HOMES = ("param", "master", "optimizer", "grad")
PLACES = ("in a run", "in what no run touches", "in the padding")


@pytest.fixture(autouse=True)
def files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_rings(monkeypatch)


def place_of(unit: Unit, storage: str, place: str) -> tuple[FileRecords, int, int]:
    """Choose a tile's record, and a byte of it."""
    segment = unit.shard_storages[storage].segments[0]
    assert isinstance(segment, FileRecords)
    if place == "in the padding":
        number = segment.tiles - 1
        return segment, number, segment.record_bytes(number) - 1
    name = "up.weight" if place == "in a run" else "unused"
    (index,) = [k for k, parameter in enumerate(unit.spec.names) if name in parameter]
    element = unit.layout.slots[index].start + 33
    number = element // segment.tile_numel
    buffer = page_aligned(segment.record_bytes(number))
    values = segment.views_of(number, buffer)[-1]
    return segment, number, values[element % segment.tile_numel :].data_ptr() - buffer.data_ptr()


def bytes_at(file: File, offset: int, nbytes: int) -> Tensor:
    buffer = page_aligned(nbytes)
    file.read(offset, buffer).wait()
    return buffer


def step_to_the_end(optimizer: penstock.Optimizer) -> None:
    optimizer.step()
    optimizer.synchronize()


LATE = partial(simulated, most_seconds=0.0003)
ROWS = [(*row, (inline, LATE)[number % 2]) for number, row in enumerate(product(HOMES, PLACES))]


@pytest.mark.parametrize(("storage", "place", "streams"), ROWS)
def test_a_flipped_byte_is_refused_by_the_update(
    storage: str, place: str, streams: Callable[[], Streams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = Row("", streams=streams).prepare()
    iterate(model, optimizer)
    backward(model, optimizer)
    optimizer.synchronize()
    # Not of the unit whose records of this home were moved last: a buffer holds those still.
    unit = next(
        u for u in optimizer._engine.context.units if u.trained and u.name == ("1" if storage == "grad" else "0")
    )
    segment, number, offset = place_of(unit, storage, place)
    written = segment._transfers[number]
    assert written is not None
    file, begin, nbytes = segment._places[number]
    flip(Path(f"/proc/self/fd/{file._descriptor}"), begin + offset)
    flipped, what = bytes_at(file, begin, nbytes), segment.name(number)
    with pytest.raises(penstock.NvmeError) as by_the_threads:
        file.read(begin, page_aligned(nbytes), checksum=written.checksum, what=what).wait()
    with pytest.raises(penstock.NvmeError) as by_the_update:
        step_to_the_end(optimizer)
    error = by_the_update.value
    assert str(error) == str(by_the_threads.value)
    assert (error.errno, error.file, error.offset) == (errno.EBADMSG, file.path, begin)
    assert segment.name(number) in str(error)
    assert bytes_at(file, begin, nbytes).equal(flipped)
    with pytest.raises(penstock.NvmeError):  # no step is made of a half
        optimizer.step()
    with suppress(penstock.NvmeError):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters() if p.requires_grad)
