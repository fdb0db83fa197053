"""`Placement(activations=...)`: saved tensors leave the device in forward and are back when backward wants them."""

import gc
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.engine.forward_backward import saved_tensors
from penstock.errors import ConfigError
from penstock.runtime.host_memory import _Memory
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPLOAD, Event, Streams, Work
from penstock.tiers import allocation
from penstock.trace import NO_LABEL, Label
from tests.accounts import assert_table_agrees
from tests.lib.engines import prepared as prepare
from tests.lib.engines import sgd
from tests.lib.memory import pinning_on_cpu
from tests.lib.models import Block, Blocks, batch_of, seeded
from tests.lib.streams import inline, late, separate, simulated, until_waited_for

WIDTH, ROWS, BLOCKS = 64, 32, 4


class Dropping(Block):
    """With dropout, and an activation whose memory is in another order than its elements."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x))).transpose(0, 1).contiguous().transpose(0, 1)
        return x + F.dropout(self.down(hidden), 0.1)


def net(reentrant: bool | None = None) -> Blocks:
    model = Blocks(BLOCKS, WIDTH, make=Dropping, recomputes=reentrant)
    model.first = model.last = nn.Identity()
    return model


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 1024)
    monkeypatch.setattr(allocation, "STEP_BYTES", 0)  # as many slabs as there can be


def prepared(
    streams: Streams, tier: str | None, disk: Path, reentrant: bool | None
) -> tuple[Blocks, penstock.Optimizer]:
    torch.manual_seed(0)  # of the dropout, too
    return prepare(net(reentrant), streams, params="cpu", activations=tier, nvme_path=disk)


def loss_of(model: Blocks, seed: int, rows: int = ROWS) -> Tensor:
    return (
        model(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()).square().mean()
    )


def run(streams: Streams, tier: str | None, disk: Path, reentrant: bool | None) -> list[Any]:
    model, optimizer = prepared(streams, tier, disk, reentrant)
    found: list[Any] = []
    for step in range(2):
        losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]  # two forwards before the first backward
        found += [loss.item() for loss in losses]
        for loss in losses:
            optimizer.backward(loss)
        found.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    found += [optimizer.full_param(p).tolist() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("reentrant", "places"), [(None, [(inline, "cpu"), (separate, "nvme")]), (True, [(late, "nvme")])]
)
def test_no_bit_changes(reentrant: bool | None, places: list[Any], tmp_path: Path) -> None:
    """With dropout, and two forwards at once; all else is in the table of parity."""
    expected = run(inline(), None, tmp_path, reentrant)
    for make, tier in places:
        assert run(make(), tier, tmp_path, reentrant) == expected, (make, tier)


def saved_bytes(optimizer: penstock.Optimizer, tier: str) -> int:
    return optimizer.locations().bytes(kind="activation", tier=tier)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_with_checkpointing_the_inputs_of_the_blocks_leave(tier: str, tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), tier, tmp_path, False)
    for _ in range(3):  # the memory is used again
        optimizer.backward(loss_of(model, 0))
        optimizer.zero_grad()
        gc.collect()
    inputs = BLOCKS * ROWS * WIDTH * 4
    assert inputs <= saved_bytes(optimizer, tier) <= inputs + 2 * ROWS * WIDTH * 4  # and what the loss saves


def test_a_tensor_that_several_operations_save_leaves_once_and_parameters_stay() -> None:
    class Three(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            return sum(head(x) for head in self)

    copied: list[int] = []

    def delay(stream: str, nbytes: int) -> float:
        if stream == DOWNLOAD:
            copied.append(nbytes)
        return 0.0

    model = Three(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    _, optimizer = prepare(model, SimulatedStreams(delay), activations="cpu")
    optimizer.backward(model(torch.ones(ROWS, WIDTH)).sum())
    assert copied == [ROWS * WIDTH * 4]


def test_no_grad_saves_nothing_and_nvme_needs_a_folder(tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), "cpu", tmp_path, None)
    with torch.no_grad():
        model(torch.ones(ROWS, WIDTH))
    assert saved_bytes(optimizer, "cpu") == 0
    optimizer.close()
    with pytest.raises(ConfigError, match="activations='disk' needs a folder"):
        penstock.prepare(model, sgd(model.parameters()), placement=penstock.Placement(activations="disk"))


class Watched(torch.autograd.Function):
    """Saves what it is given as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        conjugate, negative, sparse = saved
        assert conjugate.is_conj()
        assert negative.is_neg()
        assert sparse.layout == torch.sparse_csr
        weights = conjugate.resolve_conj().imag + negative.resolve_neg() + sparse.to_dense()
        return grad * weights, None, None, None


