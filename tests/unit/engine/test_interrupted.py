"""Methods that an interrupt or a lack of memory ends at any line: again, they work, or an error says what to do."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import UPLOAD, Event
from penstock.tiers import staging, storage
from penstock.tiers.storage import Storage
from tests.accounts import swap_files
from tests.lib.interrupts import interrupt
from tests.lib.memory import disks
from tests.lib.streams import separate, simulated
from tests.parity.resuming import SMALL, Run, Values, different, iterate, values
from tests.parity.rows import Arithmetic, Movement, Net, shares

BF16 = Arithmetic(precision="bf16")
HALF = shares(device=0.5, nvme=0.5)
of_one_block = partial(Run, BF16, model=partial(Net, width=24, blocks=1))
RUNS = {
    "device": of_one_block(Movement(optimizer=HALF).but(**SMALL), separate),
    "cpu": of_one_block(Movement(3, "cpu", "cpu", shares(cpu=0.5, nvme=0.5)).but(**SMALL), separate),
    "nvme": of_one_block(Movement(3, "nvme", "nvme", "nvme").but(**SMALL)),
    "late": of_one_block(Movement(optimizer=HALF).but(**SMALL), lambda: simulated(most_seconds=0.0001)),
}
PLACES = 3  # of all the lines that a call runs, so many are interrupted
Call = Callable[[penstock.Optimizer, Path], object]


def moves(**how: Any) -> Call:
    return lambda optimizer, _: optimizer.offload_states(**how)


def reloads(optimizer: penstock.Optimizer, _: Path) -> None:
    optimizer.reload_states()


def saves(name: str, **how: Any) -> Call:
    return lambda optimizer, folder: optimizer.save(folder / name, **how)


def loads(optimizer: penstock.Optimizer, folder: Path) -> None:
    optimizer.load(folder / "a")


CALLS: dict[str, tuple[list[Call], Call]] = {
    "offload": ([], moves(to="cpu")),
    "in flight": ([], moves(to="nvme", non_blocking=True)),
    "from nvme": ([moves(to="nvme", keep=True)], reloads),
    "load": ([saves("a")], loads),
    "save beside": ([], saves("c", blocking=False)),
    "save behind a save": ([saves("c", blocking=False)], saves("d", blocking=False)),
}


def after_a_step(run: Run) -> tuple[nn.Module, penstock.Optimizer, Any]:
    prepared = run.prepare()
    iterate(run, *prepared, 0, 0, 1)
    return prepared


def goes_on(run: Run, prepared: tuple[nn.Module, penstock.Optimizer, Any]) -> Values:
    for step in (1, 2):
        iterate(run, *prepared, step, 0, 1)
    return values(*prepared[:2])


def undisturbed(run: Run) -> Values:
    prepared = after_a_step(run)
    found = goes_on(run, prepared)
    prepared[1].close()
    return found


def places_of(run: Run, before: list[Call], call: Call, folder: Path) -> dict[str, int]:
    """Each line of Penstock that a call runs, and the number of its first run among all."""
    _, optimizer, _ = after_a_step(run)
    for prepare in before:
        prepare(optimizer, folder)
    with interrupt(1 << 60) as happened:
        call(optimizer, folder)
    optimizer.close()
    return dict(happened.places)


def some_of(lines: list[int]) -> list[int]:
    return lines[:: len(lines) // PLACES]


def once(run: Run, name: str, lines: int, error: type[BaseException], folder: Path, expected: Values) -> str:
    """Interrupt a call, make it again, and train on; what was refused."""
    before, call = CALLS[name]
    prepared = after_a_step(run)
    optimizer = prepared[1]
    for prepare in before:
        prepare(optimizer, folder)
    with suppress(error, penstock.PenstockError), interrupt(lines, error) as happened:
        call(optimizer, folder)
    try:
        try:
            call(optimizer, folder)
            found = goes_on(run, prepared)
        except penstock.PenstockError as refused:
            optimizer.close(keep_params=False)
            return f"{happened.where}: {refused}"
        assert different(found, expected) == []
        optimizer.close()
    except BaseException as failed:
        failed.add_note(f"{error.__name__} at {happened.where}")
        raise
    return ""


SAYS = ("Close the optimizer", "close the optimizer", "Load a checkpoint")
ROWS = [
    ("device", "offload", KeyboardInterrupt),
    ("late", "in flight", KeyboardInterrupt),
    ("device", "from nvme", MemoryError),
    ("cpu", "load", KeyboardInterrupt),
    ("cpu", "save beside", KeyboardInterrupt),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finaliser nothing is raised
@pytest.mark.parametrize(("where", "name", "error"), ROWS)
def test_what_is_interrupted_works_again_or_says_what_to_do(where: str, name: str, error: Any, tmp_path: Path) -> None:
    run = RUNS[where]
    expected = undisturbed(run)
    lines = sorted(places_of(run, *CALLS[name], tmp_path / "lines").values())
    said = [once(run, name, number, error, tmp_path / str(number), expected) for number in some_of(lines)]
    refused = [text for text in said if text]
    assert all(any(advice in text for advice in SAYS) for text in refused), refused
    assert len(refused) < len(said) / 2


def test_an_interrupt_before_a_copy_of_a_move_is_noted_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was undone gave memory back that the copy still wrote."""

    def late() -> SimulatedStreams:
        return SimulatedStreams(lambda stream, nbytes: 0.05 if stream == UPLOAD else 0.0)

    run = Run(BF16, Movement(optimizer=HALF).but(**SMALL), late)
    prepared = after_a_step(run)
    prepared[1].offload_states(to="cpu")

    def interrupted(written: Storage, event: Event) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Storage, "note_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared[1].reload_states()
    prepared[1].reload_states()
    found = goes_on(run, prepared)
    prepared[1].close()
    assert different(found, undisturbed(run)) == []


