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
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, is_released, separate, simulated

WIDTH = 16


def late() -> Streams:
    return simulated(most_seconds=0.0005)


ROWS: dict[str, tuple[Callable[[], Streams], dict[str, Any]]] = {
    "device": (inline, {}),
    "cpu": (inline, {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}),
    "gathered": (separate, {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}),
    "nvme": (inline, {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}),
    "threads": (late, {"params": "cpu", "optimizer": {"cpu": 0.5, "nvme": 0.5}}),
}


def make(row: str, disk: Path, width: int = WIDTH, **options: Any) -> tuple[nn.Module, penstock.Optimizer]:
    streams, placement = ROWS[row]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    optimizer = prepare_on(
        streams(),
        model,
        torch.optim.AdamW(model.parameters()),
        units=(nn.Linear,),
        precision="fp32",
        placement=penstock.Placement(**placement, nvme_path=str(disk) if "nvme" in str(placement) else None),
        options=penstock.Options(**options),
    )
    return model, optimizer


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


#: Calls of every public method of the handle.
CALLS: dict[str, Callable[[penstock.Optimizer, nn.Parameter], object]] = {
    "backward": lambda o, p: o.backward(torch.ones((), requires_grad=True)),
    "step": lambda o, p: o.step(),
    "zero_grad": lambda o, p: o.zero_grad(),
    "no_sync": lambda o, p: o.no_sync(),
    "clip_grad_norm_": lambda o, p: o.clip_grad_norm_(1.0),
    "locations": lambda o, p: o.locations(),
    "gathered": lambda o, p: o.gathered(),
    "full_param": lambda o, p: o.full_param(p),
    "full_grad": lambda o, p: o.full_grad(p),
    "full_state": lambda o, p: o.full_state(p, "exp_avg"),
    "set_full_param": lambda o, p: o.set_full_param(p, torch.ones(WIDTH, WIDTH)),
    "set_full_grad": lambda o, p: o.set_full_grad(p, torch.ones(WIDTH, WIDTH)),
    "set_full_state": lambda o, p: o.set_full_state(p, "exp_avg", torch.ones(WIDTH, WIDTH)),
    "synchronize": lambda o, p: o.synchronize(),
    "state_dict": lambda o, p: o.state_dict(),
    "load_state_dict": lambda o, p: o.load_state_dict({"state": {}, "param_groups": []}),
    "offload_states": lambda o, p: o.offload_states(),
    "reload_states": lambda o, p: o.reload_states(),
    "save": lambda o, p: o.save("never"),
    "load": lambda o, p: o.load("never"),
    "trace": lambda o, p: o.trace("never"),
    "record": lambda o, p: o.record("never"),
    "add_param_group": lambda o, p: o.add_param_group({"params": [p]}),
    "close": lambda o, p: o.close(),
}


def test_the_calls_are_those_of_the_handle() -> None:
    public = {name for name in vars(penstock.Optimizer) if not name.startswith("_")}
    assert public == {*CALLS, "plan"}  # a value, which a child may look at


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
        for name, call in CALLS.items():
            said = rf"^{name}\(\) was called in a child process\. The model was prepared in another process"
            with pytest.raises(penstock.EngineError, match=said):
                call(optimizer, parameters[0])
        assert not Path("never").exists()
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
    optimizer.close()
    other.close()


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


@pytest.mark.parametrize("row", ["cpu", "nvme"])
def test_workers_of_a_loader_serve_while_the_parent_trains(row: str, tmp_path: Path) -> None:
    seen = []
    for workers in (0, 2):
        model, optimizer = make(row, tmp_path)
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
    model, optimizer = make("cpu", tmp_path, width=1536)
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
    optimizer.close()
