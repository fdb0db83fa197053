"""Loads: what they change is all or named, of one checkpoint on all ranks, and the newest that is whole."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.checkpoint import reader
from penstock.checkpoint.reader import read_marker
from penstock.engine.state import access, loading
from penstock.engine.unit.unit import WeightRange
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate
from tests.parity.resuming import Other, Run, Values, different, go_on, iterate, values
from tests.parity.rows import Arithmetic, Movement

SMALL = {"tile_bytes": 4 << 10}
BF16 = Arithmetic(precision="bf16")
RUN = Run(BF16, Movement(params="cpu", optimizer="cpu").but(**SMALL), separate)


Prepared = tuple[nn.Module, penstock.Optimizer, Any]


def after_steps(run: Run = RUN, count: int = 1) -> Prepared:
    prepared = run.prepare()
    for step in range(count):
        iterate(run, *prepared, step, 0, 1)
    return prepared


class OutOfMemoryError(RuntimeError):
    pass


def fail(*_: Any) -> Any:
    raise OutOfMemoryError("out of memory")


def backward_that_fails(model: nn.Module) -> None:
    """A plain one, in the unit that it comes to first: others are gathered ahead."""
    loss = model(torch.ones(4, 12)).square().mean()
    handle = model.last.weight.register_hook(fail)
    with pytest.raises(OutOfMemoryError):
        loss.backward()
    handle.remove()


# A backward that failed


def test_a_load_after_a_backward_that_raised_is_whole(tmp_path: Path) -> None:
    model, optimizer, scheduler = after_steps(RUN, 2)
    optimizer.save(tmp_path / "a")
    goes_on = go_on(RUN, model, optimizer, scheduler, steps=2)
    optimizer.param_groups[0]["lr"] = 0.5
    backward_that_fails(model)
    optimizer.load(tmp_path / "a")
    assert go_on(RUN, model, optimizer, scheduler, steps=2).otherwise(goes_on) == []


def set_everywhere(setter: str, *name: str) -> Callable[..., None]:
    def change(model: nn.Module, optimizer: penstock.Optimizer) -> None:
        for parameter in model.parameters():
            getattr(optimizer, setter)(parameter, *name, torch.ones(parameter.shape))

    return change


set_param = set_everywhere("set_full_param")
set_state = set_everywhere("set_full_state", "exp_avg")
set_grad = set_everywhere("set_full_grad")


def take_over(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def write_gathered(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    with optimizer.gathered(modify=True), torch.no_grad():
        model.last.weight.zero_()


@pytest.mark.parametrize("change", [set_param, set_state, set_grad, take_over, write_gathered])
def test_changes_after_a_backward_that_raised_are_those_of_one_that_did_not(change: Any) -> None:
    found = []
    for fails in (True, False):
        model, optimizer, scheduler = after_steps()
        if fails:
            backward_that_fails(model)
        change(model, optimizer)
        optimizer.zero_grad()
        iterate(RUN, model, optimizer, scheduler, 1, 0, 1)
        found.append(values(model, optimizer))
    assert different(*found) == []


# In the middle


def check_torn(run: Run, prepared: Prepared, whole: Path, expected: Values) -> None:
    """Nothing computes with the state; another load makes it whole."""
    model, optimizer, _ = prepared
    with pytest.raises(penstock.PenstockError, match="in parts"):
        model(torch.ones(4, 12))
    with pytest.raises(penstock.PenstockError, match="in parts"):
        optimizer.full_param(model.first.weight)
    optimizer.load(whole)
    assert different(values(model, optimizer), expected) == []
    iterate(run, *prepared, 1, 0, 1)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("write_buffer", KeyboardInterrupt()),
        ("write_averages", OutOfMemoryError("out of memory")),
        ("write_weights", KeyboardInterrupt()),
    ],
)
def test_what_fails_after_the_first_write_of_a_load_tears(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(BF16, RUN.how, separate, Other)
    prepared = model, optimizer, _ = after_steps(run)
    optimizer.save(tmp_path / "a")
    expected = values(model, optimizer)

    def raising(*_: Any) -> None:
        raise error

    raised = penstock.CheckpointError if isinstance(error, Exception) else type(error)
    with monkeypatch.context() as patch:
        patch.setattr(loading, where, raising)
        with pytest.raises(raised):
            optimizer.load(tmp_path / "a")
    check_torn(run, prepared, tmp_path / "a", expected)


@pytest.mark.parametrize("change", [set_param, set_state, take_over])
def test_what_fails_in_the_middle_of_a_change_tears(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = model, optimizer, _ = after_steps()
    optimizer.save(tmp_path / "a")
    expected = values(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(WeightRange, "write", fail)
        patch.setattr(access, "write_state", fail)
        with pytest.raises(penstock.EngineError, match="failed in the middle"):
            change(model, optimizer)
    check_torn(RUN, prepared, tmp_path / "a", expected)


@pytest.mark.parametrize(
    "state", [{"step": torch.ones(2)}, {"step": torch.tensor(float("nan"))}, {"exp_avg": torch.ones(12).to_sparse()}]
)
def test_a_state_that_cannot_be_written_is_refused_before_anything_changed(state: dict[str, Tensor]) -> None:
    model, optimizer, _ = after_steps()
    before = values(model, optimizer)
    wrong = optimizer.state_dict()
    wrong["param_groups"][0]["lr"] = 7.0
    wrong["state"][1] |= state
    with pytest.raises(penstock.ConfigError):
        optimizer.load_state_dict(wrong)
    with pytest.raises(penstock.ConfigError, match="sparse"):
        optimizer.set_full_param(model.first.bias, torch.ones(model.first.bias.shape).to_sparse())
    assert different(values(model, optimizer), before) == []


# Buffers


class Buffered(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.register_buffer("expanded", torch.full((1, 3), fill).expand(4, 3))
        self.register_buffer("learned", torch.full((3,), fill, requires_grad=True))
        with torch.inference_mode():
            self.register_buffer("frozen", torch.full((2, 2), fill))
        self.register_buffer("turned", torch.full((2, 5), fill).t())
        self.register_buffer("scalar", torch.tensor(fill))
        self.register_buffer("empty", torch.ones(0, 3))
        self.register_buffer("phases", torch.full((2, 2), complex(fill, 2 * fill), dtype=torch.complex128))
        self.register_buffer("conjugate", torch.full((2,), complex(fill, 1), dtype=torch.complex64).conj())
        self.register_buffer("scratch", torch.ones(2).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def buffered(fill: float) -> tuple[Buffered, penstock.Optimizer]:
    model = Buffered(fill)
    return model, penstock.prepare(model, torch.optim.AdamW(model.parameters()))


def persistent(model: nn.Module) -> Values:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name != "scratch"}


def test_a_buffer_that_a_value_does_not_fit_is_named_before_anything_changed(tmp_path: Path) -> None:
    model, optimizer = buffered(1.5)
    model.expanded = torch.arange(12.0).view(4, 3)
    optimizer.save(tmp_path / "differing")
    model.expanded = torch.full((4, 3), 2)
    optimizer.save(tmp_path / "whole-numbers")
    optimizer.close()
    there, other = buffered(3.0)
    before = persistent(there), other.full_param(there.first.weight)
    for name, said in (("differing", "elements that differ"), ("whole-numbers", "is torch.int64")):
        with pytest.raises(penstock.CheckpointError, match=f"'buffers.expanded' .*{said}"):
            other.load(tmp_path / name)
    assert different(persistent(there), before[0]) == []
    assert torch.equal(other.full_param(there.first.weight), before[1])


class Growing(nn.Module):
    """A memory that grows in training, which another module has too; `own` is for a view of it."""

    def __init__(self, rows: int, *, view: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.register_buffer("memory", torch.zeros(rows, 3))
        self.other = nn.Module()
        self.other.register_buffer("memory", self.memory[:1] if view else self.memory)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def growing(rows: int, *, view: bool = False) -> tuple[Growing, penstock.Optimizer]:
    model = Growing(rows, view=view)
    return model, penstock.prepare(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(("rows", "now"), [(2, 5), (3, 0)])
def test_a_buffer_that_has_grown_is_loaded(
    rows: int, now: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Into the same tensor, so that whoever holds it has the values."""
    model, optimizer = growing(rows)
    model.memory = model.other.memory = torch.arange(3.0 * now).view(now, 3)
    optimizer.save(tmp_path / "a")
    there, other = growing(rows)
    held = there.memory
    with caplog.at_level(logging.WARNING, "penstock"):
        other.load(tmp_path / "a")
    assert there.memory is held
    assert there.other.memory is held
    assert torch.equal(held, model.memory)
    assert f"has the buffer 'memory' in shape ({now}, 3), not ({rows}, 3)" in caplog.text
    held.add_(1)  # memory of its own
    other.load(tmp_path / "a")
    assert torch.equal(held, model.memory)


