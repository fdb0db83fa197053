"""Calls of several threads, interrupts, and methods that are called in the middle of things."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.engine.step import owner_thread
from tests.lib.covering import covering
from tests.lib.engines import ON_CPU, prepared
from tests.lib.models import WIDTH, Blocks, batch_of
from tests.lib.refusals import METHODS
from tests.lib.streams import inline, separate, simulated


def under_way(make: Any = separate, checkpointed: bool = False) -> tuple[Blocks, penstock.Optimizer, Tensor]:
    """Blocks whose `watch` is called before each, also where it runs again."""
    model = Blocks(
        4, inputs=WIDTH, make=lambda width: nn.Linear(width, width), recomputes=False if checkpointed else None
    )
    model, optimizer = prepared(model, make, **ON_CPU)
    model.watch = lambda number: None
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: model.watch(number))
    return model, optimizer, batch_of(model)


def train(model: Blocks, optimizer: penstock.Optimizer, x: Tensor) -> float:
    optimizer.backward(model(x).square().mean())
    norm = optimizer.step().grad_norm
    optimizer.zero_grad()
    return norm


def together(*works: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        try:
            start.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("make", [separate, simulated])
def test_threads_that_hold_a_lock_take_turns(make: Any) -> None:
    model, optimizer, x = under_way(make)
    other_model, other, _ = under_way()
    expected = [train(other_model, other, x) for _ in range(6)]
    lock = threading.Lock()
    norms: list[float] = []
    found: list[Tensor] = []

    def trains() -> None:
        for _ in range(6):
            with lock:
                norms.append(train(model, optimizer, x))

    def infers() -> None:
        for _ in range(6):
            with lock, torch.no_grad():
                found.append(model(x))

    def looks() -> None:
        for _ in range(3):
            with lock, optimizer.gathered():
                optimizer.full_param(model.blocks[2].weight)

    assert together(trains, infers, infers, looks) == []
    assert norms == expected
    assert all(values.isfinite().all() for values in found)


def test_forward_backward_and_step_may_be_in_one_thread_each() -> None:
    model, optimizer, x = under_way()
    other_model, other, _ = under_way()
    expected = [train(other_model, other, x) for _ in range(2)]
    losses: list[Tensor] = []
    norms: list[float] = []
    for _ in range(2):
        assert together(lambda: losses.append(model(x).square().mean())) == []
        assert together(lambda: losses.pop().backward()) == []
        assert together(lambda: norms.append(optimizer.step().grad_norm)) == []
        optimizer.zero_grad()
    assert norms == expected


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_thread_is_refused_by_name_and_disturbs_nothing(where: str) -> None:
    """Whatever it calls: a part of the model, the whole, a backward, a method; also while autograd computes again."""
    model, optimizer, x = under_way(checkpointed=where == "backward")
    other_model, other, _ = under_way()
    expected = [train(other_model, other, x) for _ in range(2)]
    graph = model.blocks[0](x).sum()
    said: list[str] = []

    def elsewhere(number: int) -> None:
        if (number == 1 and torch._C._current_graph_task_id() != -1) or where == "forward":
            for call in (lambda: model.blocks[3](x), lambda: model(x), graph.backward, optimizer.locations):
                said.extend(map(str, together(call)))

    model.watch = elsewhere
    norm = train(model, optimizer, x)
    model.watch = lambda number: None
    assert len(said) == (4 if where == "backward" else 16)
    for number, text in enumerate(said):
        called = ["forward", "forward", "backward", "locations()"][number % 4]
        assert f"' called {called} while thread 'MainThread' is inside " in text, text
        assert "hold a lock around forward, backward and step in both threads, or prepare a model for each." in text
    assert [norm, train(model, optimizer, x)] == expected


class Once:
    def __init__(self, number: int, skip: int = 0, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.number, self.skip, self.error = number, skip, error

    def __call__(self, number: int) -> None:
        if number == self.number:
            self.skip -= 1
            if self.skip < 0:
                self.number = -1
                raise self.error


INTERRUPTS = {
    "where": ("forward", "inference", "recomputed", "gradient"),
    "error": (KeyboardInterrupt, RuntimeError),
    "hidden": (False, True),  # whether hooks cannot see who calls backward, as in a thread of the device
}


@pytest.mark.parametrize(("where", "error", "hidden"), [tuple(row.values()) for row in covering(INTERRUPTS)])
def test_after_an_interrupt_everything_works(
    where: str, error: Any, hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the error is being handled, with its frames at hand; and where hooks cannot see who calls backward."""
    if hidden:
        find = owner_thread._runs_as_long
        monkeypatch.setattr(owner_thread, "_is_autograds", lambda: True)
        monkeypatch.setattr(owner_thread, "_runs_as_long", lambda m: None if owner_thread.in_backward() else find(m))
    model, optimizer, x = under_way(checkpointed=where == "recomputed")
    other_model, other, _ = under_way()
    assert train(model, optimizer, x) == train(other_model, other, x)
    raising = Once(2, skip=1 if where == "recomputed" else 0, error=error)
    if where == "gradient":
        model.blocks[1].weight.register_hook(lambda grad: raising(2))
    else:
        model.watch = raising
    try:
        with torch.set_grad_enabled(where != "inference"):
            loss = model(x).square().mean()
        loss.backward()
        pytest.fail("nothing was raised")
    except error:
        assert torch.is_grad_enabled()
        optimizer.save(tmp_path / "one")
        with torch.no_grad():
            assert model.blocks[3](x).isfinite().all()
    optimizer.zero_grad()
    assert train(model, optimizer, x) == train(other_model, other, x)
    optimizer.load(tmp_path / "one")


