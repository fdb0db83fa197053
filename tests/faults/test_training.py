"""A disk that fails in training: the error is raised, names what failed, and nothing stays behind or goes on wrong."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from penstock.runtime.streams import Streams
from tests.faults.failing_files import Faults, When
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, simulated
from tests.parity.rows import Net, batches, loss_of, make_model

BATCHES = [batch for (batch,) in batches(1, 2)[0]]
KIND_NAMES = ("params", "grads", "optimizer")
TILE_BYTES = 8192  # two tiles in a block


@dataclass(frozen=True)
class Row:
    """What is on the nvme tier, and how it is trained."""

    params: str = "device"
    grads: str = "device"
    optimizer: str = "device"
    overlap: str = "forward"
    checksums: bool = True

    @property
    def micro_batches(self) -> int:
        return 2 if self.grads == "nvme" else 1

    def prepare(
        self, folder: Path, streams: Streams, model: Net | None = None, given: torch.optim.Optimizer | None = None
    ) -> tuple[Net, penstock.Optimizer]:
        model = model or make_model()
        storages = {kind: getattr(self, kind) for kind in KIND_NAMES}
        optimizer = prepare_on(
            streams,
            model,
            given or torch.optim.AdamW(model.parameters(), lr=1e-2),
            placement=penstock.Placement(**storages, nvme_path=folder),
            overlap=self.overlap,
            options=penstock.Options(tile_bytes=TILE_BYTES, checksums=self.checksums),
        )
        return model, optimizer

    def iterate(self, model: Net, optimizer: penstock.Optimizer) -> None:
        """One optimizer step."""
        for batch in BATCHES[: self.micro_batches]:
            optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    def iterate_to_the_end(self, model: Net, optimizer: penstock.Optimizer) -> None:
        """One optimizer step, and everything that it started."""
        self.iterate(model, optimizer)
        optimizer.synchronize()


KINDS = ({"optimizer": "nvme"}, {"params": "nvme"}, {"grads": "nvme"}, dict.fromkeys(KIND_NAMES, "nvme"))
ROWS = [Row(**kinds) for kinds in KINDS]
WITHOUT_OVERLAP = [replace(ROWS[0], overlap="none"), replace(ROWS[-1], overlap="none")]


def name(row: Row) -> str:
    kinds = [kind for kind in KIND_NAMES if getattr(row, kind) == "nvme"]
    return f"{'+'.join(kinds)}-{row.overlap}"


@cache
def trained(micro_batches: int, steps: int) -> list[Tensor]:
    """The parameters after some steps without a fault."""
    row = Row(grads="device")
    model, optimizer = row.prepare(Path(), inline())
    for _ in range(steps):
        for batch in BATCHES[:micro_batches]:
            optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def descriptors() -> set[str]:
    """Those that are open once they have been listed."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


@contextmanager
def nothing_stays(folder: Path, model: list[Net]) -> Iterator[None]:
    """Folder, threads, descriptors and hooks are afterwards what they were before."""
    threads, before = set(threading.enumerate()), descriptors()
    yield
    assert list(folder.iterdir()) == []
    assert set(threading.enumerate()) == threads
    assert descriptors() <= before
    for module in model[0].modules() if model else ():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "zero_grad" not in vars(module)


def equal(model: Net, expected: list[Tensor]) -> bool:
    return all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))


def check_error(error: penstock.NvmeError, faults: Faults) -> None:
    ((file, offset, what),) = faults.injected
    assert (error.file, error.offset) == (file, offset)
    assert error.errno is not None
    for part in (file, f"offset {offset:,}", what, "nvme_path"):
        assert part in str(error), str(error)


STREAMS: dict[str, Callable[[], Streams]] = {"inline": inline, "simulated": lambda: simulated(0, 0.0003)}


@pytest.mark.filterwarnings("ignore:module forward hook with")  # a prefetch fails as well
@pytest.mark.parametrize(
    ("row", "streams", "when", "again", "every"),
    [
        (ROWS[0], "inline", "submission", False, 1),
        (ROWS[1], "inline", "completion", False, 1),
        (ROWS[2], "simulated", "completion", False, 1),
        (ROWS[3], "inline", "completion", True, 1),
        (WITHOUT_OVERLAP[0], "simulated", "completion", False, 1),
        (WITHOUT_OVERLAP[1], "inline", "submission", False, 3),
    ],
    ids=lambda value: name(value) if isinstance(value, Row) else str(value),
)
def test_every_transfer_of_a_step_fails_once(
    row: Row, streams: str, when: When, again: bool, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of them: the error is raised once it is known, and closing gives everything back."""
    faults = Faults()
    faults.install(monkeypatch)
    number, failed = 1 - every, True
    while failed:
        number += every
        models: list[Net] = []
        with nothing_stays(tmp_path, models):
            failed = one_failure(row, STREAMS[streams](), number, when, again, tmp_path, faults, models)
    assert number > 5


def one_failure(
    row: Row, streams: Streams, number: int, when: When, again: bool, folder: Path, faults: Faults, models: list[Net]
) -> bool:
    """A step whose transfer `number` fails, and then is made `again`. Returns whether there was one."""
    faults.injected.clear()
    faults.arm(0)
    model, optimizer = row.prepare(folder, streams)
    models.append(model)
    row.iterate_to_the_end(model, optimizer)
    faults.arm(number, when)
    steps = 1
    try:
        row.iterate_to_the_end(model, optimizer)
        steps = 2
    except penstock.NvmeError as error:
        check_error(error, faults)
        if again:
            with suppress(penstock.NvmeError):
                optimizer.zero_grad()
                row.iterate_to_the_end(model, optimizer)
                steps = 2
    else:
        assert not faults.injected, "the error was lost"
    faults.arm(0)
    try:
        optimizer.close()
    except penstock.NvmeError as error:
        check_error(error, faults)
        assert steps == 1, "a step was made of values that are not whole"
        assert all(p.numel() == 0 for p in model.parameters())
    else:
        # after both steps where the second was whole, and only one of its gradients did not reach its file
        possible = [trained(row.micro_batches, done) for done in range(steps, 3)]
        assert any(equal(model, expected) for expected in possible)
    optimizer.close()
    return bool(faults.injected)