@pytest.mark.parametrize("reshaped", [(), ("expanded", "learned", "frozen", "turned", "scalar", "empty", "phases")])
def test_buffers_of_every_kind_come_back_also_in_another_shape(reshaped: tuple[str, ...], tmp_path: Path) -> None:
    model, optimizer = buffered(1.5)
    for name in reshaped:
        old = getattr(model, name)
        setattr(model, name, torch.arange(6.0).to(old.dtype).view(2, 1, 3))
    optimizer.save(tmp_path / "a")
    there, other = buffered(3.0)
    kept = dict(there.named_buffers())
    other.load(tmp_path / "a")
    assert different(persistent(there), persistent(model)) == []
    assert all(buffer is kept[name] for name, buffer in there.named_buffers())
    assert there.learned.requires_grad


def test_a_buffer_that_cannot_take_another_shape_is_named_before_anything_changed(tmp_path: Path) -> None:
    model, optimizer = growing(2)
    model.memory = torch.ones(5, 3)
    optimizer.save(tmp_path / "apart")
    model.other.memory = torch.ones(1, 3)
    optimizer.save(tmp_path / "view")
    there, other = growing(2)
    viewing, third = growing(2, view=True)
    for loads, of, name, said in (
        (other, there, "apart", "is the same tensor here as one of another shape there"),
        (third, viewing, "view", "shares its memory with another tensor"),
    ):
        before = of.memory.clone(), loads.full_param(of.first.weight)
        with pytest.raises(penstock.CheckpointError, match=f"memory'.* {said}.*Load it into the model"):
            loads.load(tmp_path / name)
        assert torch.equal(of.memory, before[0])
        assert torch.equal(loads.full_param(of.first.weight), before[1])