def test_an_interrupt_in_another_thread_does_not_stop_this_one() -> None:
    model, optimizer, x = under_way()
    model.watch = Once(1)
    errors = together(lambda: model(x))
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert train(model, optimizer, x) > 0


P, ZEROS = "first", torch.zeros(WIDTH, WIDTH)
#: Of methods that take some.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "clip_grad_norm_": (1.0,),
    "add_param_group": ({"params": []},),
    "full_param": (P,),
    "full_grad": (P,),
    "full_state": (P, "exp_avg"),
    "set_full_param": (P, ZEROS),
    "set_full_grad": (P, ZEROS),
    "set_full_state": (P, "exp_avg", ZEROS),
    "load_state_dict": ("state",),
    "save": ("path",),
    "load": ("path",),
    "trace": ("file",),
    "record": ("record",),
    "backward": ("loss",),
}
REFUSED = {"step", "clip_grad_norm_", "add_param_group", "set_full_param", "save", "load", "close"}


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """A model to be called in, and each method with its arguments."""
    model, optimizer, x = under_way()
    train(model, optimizer, x)
    optimizer.save(tmp_path / "path")
    named = {
        P: model.blocks[0].weight,
        "state": optimizer.state_dict(),
        "path": tmp_path / "path",
        "file": tmp_path / "trace.json",
        "record": tmp_path / "record",
        "loss": torch.ones(1, requires_grad=True).sum(),
    }

    def call(method: str) -> Any:
        arguments = [named.get(a, a) if isinstance(a, str) and a != "exp_avg" else a for a in ARGUMENTS.get(method, ())]
        result = getattr(optimizer, method)(*arguments)
        if method in ("gathered", "no_sync", "trace", "record"):
            with result:
                pass
        return result

    yield model, optimizer, x, call
    optimizer.close()


def attempt(call: Callable[[str], Any], method: str) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        if method not in REFUSED:
            call(method)
        else:
            with pytest.raises(penstock.PenstockError, match="inside a forward or a backward"):
                call(method)

    return hook


@pytest.mark.parametrize("method", METHODS)
def test_in_the_middle_of_things_each_method_works_or_refuses_by_name(table: Any, method: str) -> None:
    model, optimizer, x, call = table
    hook = attempt(call, method)
    for place in ("forward", "block", "parameter"):
        called = []

        def note(*args: Any, called: list[Any] = called) -> None:
            called.append(args)
            hook(*args)

        if place == "forward":
            handle = model.register_forward_hook(note)
        elif place == "block":
            handle = model.blocks[1].register_forward_hook(note)
        else:
            handle = model.blocks[1].weight.register_hook(note)
        loss = model(x).square().mean()
        loss.backward()
        handle.remove()
        assert called, place
        optimizer.step()
        optimizer.zero_grad()
        assert train(model, optimizer, x) > 0, place


@pytest.mark.parametrize("keep_params", [True, False])
@pytest.mark.parametrize("make", [inline, separate])
def test_backward_through_a_graph_of_a_closed_optimizer_is_a_named_error(make: Any, keep_params: bool) -> None:
    model, optimizer, x = under_way(make)
    loss = model(x).square().mean()
    inside = model.blocks[2](model.blocks[1](x))
    optimizer.close(keep_params=keep_params)
    for graph in (loss, inside.sum()):
        with pytest.raises(penstock.EngineError, match=r"graph from before close\(\) or add_param"):
            graph.backward()
    if keep_params:
        model(x).square().mean().backward()
        assert model.blocks[1].weight.grad is not None
