"""The engine's streams beside a device that forgives nothing: the user's own streams, and memory that is let go of."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.engine.forward_backward import saved_tensors
from penstock.runtime.collectives import CollectiveFingerprint, Collectives
from penstock.runtime.streams import DOWNLOAD, UPDATE, UPLOAD, Streams, copy
from tests.device.running import strict
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.lib.streams import inline
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, make_model, prepared, shares, train

KIB = 1 << 10
DEVICE = "strict:0"  # no device outside of the strict process
ON_DEVICE = Movement().but(tile_bytes=4 * KIB)
ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(tile_bytes=4 * KIB)
OPTIMIZER_ON_CPU = Movement(optimizer="cpu").but(tile_bytes=4 * KIB)
IN_FILES = Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(tile_bytes=16 * KIB)


@pytest.fixture
def native() -> Iterator[Any]:
    from tests.device.backend import native

    native.configure(0, 0.02, True)
    native.take_races()
    yield native
    torch.accelerator.synchronize(DEVICE)
    assert native.take_races() == []


@contextlib.contextmanager
def on_a_stream_of_the_users() -> Iterator[torch.Stream]:
    with torch.Stream(DEVICE) as stream:
        stream.wait_stream(torch.accelerator.current_stream(DEVICE))
        yield stream


def same(ours: list[Tensor], others: list[Tensor]) -> None:
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, others, strict=True))


ROWS = {
    "optimizer on device": Movement(params="cpu", grads="cpu").but(tile_bytes=4 * KIB),
    "all in backward": replace(ON_CPU, overlap="backward"),
    "streamed from files": IN_FILES.but(streamed_updates=1.0),
    "in parts": Movement(
        params=shares(device=0.4, cpu=0.3, nvme=0.3),
        grads=shares(device=0.2, cpu=0.5, nvme=0.3),
        optimizer=shares(device=0.5, cpu=0.2, nvme=0.3),
        overlap="forward",
    ).but(tile_bytes=4 * KIB),
}


@pytest.mark.parametrize("how", ROWS.values(), ids=ROWS)
def test_training_on_a_stream_of_the_users(native: Any, how: Movement) -> None:
    begins = how.overlap == "backward"
    what = Arithmetic(accumulation=2, clip=None if begins else 0.5, no_sync=begins)
    there = train(what, how, steps=2)
    with on_a_stream_of_the_users():
        here = train(what, how, steps=2, streams=strict())
    torch.testing.assert_close(here.final, there.final)


def trained(
    model: nn.Module,
    optimizer: penstock.Optimizer,
    steps: int,
    device: str,
    move: Callable[[Any], object] = id,
) -> list[Tensor]:
    """The parameters after some steps; `move` is called with each batch after its step."""
    for (batch,), *_ in batches(1, 1)[:steps]:
        there = [t.to(device) for t in batch]
        optimizer.backward(loss_of(model, there))
        assert not optimizer.step().skipped
        optimizer.zero_grad()
        move(there)
    values = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return values


class BrokenError(Exception):
    pass


def fail(grad: Tensor) -> None:
    raise BrokenError


def alone_but_with_peers(patch: pytest.MonkeyPatch) -> None:
    """One process that runs what ranks do: collectives are kernels on the same stream."""
    patch.setattr(Collectives, "world_size", property(lambda ranks: 2, lambda ranks, size: None), raising=False)
    patch.setattr(Collectives, "agree", lambda ranks, tensor: tensor.mul_(1))
    patch.setattr(CollectiveFingerprint, "check", lambda sequel, summed: None)


class TestMemoryThatIsLetGoOf:
    def test_flaws_that_ranks_agree_on_outlive_the_next_gradient(
        self, native: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each reduction has a number of its own for them; the host gets a copy, and nobody kept the number."""
        alone_but_with_peers(monkeypatch)
        with on_a_stream_of_the_users():
            how = replace(OPTIMIZER_ON_CPU, overlap="backward", stage=0)
            model, optimizer = prepared(Arithmetic(), how, strict())
            trained(model, optimizer, 2, DEVICE)

    @pytest.mark.parametrize("tier", ["cpu", "nvme"])
    def test_activations_that_nobody_wants_any_more_while_they_come_back(
        self, native: Any, tier: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backward that fails leaves those that were brought ahead of it."""
        monkeypatch.setattr(saved_tensors, "LEAST_BYTES", KIB // 2)
        with on_a_stream_of_the_users():
            model = make_model()
            placement = penstock.Placement(activations=tier, nvme_path=disks())
            stock = Arithmetic().make_optimizer(list(model.parameters()))
            streams = strict()
            optimizer = prepare_on(streams, model, stock, precision="fp32", placement=placement)
            native.configure(1, 10.0, True)  # what nobody asks for does not come
            x = batches(1, 1)[0][0][0][0].to(DEVICE)
            for _ in range(3):
                made = model(x)
                handle = model.last.weight.register_hook(fail)
                with pytest.raises(BrokenError):
                    optimizer.backward(made.square().mean())
                handle.remove()
                del made
                gc.collect()
                taken = [torch.ones(16, width, device=DEVICE) for width in (32, 64, 32, 32, 64)]
                same([values.mean() for values in taken], [torch.ones(())] * len(taken))
                optimizer.zero_grad()
            optimizer.backward(model(x).square().mean())
            optimizer.close()

    def test_a_lease_takes_memory_that_activations_do_not_split(self, native: Any) -> None:
        streams: Streams = strict()
        host = torch.arange(4096.0).pin_memory()
        buffer = torch.empty(4096, device=DEVICE)
        streams.deallocate(buffer)
        for _ in range(3):
            streams.allocate(buffer)
            address = buffer.data_ptr()
            event = streams.submit(UPLOAD, lambda: copy(buffer, host), writes=(buffer,))
            event.wait()
            doubled = buffer * 2
            streams.deallocate(buffer)
            activation = torch.zeros(4096, device=DEVICE)
            assert activation.data_ptr() != address, "memory of gathers and of activations is mixed"
            streams.allocate(buffer)
            assert buffer.data_ptr() == address
            streams.deallocate(buffer)
            assert torch.equal(doubled.cpu(), host * 2)
        streams.close()


class TwoStreams(nn.Module):
    """Blocks of one model on two streams, ordered as torch wants it."""

    def __init__(self, streams: list[torch.Stream]) -> None:
        super().__init__()
        self.net = make_model()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        caller = torch.accelerator.current_stream()
        x = self.net.first(x)
        for block, stream in zip(self.net.blocks, self.streams, strict=True):
            stream.wait_stream(torch.accelerator.current_stream())
            x.record_stream(stream)
            with stream:
                x = block(x)
            torch.accelerator.current_stream().wait_stream(stream)
            x.record_stream(caller)
        return self.net.last(x)


@pytest.mark.parametrize("how", [ON_CPU, OPTIMIZER_ON_CPU], ids=["on cpu", "optimizer on cpu"])
def test_compute_that_turns_from_stream_to_stream(native: Any, how: Movement) -> None:
    """Gradients come on the stream of their forward, and a unit is reduced on that of another one."""
    expected = []
    for device in ("cpu", DEVICE):
        streams = [torch.Stream(DEVICE), torch.Stream(DEVICE)]
        model: nn.Module = TwoStreams(streams) if device == DEVICE else make_model()
        stock = Arithmetic().make_optimizer(list(model.parameters()))
        back_end = strict() if device == DEVICE else inline()
        options = penstock.Options(**dict(how.options))
        optimizer = prepare_on(back_end, model, stock, placement=how.placement, precision="fp32", options=options)
        expected.append(trained(model, optimizer, 2, device))
    torch.testing.assert_close(*expected)


@pytest.mark.parametrize(
    ("how", "wait"), [(ON_DEVICE, False), (ON_CPU, True)], ids=["on device, beside training", "on cpu, waited for"]
)
def test_homes_that_move_while_compute_uses_them(native: Any, how: Movement, wait: bool) -> None:
    """Their memory is of the stream that `prepare` was called on, and training is on another one."""
    model, optimizer = prepared(Arithmetic(), how, strict())
    with on_a_stream_of_the_users():

        def move(batch: list[Tensor]) -> None:
            optimizer.offload_states(non_blocking=not wait)
            loss_of(model, batch)
            optimizer.reload_states(non_blocking=not wait)

        here = trained(model, optimizer, 3, DEVICE, move)
    torch.testing.assert_close(here, trained(*prepared(Arithmetic(), how), 3, "cpu"))


def test_views_that_people_keep_of_gathered_parameters(native: Any) -> None:
    """They let go of them when they like, and compute may still read them then."""
    with on_a_stream_of_the_users():
        model, optimizer = prepared(Arithmetic(), ON_CPU, strict())
        native.configure(2, 10.0, True)
        with optimizer.gathered():
            kept = model.blocks[0].up.weight.detach()
        expected = optimizer.full_param(model.blocks[0].up.weight)
        with optimizer.gathered():
            doubled = kept * 2
            del kept
            again = model.blocks[1].up.weight * 2
        same([doubled], [expected * 2])
        same([again], [optimizer.full_param(model.blocks[1].up.weight) * 2])
        optimizer.close()


def test_an_optimizer_that_nobody_closed(native: Any) -> None:
    """Its memory goes with it, and new parameters are on their way there."""
    with on_a_stream_of_the_users():
        streams = strict()
        model, optimizer = prepared(Arithmetic(), replace(OPTIMIZER_ON_CPU, overlap="forward"), streams)
        native.configure(3, 10.0, True)
        optimizer.backward(loss_of(model, [t.to(DEVICE) for t in batches(1, 1)[0][0][0]]))
        optimizer.step()
        for name in (DOWNLOAD, UPDATE, UPLOAD):
            streams._workers[name].submit(lambda: None).synchronize()  # everything is enqueued
        del model, optimizer, streams
        gc.collect()


def test_a_stream_that_reads_what_was_gathered_for_another_one(native: Any) -> None:
    """Parameters that stay have new values from a stream of ours; people order their own streams alone."""
    one, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    x = batches(1, 1)[0][0][0][0].to(DEVICE)
    torch.accelerator.synchronize(DEVICE)
    how = replace(OPTIMIZER_ON_CPU, overlap="forward")
    with one:
        model, optimizer = prepared(Arithmetic(), how, strict())
        optimizer.backward(model(x).square().mean())
        optimizer.step()
    other.wait_stream(one)
    made = []
    for stream in (one, other):
        with stream, torch.no_grad():
            made.append(model(x))
    torch.accelerator.synchronize(DEVICE)
    same(made[:1], made[1:])
    optimizer.close()


class Branches(nn.Module):
    """Two layers of one unit, beside each other."""

    def __init__(self, streams: list[torch.Stream]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in streams)
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        caller = torch.accelerator.current_stream()
        made = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(caller)
            x.record_stream(stream)
            with stream:
                made.append(layer(x))
        for values, stream in zip(made, self.streams, strict=True):
            caller.wait_stream(stream)
            values.record_stream(caller)
        return made[0] * made[1]


@pytest.mark.parametrize("held_back", [False, True], ids=["each", "held back"])
def test_gradients_of_one_unit_that_come_on_several_streams(native: Any, held_back: bool) -> None:
    """It is reduced when backward goes on with what comes before it, which waits for no gradient of a parameter."""
    pairs = [[torch.Stream(DEVICE), torch.Stream(DEVICE)] for _ in range(3)]
    model = nn.Sequential(*[Branches(pair) for pair in pairs])
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    streams = strict()
    placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    optimizer = prepare_on(
        streams,
        model,
        stock,
        stage=0,
        placement=placement,
        units=(Branches,),
        grad_accumulation_dtype=torch.float32,  # what is held back is cast before it is reduced
    )
    x = torch.randn(8, 12).to(DEVICE)
    for _ in range(2):
        if held_back:
            with optimizer.no_sync():
                optimizer.backward(model(x).square().mean())
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