def grown_on_two_ranks(rank: int, parent: Path) -> None:
    """The same bytes on both ranks, in another shape."""
    model, optimizer = growing(2)
    model.memory = model.other.memory = torch.zeros((4, 3) if rank == 0 else (2, 6))
    optimizer.save(parent / "a")
    optimizer.close()
    there, other = growing(2)
    other.load(parent / "a")
    assert there.memory.shape == ((4, 3) if rank == 0 else (2, 6))
    other.close()


def test_each_rank_gets_the_shape_of_its_own_buffer(tmp_path: Path) -> None:
    run_ranks(grown_on_two_ranks, 2, tmp_path)


# The newest that is whole


def two_checkpoints(parent: Path) -> tuple[Prepared, Values]:
    """`old`, with its values, and `new`, of which a tile is damaged; and an engine that is two steps further."""
    prepared = model, optimizer, _ = after_steps()
    optimizer.save(parent / "old", extra={"name": "old"})
    old = values(model, optimizer)
    iterate(RUN, *prepared, 1, 0, 1)
    optimizer.save(parent / "new", extra={"name": "new"})
    iterate(RUN, *prepared, 2, 0, 1)
    (tiles,) = (parent / "new").glob("*.tiles")
    data = bytearray(tiles.read_bytes())
    data[len(data.rstrip(b"\0")) - 1] ^= 1  # what follows may be between tiles
    tiles.write_bytes(data)
    return prepared, old


def test_a_damaged_tile_changes_nothing_once_a_step_was_made(tmp_path: Path) -> None:
    (model, optimizer, _), _ = two_checkpoints(tmp_path)
    before = values(model, optimizer)
    with pytest.raises(penstock.CheckpointError, match="is damaged"):
        optimizer.load(tmp_path / "new")
    assert different(values(model, optimizer), before) == []


@pytest.mark.parametrize(("verify", "trained"), [(None, True), (False, False)])
def test_the_newest_that_verifies_is_taken(
    verify: bool | None, trained: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model, optimizer, scheduler), old = two_checkpoints(tmp_path)
    if not trained:
        optimizer.close()
        model, optimizer, scheduler = RUN.prepare(seed=9)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert optimizer.load(tmp_path / "latest", verify=verify) == {"name": "old"}
    assert f"{tmp_path / 'new'} is passed over" in caplog.text
    assert "is damaged" in caplog.text
    assert different(values(model, optimizer), old) == []
    iterate(RUN, model, optimizer, scheduler, 1, 0, 1)


