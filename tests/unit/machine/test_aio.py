"""Files of the nvme tier against a bytearray, in every order, with and without checksums."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.machine.aio import CHUNK_BYTES, File, Queue, checksum
from penstock.machine.arena import PAGE_BYTES, Arena

MIB = 1 << 20


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue(3) as queue:
        yield queue


def memory(nbytes: int, seed: int | None = None) -> Tensor:
    """Page-aligned bytes, random ones where there is a seed."""
    tensor = Arena(nbytes, torch.device("cpu")).lease(nbytes, torch.uint8)
    if seed is not None:
        tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return tensor


@pytest.mark.parametrize(
    "nbytes", [PAGE_BYTES, CHUNK_BYTES - PAGE_BYTES, CHUNK_BYTES, 5 * CHUNK_BYTES + 3 * PAGE_BYTES]
)
@pytest.mark.parametrize("checked", [False, True])
def test_what_was_written_is_read(tmp_path: Path, queue: Queue, nbytes: int, checked: bool) -> None:
    source, into = memory(nbytes, seed=1), memory(nbytes)
    with File(queue, tmp_path / "file", nbytes + 2 * PAGE_BYTES) as file:
        write = file.write(PAGE_BYTES, source, checksum=checked)
        write.wait()
        read = file.read(PAGE_BYTES, into, checksum=write.checksum if checked else None)
        read.wait()
        assert write.done()
        assert read.done()
        assert write.checksum == (checksum(source) if checked else 0)
        assert (file.bytes_written, file.bytes_read) == (nbytes, nbytes)
    assert torch.equal(source, into)
    assert (file.bytes_written, file.bytes_read) == (nbytes, nbytes)
    raw = (tmp_path / "file").read_bytes()
    assert raw == bytes(PAGE_BYTES) + source.numpy().tobytes() + bytes(PAGE_BYTES)
