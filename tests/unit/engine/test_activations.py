"""`Placement(activations=...)`: saved tensors leave the device in forward and are back when backward wants them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.engine import activations
from penstock.errors import ConfigError
from penstock.machine.simulated import SimulatedStreams
from penstock.machine.streams import DOWNLOAD, Streams
from tests.support import inline, prepare_on, separate, simulated

WIDTH, ROWS, BLOCKS = 64, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(
            self.down(torch.nn.functional.gelu(self.up(x)).transpose(0, 1).contiguous().transpose(0, 1))
        )


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", 1024)


def prepared(streams: Streams, tier: str | None, disk: Path, reentrant: bool | None) -> tuple[Net, penstock.Optimizer]:
    torch.manual_seed(0)
    model = Net(reentrant)
    placement = penstock.Placement(params="cpu", activations=tier, nvme_path=disk)
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = penstock.Options(tile_bytes=4096)
    return model, prepare_on(streams, model, stock, precision="fp32", placement=placement, options=options)


def loss_of(model: Net, seed: int) -> Tensor:
    return (
        model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()).square().mean()
    )


def run(streams: Streams, tier: str | None, disk: Path, reentrant: bool | None) -> list[Any]:
    model, optimizer = prepared(streams, tier, disk, reentrant)
    found: list[Any] = []
    for step in range(3):
        losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]  # two forwards before the first backward
        found += [loss.item() for loss in losses]
        for loss in losses:
            optimizer.backward(loss)
        found.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    found += [optimizer.full_param(p).tolist() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("streams", [inline, separate, simulated])
def test_no_bit_changes(streams: Callable[[], Streams], tier: str, reentrant: bool | None, tmp_path: Path) -> None:
    assert run(streams(), tier, tmp_path, reentrant) == run(inline(), None, tmp_path, reentrant)


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
    optimizer.close()


def test_a_tensor_that_several_operations_save_leaves_once_and_parameters_stay(tmp_path: Path) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            return sum(head(x) for head in self.heads)

    copied: list[int] = []

    def delay(stream: str, nbytes: int) -> float:
        if stream == DOWNLOAD:
            copied.append(nbytes)
        return 0.0

    model = Three()
    placement = penstock.Placement(activations="cpu")
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = prepare_on(SimulatedStreams(delay), model, stock, precision="fp32", placement=placement)
    optimizer.backward(model(torch.ones(ROWS, WIDTH)).sum())
    assert copied == [ROWS * WIDTH * 4]
    optimizer.close()


def test_a_retained_graph_can_be_walked_again(tmp_path: Path) -> None:
    found = []
    for tier in (None, "cpu", "nvme"):
        model, optimizer = prepared(separate(), tier, tmp_path, None)
        loss = loss_of(model, 0)
        optimizer.backward(loss, retain_graph=True)
        optimizer.backward(loss)
        found.append(optimizer.full_grad(model.blocks[0].up.weight))
        optimizer.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_forward_that_fails_leaves_no_hooks(tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), "cpu", tmp_path, None)
    handle = model.blocks[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("no")))
    with pytest.raises(KeyError):
        loss_of(model, 0)
    handle.remove()
    gc.collect()
    before = saved_bytes(optimizer, "cpu")
    outside = torch.randn(ROWS, WIDTH, requires_grad=True)
    (outside.exp() * 2).sum().backward()
    assert saved_bytes(optimizer, "cpu") == before, "what runs outside of the model is not taken"
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    optimizer.close()


def test_no_grad_saves_nothing_and_nvme_needs_a_folder(tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), "cpu", tmp_path, None)
    with torch.no_grad():
        model(torch.ones(ROWS, WIDTH))
    assert saved_bytes(optimizer, "cpu") == 0
    optimizer.close()
    with pytest.raises(ConfigError, match="activations='nvme' needs a folder"):
        penstock.prepare(
            Net(None), torch.optim.SGD(Net(None).parameters()), placement=penstock.Placement(activations="disk")
        )


class Odd(nn.Module):
    """Saves tensors that are no plain memory: conjugate and negative views, sparse and nested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        turned = torch.fft.fft(x)
        conjugate = turned.conj()
        x = x + (conjugate * turned).real + (conjugate.imag * x.exp()) * conjugate.imag
        sparse = (x.detach() > 0).to(x.dtype).to_sparse()
        x = x + torch.sparse.mm(sparse.transpose(0, 1), x).mean(0)
        nested = torch.nested.as_nested_tensor(list(x.split(4)), layout=torch.strided)
        return x * torch.nested.to_padded_tensor(torch.relu(nested), 0.0).reshape(x.shape)


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
        return Watched.apply(x, held.conj(), held.conj().imag, x.detach().to_sparse_csr()).square()


@pytest.mark.parametrize("kind", [Odd, Saves])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_tensors_that_are_no_plain_memory_stay(kind: type[nn.Module], tier: str, tmp_path: Path) -> None:
    found = []
    for where, streams in ((None, inline), (tier, inline), (tier, separate), (tier, simulated)):
        torch.manual_seed(0)
        model = kind()
        stock = torch.optim.SGD(model.parameters(), lr=0.1)
        placement = penstock.Placement(activations=where, nvme_path=tmp_path)
        optimizer = prepare_on(streams(), model, stock, precision="fp32", placement=placement)
        optimizer.backward(model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))).sum())
        found.append([optimizer.full_grad(p) for p in model.parameters()])
        optimizer.close()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def hooks_on_this_thread() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("goes_on", ["elsewhere", "here", "closes"])
def test_an_interrupted_forward_leaves_no_hooks(goes_on: str, tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), "cpu", tmp_path, None)
    handle = model.blocks[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
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