def test_without_verifying_a_damaged_tile_tears(tmp_path: Path) -> None:
    (model, optimizer, _), old = two_checkpoints(tmp_path)
    with pytest.raises(penstock.CheckpointError, match="is damaged"):
        optimizer.load(tmp_path / "new", verify=False)
    with pytest.raises(penstock.CheckpointError, match="is damaged"):
        model(torch.ones(4, 12))
    optimizer.load(tmp_path / "old")
    assert different(values(model, optimizer), old) == []


def test_a_save_that_is_under_way_is_the_newest(tmp_path: Path) -> None:
    model, optimizer, scheduler = after_steps()
    optimizer.save(tmp_path / "one", extra={"name": "one"})
    iterate(RUN, model, optimizer, scheduler, 1, 0, 1)
    optimizer.save(tmp_path / "two", extra={"name": "two"}, blocking=False)
    assert optimizer.load(tmp_path) == {"name": "two"}


# After an error


def said_by_close(optimizer: penstock.Optimizer, raised: Exception, keep_params: bool) -> Exception | None:
    """What `close` raises in a `finally`, while another error is on its way."""
    try:
        raise raised
    except Exception:
        try:
            optimizer.close(keep_params=keep_params)
        except Exception as error:
            return error
    return None


def test_close_does_not_raise_again_what_a_load_raised(tmp_path: Path) -> None:
    (_, optimizer, _), _ = two_checkpoints(tmp_path)
    with pytest.raises(penstock.CheckpointError, match="is damaged") as caught:
        optimizer.load(tmp_path / "new", verify=False)
    assert said_by_close(optimizer, caught.value, keep_params=False) is None


@pytest.mark.parametrize("keep_params", [True, False])
def test_close_in_a_finally_hides_no_error(keep_params: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what nobody has heard of yet, and what stands against what it was asked for."""
    update = OSError(5, "Input/output error")

    def finish() -> None:
        raise update

    led_to = ValueError("of the loop")
    led_to.__cause__ = update
    for raised, is_new in ((update, False), (led_to, False), (ValueError("of the loop"), True)):
        _, optimizer, _ = after_steps()
        monkeypatch.setattr(optimizer._engine.access, "finish", finish)
        said = said_by_close(optimizer, raised, keep_params)
        assert (said is update) == (is_new or keep_params)


# Two ranks


class Counting(nn.Module):
    """Buffers that differ by rank, that are alike, and that only one rank has otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("alike", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def of_rank(model: nn.Module) -> Values:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def on_two_ranks(rank: int, parent: Path) -> None:
    model = Counting()
    optimizer = penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = []
    for step in range(3):
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.save(parent / f"step-{step}", extra={"step": step})
        saved.append((of_rank(model), optimizer.full_param(model.first.weight)))
    assert read_marker(parent / "step-2").ranks[1].tensors is not None

    see_everything = reader.checkpoints_in
    with pytest.MonkeyPatch.context() as patch:  # this rank does not see the newest one yet
        patch.setattr(reader, "checkpoints_in", lambda path: see_everything(path)[: -1 if rank else None])
        for path in (parent, parent / "latest"):
            assert optimizer.load(path)["step"] == 2
    found = of_rank(model), optimizer.full_param(model.first.weight)
    assert different(found[0], saved[2][0]) == []
    assert torch.equal(found[1], saved[2][1])
    with pytest.raises(penstock.PenstockError, match=r"another checkpoint on this rank|Rank 1 failed"):
        optimizer.load(parent / f"step-{rank}")
    assert torch.equal(optimizer.full_param(model.first.weight), saved[2][1])
    if rank:  # a tile of this rank alone
        (tiles,) = (parent / "step-2").glob("*-00001.tiles")
        data = bytearray(tiles.read_bytes())
        data[10] ^= 1
        tiles.write_bytes(data)
    optimizer.save(parent.parent / "barrier")
    assert optimizer.load(parent)["step"] == 1
    assert different(of_rank(model), saved[1][0]) == []
    assert torch.equal(optimizer.full_param(model.first.weight), saved[1][1])
    optimizer.close()


def test_two_ranks_load_one_checkpoint_and_each_its_own_buffers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = tmp_path / "ck"
    run_ranks(on_two_ranks, 2, parent)
    model = Counting()
    optimizer = penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, "penstock"):
        optimizer.load(parent / "step-1")
    assert "was saved by 2 ranks, 1 of which had buffers of their own" in caplog.text
    optimizer.save(tmp_path / "kept" / "a", keep=1)
    optimizer.close()
