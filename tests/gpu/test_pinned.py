"""Host memory on a real machine: registered, near the device, and what happens where that is refused."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.checkpoint import tiles
from penstock.checkpoint.tiles import RingMemory
from penstock.engine.state import saving
from penstock.runtime import host_memory
from penstock.runtime.host_memory import Arena
from penstock.runtime.system import device_node
from penstock.tiers.host import bounce_bytes
from tests.gpu import models
from tests.gpu.models import EVERYTHING_ON_CPU, HYPER, assert_same, batches, build, take_step
from tests.lib.engines import prepare_on
from tests.lib.memory import pinning_on_cpu

TILE_BYTES = 16 << 10
RINGS = bounce_bytes(TILE_BYTES) + 4 * TILE_BYTES  # less than any home has


def train(streams, device, placement: penstock.Placement = EVERYTHING_ON_CPU, **options: int) -> list[Tensor]:
    tiles = {"tile_bytes": TILE_BYTES, **options}
    return models.train(streams, device, placement=placement, options=penstock.Options(**tiles))


def needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("nothing is registered for this device")


def test_the_device_knows_a_slab_as_pinned_and_forgets_it(device):
    needs_cuda(device)
    allocation = Arena((200 << 20) + 4096, device)
    allocate = allocation.allocate((200 << 20) + 4096, torch.uint8)
    assert allocation.pinned
    assert allocate.is_pinned()
    assert allocate[-1:].is_pinned()
    allocation.close()
    assert not allocate.is_pinned()


def test_a_slab_lies_on_the_node_of_the_device(device):
    needs_cuda(device)
    node = device_node(device)
    if node is None:
        pytest.skip("one node, or the system does not say which is the device's")
    allocation = Arena(64 << 20, device)
    address = allocation.allocate(64 << 20, torch.uint8).data_ptr()
    table = Path("/proc/self/numa_maps")
    if not table.exists():
        pytest.skip("this system does not say where pages are")
    found = {int(line.split()[0], 16): line.split() for line in table.read_text().splitlines()}
    words = found[max(start for start in found if start <= address)]  # joined with its neighbour, it begins earlier
    if not words[1].startswith("prefer"):
        pytest.skip("this container does not let its processes choose")
    pages = {word.split("=")[0]: int(word.split("=")[1]) for word in words if word[0] == "N" and word[1].isdigit()}
    assert max(pages, key=lambda name: pages[name]) == f"N{node}", pages
    allocation.close()


def test_a_refusal_of_the_device_is_not_found_by_compute_later(device):
    """What is registered already is refused: a refusal that every machine can make."""
    needs_cuda(device)
    allocation = Arena(1 << 20, device)
    allocate = allocation.allocate(1 << 20, torch.uint8)
    assert not host_memory.register(allocate, device)
    assert torch.arange(4, device=device).add(1).sum().item() == 10
    torch.cuda.synchronize(device)
    allocation.close()


def test_a_ring_that_cannot_be_registered_is_torch_s_own(device, monkeypatch):
    needs_cuda(device)
    monkeypatch.setattr(host_memory, "register", lambda allocation, device: False)
    ring = Arena(1 << 20, device, ring=True)
    allocate = ring.allocate(1 << 20, torch.uint8)
    assert ring.pinned
    assert allocate.is_pinned()
    assert allocate.data_ptr() % 4096 == 0
    ring.close()


@pytest.mark.parametrize("rings", [True, False], ids=["rings pinned", "nothing pinned"])
def test_what_is_not_pinned_trains_the_same(make_streams, device, uncompiled, monkeypatch, rings):
    placements = (EVERYTHING_ON_CPU, penstock.Placement(params="cpu", grads="cpu"))
    expected = [train(make_streams(), device, placement) for placement in placements]
    limit = RINGS if rings else 0
    if device.type == "cuda":
        register = host_memory.register
        monkeypatch.setattr(
            host_memory,
            "register",
            lambda allocation, device: allocation.numel() <= limit and register(allocation, device),
        )
        monkeypatch.setattr(host_memory, "pinned_buffer", lambda nbytes, device, alignment: None)
    else:
        pinning_on_cpu(monkeypatch, limit)
    for placement, wanted in zip(placements, expected, strict=True):
        with pytest.warns(UserWarning, match=r"are not pinned \(.*grad.*param"):
            found = train(make_streams(), device, placement)
        assert_same(found, wanted, str(placement))


UNDER_A_LIMIT = """
import warnings
import torch
from tests.gpu.test_pinned import train
from penstock.runtime.accelerator import streams_for
from penstock.runtime.hardware import default_device
warnings.filterwarnings("ignore", message=".*of the cpu tier are not pinned")
device = default_device()
print(sum(float(p.double().sum()) for p in train(streams_for(device), device)))
"""


def test_a_low_limit_of_locked_memory_does_not_end_a_run(device):
    """Whether the driver counts what it registers depends on its version and on the container."""
    needs_cuda(device)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))

    sums = [
        subprocess.run(
            [sys.executable, "-c", UNDER_A_LIMIT],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            preexec_fn=before,
            timeout=120,
            check=False,
        )
        for before in (None, limit)
    ]
    assert [run.returncode for run in sums] == [0, 0], sums[1].stderr[-2000:]
    assert sums[0].stdout == sums[1].stdout


def test_a_save_of_device_state_passes_pinned_memory(make_streams, device, uncompiled, monkeypatch, tmp_path):
    if device.type != "cuda":
        pinning_on_cpu(monkeypatch)
    taken: list[RingMemory] = []
    pinned: list[bool] = []
    fill = tiles.take_tile

    class Noted(RingMemory):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            taken.append(self)

    def watched(segment, number, buffer, *arguments):
        pinned.append(taken[-1]._arena.pinned and (device.type != "cuda" or buffer.is_pinned()))
        fill(segment, number, buffer, *arguments)

    monkeypatch.setattr(saving, "RingMemory", Noted)
    monkeypatch.setattr(tiles, "take_tile", watched)
    model = build()
    optimizer = prepare_on(make_streams(), model, torch.optim.AdamW(model.parameters(), **HYPER))
    for x in batches(2, device):
        take_step(model, optimizer, x)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.save(tmp_path / "a", blocking=False)
    optimizer.synchronize()
    assert pinned
    assert all(pinned)
    assert [ring._arena.pinned for ring in taken] == [False], "given back"
    optimizer.load(tmp_path / "a")
    for mine, theirs in zip((optimizer.full_param(p) for p in model.parameters()), expected, strict=True):
        assert torch.equal(mine, theirs)
    optimizer.close()
