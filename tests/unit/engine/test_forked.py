"""Children of a process that trains: they have none of its parameters, and cost it no memory."""

import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import ON_CPU, ON_NVME
from tests.lib.engines import prepared as prepare
from tests.lib.models import stack
from tests.lib.refusals import METHODS, call
from tests.lib.streams import inline, is_released, separate, simulated

WIDTH = 16


ROWS: dict[str, tuple[Callable[[], Streams], dict[str, Any]]] = {
    "device": (inline, {}),
    "cpu": (inline, ON_CPU),
    "gathered": (separate, ON_CPU),
    "nvme": (inline, ON_NVME),
    "threads": (simulated, {"params": "cpu", "optimizer": {"cpu": 0.5, "nvme": 0.5}}),
}


def make(row: str, disk: Path, **sizes: int) -> tuple[nn.Module, penstock.Optimizer]:
    streams, storages = ROWS[row]
    folder = disk if "nvme" in str(storages) else None
    return prepare(stack(layers=4, width=sizes.pop("width", WIDTH)), streams, **storages, nvme_path=folder, **sizes)


def train(model: nn.Module, optimizer: penstock.Optimizer, x: Tensor) -> None:
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def in_child(work: Callable[[], object]) -> None:
    """Run it in a forked child, whose failure fails the test."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            text = ""
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    assert text == ""


@pytest.mark.parametrize("row", ROWS)
def test_a_child_has_placeholders_and_its_writes_do_not_reach_the_parent(row: str, tmp_path: Path) -> None:
    x = torch.ones(4, WIDTH)
    model, optimizer = make(row, tmp_path)
    alone, other = make("device", tmp_path)
    train(model, optimizer, x)
    train(alone, other, x)
    parameters = list(model.parameters())
    before = [optimizer.full_param(p) for p in parameters]
    views = [p.data for p in parameters]
    loss = model(x).square().mean()  # its backward would be of the parent's values

    def look() -> None:
        for p in parameters:
            for use in (p.sum, lambda p=p: p.data.copy_(torch.ones_like(p))):
                with pytest.raises(penstock.EngineError, match=r"forked this one|is released"):
                    use()
        for view in views:
            if not is_released(view):  # of a home
                view.fill_(7)
        for use in (lambda: model(x), loss.backward):
            with pytest.raises(penstock.EngineError, match="forked this one"):
                use()
        for name in METHODS:
            said = rf"^{name}\(\) was called in a child process\. The model was prepared in another process"
            with pytest.raises(penstock.EngineError, match=said):
                call(optimizer, name)
        gc.collect()

    in_child(look)
    for p, value in zip(parameters, before, strict=True):
        assert torch.equal(optimizer.full_param(p), value)
    loss.backward()
    optimizer.zero_grad()
    for step in (model, optimizer), (alone, other):
        train(*step, x)
    for p, q in zip(parameters, alone.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(p), other.full_param(q))


def test_a_child_may_train_a_model_of_its_own(tmp_path: Path) -> None:
    model, optimizer = make("nvme", tmp_path)

    def work() -> None:
        own, trained = make("nvme", tmp_path)
        train(own, trained, torch.ones(4, WIDTH))
        trained.close()

    in_child(work)
    train(model, optimizer, torch.ones(4, WIDTH))
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


class Rows(Dataset[Tensor]):
    def __init__(self, model: nn.Module) -> None:
        self.model = model  # as a dataset that was given too much

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index))


def test_workers_of_a_loader_serve_while_the_parent_trains(tmp_path: Path) -> None:
    seen = []
    for workers in (0, 2):
        model, optimizer = make("nvme", tmp_path)
        rows = Rows(model)
        context = "fork" if workers else None
        for _ in range(2):
            for batch in DataLoader(rows, batch_size=4, num_workers=workers, multiprocessing_context=context):
                train(model, optimizer, batch)
        seen.append([optimizer.full_param(p) for p in model.parameters()])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def bytes_of(*processes: int) -> int:
    """Memory of processes, what they share counted once."""
    rolled = [Path(f"/proc/{process}/smaps_rollup").read_text().splitlines() for process in processes]
    return sum(int(line.split()[1]) << 10 for lines in rolled for line in lines if line.startswith("Pss:"))


def test_memory_does_not_double_while_a_child_lives(tmp_path: Path) -> None:
    """A page that the child had too would be copied by the parent's next write: all of them, at the next update."""
    model, optimizer = make("cpu", tmp_path, width=1536, tile_bytes=4 << 20)
    x = torch.ones(1, 1536)
    train(model, optimizer, x)
    train(model, optimizer, x)
    storages = optimizer.locations().bytes(tier="cpu")
    assert storages > 140 << 20
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        before = bytes_of(os.getpid(), child)
        train(model, optimizer, x)
        assert bytes_of(os.getpid(), child) - before < storages // 3
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