class Saves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        held = torch.complex(x.detach(), 2 * x.detach())
        x = Watched.apply(x, held.conj(), held.conj().imag, x.detach().to_sparse_csr()).square()
        nested = torch.nested.as_nested_tensor(list(x.split(4)), layout=torch.strided)
        return torch.nested.to_padded_tensor(torch.relu(nested), 0.0).reshape(x.shape)


def test_tensors_that_are_no_plain_memory_stay(tmp_path: Path) -> None:
    found = []
    for tier, streams in ((None, inline), ("cpu", inline), ("nvme", separate), ("cpu", simulated)):
        model, optimizer = prepare(seeded(Saves), streams, activations=tier, nvme_path=tmp_path)
        optimizer.backward(model(batch_of(model, rows=ROWS)).sum())
        found.append([optimizer.full_grad(p) for p in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def hooks_on_this_thread() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("goes_on", ["elsewhere", "here", "closes"])
def test_a_forward_that_fails_leaves_no_hooks(goes_on: str, error: type[BaseException], tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), "cpu", tmp_path, None)
    handle = model.blocks[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(error):
        loss_of(model, 0)
    handle.remove()
    gc.collect()
    before = saved_bytes(optimizer, "cpu")
    outside = torch.randn(ROWS + 1, WIDTH, requires_grad=True)  # of a size that needs a home of its own
    if goes_on == "elsewhere":
        other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # a module's call, as the model's was
        other(outside).exp().sum().backward()
        assert saved_bytes(optimizer, "cpu") == before, "what runs outside of the model is not taken"
    if goes_on != "closes":
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
    optimizer.close()
    assert hooks_on_this_thread() is None


LONGEST = 96


def bytes_of_lengths(disk: Path, lengths: list[int]) -> int:
    """What the host holds after steps with batches of these lengths."""
    model, optimizer = prepared(late(), "cpu", disk, None)
    for step, rows in enumerate(lengths):
        optimizer.backward(loss_of(model, step, rows))
        optimizer.step()
        optimizer.zero_grad()
    held = saved_bytes(optimizer, "cpu")
    optimizer.synchronize()
    assert_table_agrees(optimizer, disk)
    assert held == optimizer._engine.hooks._activations._cuts.capacity
    optimizer.close()
    return held


def test_after_lengths_that_change_there_is_what_the_longest_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tensors, "AHEAD_BYTES", 16 << 10)  # what is leaving still counts
    longest = bytes_of_lengths(tmp_path, [LONGEST] * 2)
    draw = random.Random(5)
    lengths = [draw.randint(8, LONGEST) for _ in range(12)]
    changing = bytes_of_lengths(tmp_path, [*lengths[:6], LONGEST, *lengths[6:]])
    assert changing <= longest * 1.125 + (16 << 10)


def test_memory_is_pinned_in_a_few_steps_within_its_budget_and_all_of_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each tensor or size. What the budget has no room for is pageable; no bit depends on it."""
    monkeypatch.setattr(allocation, "STEP_BYTES", 256 << 10)
    monkeypatch.setattr(allocation, "FIRST_BYTES", 32 << 10)
    monkeypatch.setattr(allocation, "LEAST_PINNED", 4 << 10)
    pinned = pinning_on_cpu(monkeypatch)
    reserved: list[int] = []
    found, budgets = [], (None, 200 << 10, 0)
    for budget in budgets:
        torch.manual_seed(0)
        most = None if budget is None else budget + (32 << 10)
        model, optimizer = prepare(net(), simulated, activations="cpu", pinned_bytes=most, overlap="none")
        store = optimizer._engine.context.store
        reserve = store.reserve
        monkeypatch.setattr(store, "reserve", lambda *a, r=reserve, **k: reserved.append(1) or r(*a, **k))
        reserved.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step, rows in enumerate([9, 60, LONGEST, 17, 90]):
                optimizer.backward(loss_of(model, step, rows))
                optimizer.step()
                optimizer.zero_grad()
        rows_ = [row for row in optimizer.locations().rows if row.kind == "activation"]
        assert len(reserved) == len(rows_) <= 7
        if budget is None:
            assert all(row.pinned for row in rows_)
        else:
            assert sum(pinned.values()) <= most
            assert any(row.pinned for row in rows_) == (budget > 0)
            assert not all(row.pinned for row in rows_)
            assert "are not pinned (activation" in str(said[0].message)
        found.append([optimizer.full_param(p).tolist() for p in model.parameters()])
        optimizer.close()
        assert pinned == {}
    assert found[0] == found[1] == found[2]


def test_memory_of_activations_goes_with_an_offload_and_with_close(tmp_path: Path) -> None:
    """In files; the host's own is given back, too, where it is pinned."""
    tier = "nvme"

    def maps() -> int:
        gc.collect()
        return sum(issubclass(type(each), _Memory) for each in gc.get_objects())

    expected = run(inline(), None, tmp_path, None)
    others = maps()
    model, optimizer = prepared(simulated(), tier, tmp_path, None)
    found: list[Any] = []
    for step in range(2):
        losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]
        found += [loss.item() for loss in losses]
        if step == 1:
            before = saved_bytes(optimizer, tier)
            optimizer.offload_states({"optimizer"})  # what is needed for a backward stays
            assert saved_bytes(optimizer, tier) == before > 0
        for loss in losses:
            optimizer.backward(loss)
        found.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
        del loss, losses
        optimizer.offload_states({"optimizer"})
        assert saved_bytes(optimizer, tier) == 0
    found += [optimizer.full_param(p).tolist() for p in model.parameters()]
    assert found == expected
    optimizer.backward(loss_of(model, 0))
    optimizer.close(keep_params=False)
    assert maps() <= others
    assert not list(tmp_path.iterdir())


