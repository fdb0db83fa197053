"""The nvme tier as numbers: bytes read and written per step, bytes in files and in host memory, and nothing left."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.checkpoint.format import MARKER
from penstock.cli.reporting.run import read_run
from penstock.layout import ALIGNMENT_NUMEL
from penstock.runtime.aio import File
from penstock.runtime.host_memory import PAGE_BYTES
from penstock.runtime.streams import Streams
from penstock.tiers.nvme import FileAllocation
from penstock.tiers.staging import MOST_FILE_SLOTS, RING_BYTES
from tests.accounts import swap_files
from tests.lib.engines import ON_NVME, loss_of, prepared, train
from tests.lib.memory import shorten_rings
from tests.lib.models import stack
from tests.lib.streams import inline, separate, simulated

WIDTH, LAYERS = 96, 3
TILE_BYTES = 4096
MASTER, MOMENTS, PARAM, GRAD = 2, 4 + 4, 2, 2  # bytes per parameter in bf16
BACK_ENDS = [inline, simulated]


def on_disk(
    streams: Any, disks: Path | list[Path], width: int = WIDTH, layers: int = LAYERS, **how: Any
) -> tuple[nn.Sequential, penstock.Optimizer]:
    return prepared(lambda: stack(layers=layers, width=width), streams, precision="bf16", nvme_path=disks, **how)


def backward(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(loss_of(model))


def shards(model: nn.Module) -> list[int]:
    """Elements of each block's flat buffer."""
    return [sum(-(-p.numel() // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL for p in block.parameters()) for block in model]


def in_records(model: nn.Module, bytes_per_parameter: int, tile_numel: int = TILE_BYTES // 2) -> int:
    """Bytes of all records of some kinds: those of each tile, in whole pages."""
    total = 0
    for numel in shards(model):
        borders = [*range(0, numel, tile_numel), numel]
        total += sum(
            -(-(stop - start) * bytes_per_parameter // PAGE_BYTES) * PAGE_BYTES for start, stop in pairwise(borders)
        )
    return total


def masters_and_moments(model: nn.Module) -> int:
    """Bytes of the records of two homes."""
    return in_records(model, MASTER) + in_records(model, MOMENTS)


def moved(optimizer: penstock.Optimizer, work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that the tier read and wrote for some work."""
    files = files_of(optimizer)
    optimizer.synchronize()
    read, written = sum(file._native.bytes_read for file in files), sum(file._native.bytes_written for file in files)
    work()
    optimizer.synchronize()
    return sum(file._native.bytes_read for file in files) - read, sum(
        file._native.bytes_written for file in files
    ) - written


SLOTS = 2


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_rings(monkeypatch, SLOTS)


def held(bytes_per_parameter: int) -> int:
    """Bytes at most that short rings still hold of some kinds."""
    return SLOTS * TILE_BYTES // PARAM * bytes_per_parameter


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("streams", BACK_ENDS)
def test_an_optimizer_in_files_moves_ten_bytes_a_parameter_each_way(
    streams: Callable[[], Streams], tmp_path: Path
) -> None:
    model, optimizer = on_disk(streams, tmp_path, optimizer="nvme")
    nbytes = masters_and_moments(model)
    assert nbytes < 1.1 * (MASTER + MOMENTS) * sum(shards(model)), "padding"
    for read in (in_records(model, MASTER), nbytes, nbytes):  # the first moments are zeros, which nothing is read for
        assert moved(optimizer, lambda: backward(model, optimizer)) == (0, 0)
        assert moved(optimizer, optimizer.step) == (read, nbytes)


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("streams", BACK_ENDS)
def test_parameters_in_files_move_two_bytes_a_gather_and_two_each_way_in_the_update(
    streams: Callable[[], Streams], tmp_path: Path
) -> None:
    model, optimizer = on_disk(streams, tmp_path, params="nvme")
    nbytes = in_records(model, PARAM)
    for _ in range(2):
        for work, gathers in ((lambda: model(torch.ones(1, WIDTH)), 1), (lambda: backward(model, optimizer), 2)):
            read, written = moved(optimizer, work)
            assert gathers * (nbytes - held(PARAM)) <= read <= gathers * nbytes
            assert written == 0
        read, written = moved(optimizer, optimizer.step)
        assert nbytes - 2 * held(PARAM) <= read <= nbytes
        assert written == nbytes


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("streams", BACK_ENDS)
def test_gradients_in_files_move_two_bytes_each_way(streams: Callable[[], Streams], tmp_path: Path) -> None:
    model, optimizer = on_disk(streams, tmp_path, grads="nvme")
    nbytes = in_records(model, GRAD)
    assert moved(optimizer, lambda: backward(model, optimizer)) == (0, nbytes)
    read, written = moved(optimizer, lambda: backward(model, optimizer))
    assert nbytes - held(GRAD) <= read <= nbytes, "a later micro-batch is added"
    assert written == nbytes
    read, written = moved(optimizer, optimizer.step)
    assert nbytes - held(GRAD) <= read <= nbytes
    assert written == 0


@pytest.mark.parametrize("streams", BACK_ENDS)
def test_what_the_rings_still_hold_is_written_and_not_read(streams: Callable[[], Streams], tmp_path: Path) -> None:
    model, optimizer = on_disk(streams, tmp_path, **ON_NVME)
    nbytes = [in_records(model, each) for each in (PARAM, GRAD, MASTER, MOMENTS)]

    def step() -> None:
        train(model, optimizer)

    first = moved(optimizer, step)
    assert first == (nbytes[0] + nbytes[2], sum(nbytes)), "the first gather, and the masters"
    for _ in range(2):
        assert moved(optimizer, step) == (0, sum(nbytes))


@pytest.mark.parametrize("tiers", [("optimizer",), ("params", "grads", "optimizer")])
def test_a_record_counts_what_is_written(tiers: tuple[str, ...], tmp_path: Path) -> None:
    """In the lines of its steps, what the files count; and the files of checkpoints."""
    model, optimizer = on_disk(separate, tmp_path, **dict.fromkeys(tiers, "nvme"))
    optimizer.synchronize()
    nbytes = sum(in_records(model, each) for each in (MASTER, MOMENTS, *[PARAM, GRAD][: len(tiers) - 1]))
    before = sum(file._native.bytes_written for file in files_of(optimizer) if file._native is not None)
    with optimizer.record(tmp_path / "record") as recorder:
        for number in range(3):
            train(model, optimizer)
            optimizer.save(tmp_path / f"checkpoint-{number}", blocking=number != 1)
        optimizer.synchronize()
        recorder.log(loss=0.0)
    after = sum(file._native.bytes_written for file in files_of(optimizer) if file._native is not None)
    saved = sum(
        file.stat().st_size for file in tmp_path.glob("checkpoint-*/*") if file.is_file() and file.name != MARKER
    )
    run = read_run(tmp_path / "record")
    assert 3 * nbytes == after - before == run.writes()["nvme"].nbytes
    assert run.writes()["checkpoints"].nbytes == saved
    assert run.writes()["nvme"].in_a_step == nbytes


def test_what_is_not_updated_is_not_moved(tmp_path: Path) -> None:
    model, optimizer = on_disk(inline, tmp_path, **ON_NVME)
    optimizer.backward(model[0](torch.ones(1, WIDTH)).float().sum())
    master, moments, param = (in_records(model[:1], nbytes) for nbytes in (MASTER, MOMENTS, PARAM))
    read, written = moved(optimizer, optimizer.step)
    assert (read, written) == (master, master + moments + param), "of one unit; its parameters are there"
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.set_full_grad(model[0].bias, torch.full((WIDTH,), float("inf")))
    assert moved(optimizer, optimizer.step) == (0, 0), "a skipped step"


def files_of(optimizer: penstock.Optimizer) -> list[File]:
    return [
        f
        for allocation in optimizer._engine.context.store._left
        if isinstance(allocation, FileAllocation)
        for f in allocation._files
    ]


def of_the_kernel() -> tuple[int, int]:
    """Bytes that this process made its disks read and write."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def test_the_kernel_counts_the_same_bytes(tmp_path: Path) -> None:
    model, optimizer = on_disk(inline, tmp_path, width=256, **ON_NVME)  # more than the rings hold
    if not Path("/proc/self/io").exists() or not all(f.direct for f in files_of(optimizer)):
        optimizer.close()
        pytest.skip("no direct I/O in the folder of temporary files, or a kernel that counts no bytes")

    found = []
    for _ in range(3):
        before = of_the_kernel()
        ours = moved(optimizer, lambda: train(model, optimizer))
        kernels = [after - then for after, then in zip(of_the_kernel(), before, strict=True)]
        assert min(ours) > 0
        found.append([count - our for count, our in zip(kernels, ours, strict=True)])
    optimizer.close()
    reads, writes = zip(*found, strict=True)  # with what else the process does: pages of a library, a log
    assert (min(reads), min(writes)) == (0, 0)


def test_the_files_hold_what_the_report_says_and_the_padding_of_records(tmp_path: Path) -> None:
    parents = [tmp_path / str(number) for number in range(3)]
    for parent in parents:
        parent.mkdir()
    model, optimizer = on_disk(separate, parents, **ON_NVME)
    assert optimizer.locations().bytes(tier="nvme") == (MASTER + MOMENTS + PARAM + GRAD) * sum(shards(model))
    of_disks = [[f.stat() for f in swap_files(parent)] for parent in parents]
    sizes = [sum(f.st_size for f in files) for files in of_disks]
    assert sum(sizes) == sum(in_records(model, nbytes) for nbytes in (MASTER, MOMENTS, PARAM, GRAD))
    assert max(sizes) - min(sizes) <= in_records(model, MASTER + MOMENTS) / LAYERS, "disks are filled alike"
    allocated = sum(f.st_blocks * 512 for files in of_disks for f in files)
    assert allocated >= sum(sizes), "no space is left to be found missing later"


@pytest.mark.parametrize("streams", [inline, separate])
def test_host_memory_does_not_grow_with_the_model(streams: Callable[[], Streams], tmp_path: Path) -> None:
    """A slot of the update holds a tile of everything, a slot of gathers and gradients one of a parameter."""
    in_slot = TILE_BYTES * (MASTER + MOMENTS + PARAM + GRAD) // PARAM
    for width, layers in ((96, 2), (96, 8), (256, 2)):
        _, optimizer = on_disk(streams, tmp_path, width, layers, **ON_NVME)
        report = optimizer.locations()
        assert report.bytes(tier="cpu") == report.bytes(kind="staging") == MOST_FILE_SLOTS * (in_slot + TILE_BYTES)
        assert report.bytes(tier="device") == 0
        optimizer.close()
    tile_bytes = 1 << 20
    a_tile = tile_bytes * (MASTER + MOMENTS + PARAM + GRAD) // PARAM
    _, optimizer = on_disk(streams, tmp_path, 1536, 1, tile_bytes=tile_bytes, **ON_NVME)  # 4.5 MiB: more than a tile
    assert optimizer.locations().bytes(tier="cpu") + a_tile > RING_BYTES
    assert optimizer.locations().bytes(tier="cpu") <= RING_BYTES + MOST_FILE_SLOTS * tile_bytes