@pytest.mark.parametrize(
    ("name", "method"), [("save beside", "_run_beside_training"), ("save behind a save", "finish")]
)
def test_a_save_beside_training_is_noted_whole_or_not_at_all(name: str, method: str, tmp_path: Path) -> None:
    """Noted without a thread that writes it, the next one waited for it without end."""
    run = RUNS["cpu"]
    expected = undisturbed(run)
    places = places_of(run, *CALLS[name], tmp_path / "lines")
    for number in [number for at, number in places.items() if at.startswith("saving.py") and at.endswith(method)]:
        assert once(run, name, number, KeyboardInterrupt, tmp_path / str(number), expected) == ""


@pytest.mark.parametrize(
    ("owner", "method"), [(staging.StagingPlan, "__init__"), (staging.Buffers, "make_slots"), (storage.Ring, "fill")]
)
def test_buffers_that_an_interrupt_kept_from_being_made_are_made_when_they_are_needed(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is where it was before the offload, and the ring was planned for where it was during that."""
    run = RUNS["cpu"]
    expected = undisturbed(run)
    for again in (True, False):  # is it reloaded again, or trained on at once
        prepared = after_a_step(run)
        optimizer = prepared[1]
        optimizer.offload_states(to="nvme")
        for number in range(1, 5):
            calls = count(1)
            made = getattr(owner, method)

            def counted(*arguments: Any, calls: Any = calls, made: Any = made, last: int = number, **named: Any) -> Any:
                if next(calls) == last:
                    raise KeyboardInterrupt
                return made(*arguments, **named)

            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(owner, method, counted)
                optimizer.reload_states()
        if again:
            optimizer.reload_states()
        assert different(goes_on(run, prepared), expected) == []
        optimizer.close()


@pytest.mark.parametrize(("where", "error"), [("cpu", MemoryError), ("late", KeyboardInterrupt)])
def test_an_update_that_ran_out_of_memory_is_told_in_words_where_it_is_met_again(
    where: str, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS[where]
    prepared = after_a_step(run)
    optimizer = prepared[1]
    optimizer.save(tmp_path / "whole")

    def fails(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer._engine.context.rule), "update_many", fails)
        with suppress(error, penstock.EngineError):
            iterate(run, *prepared, 1, 0, 1)
    for call in (
        lambda: optimizer.save(tmp_path / "again"),
        lambda: optimizer.load(tmp_path / "whole"),
        optimizer.step,
        optimizer.close,
    ):
        with pytest.raises(penstock.EngineError, match="Close the optimizer"):
            call()


def own_files() -> set[str]:
    """Find the swap files of this process: those of other tests too, which may have left an optimizer open."""
    (folder,) = disks()
    return {os.readlink(path) for path in swap_files(folder)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["nvme", "late"])
def test_a_close_that_is_interrupted_is_finished_by_the_next(where: str) -> None:
    """Nothing stays, and the model has its parameters: whole, or where they were given up already, without elements."""
    run = RUNS[where]
    prepared = after_a_step(run)
    expected = values(*prepared[:2])
    with interrupt(1 << 60) as happened:
        prepared[1].close()
    there, threads = own_files(), threading.active_count()
    for number in some_of(sorted(happened.places.values())):
        model, optimizer, _ = after_a_step(run)
        kept = optimizer._engine  # as the traceback of an interrupt does, for a while
        with suppress(KeyboardInterrupt), interrupt(number) as happened:
            optimizer.close()
        optimizer.close()
        assert own_files() <= there, happened.where
        assert threading.active_count() <= threads, happened.where
        for name, p in model.named_parameters():
            assert torch.equal(p.float(), expected[name].to(p.dtype).float()), (name, happened.where)
        with pytest.raises(penstock.EngineError, match="after close"):
            optimizer.step()
        assert kept.closed


@pytest.mark.parametrize("where", ["streams", "store", "hooks"])
def test_a_close_that_is_interrupted_at_a_step_of_its_end(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, there = RUNS["nvme"], own_files()
    _, optimizer, _ = after_a_step(run)
    engine = optimizer._engine
    part = {"streams": engine.context.streams, "store": engine.context.store, "hooks": engine.hooks}[where]
    close, interrupts = part.close, [KeyboardInterrupt]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        close()

    monkeypatch.setattr(part, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    with pytest.raises(penstock.EngineError, match="after close"):
        optimizer.step()
    optimizer.close()
    assert engine.closed
    assert own_files() <= there