class Noting(SimulatedStreams):
    """Notes when copies of activations begin and end; those up wait until they, or later anything, is waited for."""

    def __init__(self) -> None:
        super().__init__(lambda stream, nbytes: 0.0)
        self.notes: list[tuple[str, str, int]] = []
        self.any_wait = False

    def submit(self, stream: str, work: Work, *, label: Label = NO_LABEL, **rest: Any) -> Event:
        if label.unit != "activation":
            return super().submit(stream, work, label=label, **rest)
        ((one,),) = work.args
        target, source = one.args  # of a copy
        storage = (target if stream == DOWNLOAD else source).data_ptr()

        mine: list[Event] = []

        def noted() -> Any:
            if stream == UPLOAD:
                until_waited_for(mine, or_once=lambda: self.any_wait and until_waited_for() is None)
            self.notes.append(("begins", stream, storage))
            done = work()
            self.notes.append(("ends", stream, storage))
            return done

        self.notes.append(("submitted", stream, storage))
        mine.append(super().submit(stream, noted, label=label, **rest))
        return mine[0]


def test_a_home_is_written_again_only_when_what_reads_it_is_over() -> None:
    """Those that came back ahead of a backward that fails are read late, when the next forward takes their homes."""
    # Nothing else goes up, which would be waited for.
    model, optimizer = prepare(net(), Noting(), stock=sgd, activations="cpu")
    streams = optimizer._engine.context.streams

    def fail(grad: Tensor) -> None:
        raise KeyError("no")

    handle = model.blocks[2].register_forward_hook(lambda _module, _inputs, made: made.register_hook(fail) and None)
    loss = loss_of(model, 0)
    handle.remove()
    with pytest.raises(KeyError):
        optimizer.backward(loss)
    del loss
    optimizer.zero_grad()
    gc.collect()
    reading = {storage for what, stream, storage in streams.notes if (what, stream) == ("submitted", UPLOAD)}
    reading -= {storage for what, stream, storage in streams.notes if (what, stream) == ("ends", UPLOAD)}
    assert reading, "some are on their way"
    before = len(streams.notes)
    streams.any_wait = True  # a forward waits for none of them
    optimizer.backward(loss_of(model, 0))
    optimizer.close()
    after = streams.notes[before:]
    assert [what for what, stream, _ in after if stream == DOWNLOAD].count("ends") > len(reading) / 2
    for storage in reading:
        written = [place for place, note in enumerate(after) if note == ("begins", DOWNLOAD, storage)]
        assert all(after.index(("ends", UPLOAD, storage)) < place for place in written)
