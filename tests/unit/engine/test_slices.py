"""`unit_micro_batches`: a block runs slice after slice; the loss and the gradients are those of the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.machine.simulated import SimulatedStreams
from penstock.machine.streams import DOWNLOAD, UPLOAD, Streams
from tests.support import inline, prepare_on, run_ranks, separate, simulated

WIDTH, ROWS, BLOCKS = 32, 6, 3


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, scale: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.drop(torch.tanh(self.up(x))))
        y = y if scale is None else y * scale
        return x + (y if mask is None else y * mask)


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((1, WIDTH), 0.5))
        self.blocks = nn.ModuleList(Block(drop) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.scale * 2, mask=mask)
        return x


def prepared(
    streams: Streams, slices: int, model: nn.Module | None = None, **rest: Any
) -> tuple[Any, penstock.Optimizer]:
    torch.manual_seed(0)
    model = model or Net()
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"precision": "fp32", "units": [Block], **rest}
    return model, prepare_on(streams, model, stock, unit_micro_batches=slices, **chosen)


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(streams: Streams, slices: int, **rest: Any) -> tuple[float, list[Tensor]]:
    model, optimizer = prepared(streams, slices, **rest)
    loss = model(batch()).float().square().mean()
    optimizer.backward(loss)
    found = [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    return loss.item(), found


@pytest.mark.parametrize("slices", [2, 4, 6, 50])
@pytest.mark.parametrize("streams", [inline, separate, simulated])
@pytest.mark.parametrize("placement", [{}, {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}])
def test_loss_and_gradients_are_those_of_the_batch(
    streams: Callable[[], Streams], slices: int, placement: dict[str, Any]
) -> None:
    expected = gradients(inline(), 1)
    found = gradients(streams(), slices, placement=penstock.Placement(**placement))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_in_bf16_slices_are_summed_in_fp32() -> None:
    expected = gradients(inline(), 1, precision="bf16")
    for slices in (2, 6):
        found = gradients(inline(), slices, precision="bf16")
        for a, b in zip(found[1], expected[1], strict=True):
            assert (a - b).norm() <= 0.01 * b.norm()


def test_parameters_and_gradients_travel_as_for_one_batch() -> None:
    def moved(slices: int) -> dict[str, int]:
        total = {UPLOAD: 0, DOWNLOAD: 0}

        def delay(stream: str, nbytes: int) -> float:
            if stream in total:
                total[stream] += nbytes
            return 0.0

        model, optimizer = prepared(
            SimulatedStreams(delay), slices, placement=penstock.Placement(params="cpu", grads="cpu")
        )
        total.update({UPLOAD: 0, DOWNLOAD: 0})
        optimizer.backward(model(batch()).square().mean())
        optimizer.synchronize()
        seen = dict(total)
        optimizer.close()
        return seen

    assert moved(6) == moved(1)


def test_dropout_is_the_same_again_in_backward() -> None:
    torch.manual_seed(0)
    model = Net(drop=0.5)
    _, optimizer = prepared(inline(), 3, model)
    torch.manual_seed(5)
    optimizer.backward(model(batch()).square().mean())
    found = [optimizer.full_grad(p) for p in model.parameters()]
    optimizer.close()
    torch.manual_seed(5)
    outputs = []
    x = model.embed(batch())
    mask = (batch() > 0).float()
    for block in model.blocks:
        x = torch.cat([block(x[i : i + 2], model.scale * 2, mask[i : i + 2]) for i in range(0, ROWS, 2)])
    outputs.append(x)
    x.square().mean().backward()
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-7)


def test_blocks_train_whose_inputs_need_no_gradient() -> None:
    model = Net()
    for p in [*model.embed.parameters(), model.scale]:
        p.requires_grad_(False)
    _, optimizer = prepared(inline(), 2, model)
    optimizer.backward(model(batch()).square().mean())
    assert all(optimizer.full_grad(p).abs().sum() > 0 for p in model.blocks.parameters())
    optimizer.close()


def test_evaluation_and_close_leave_forward_as_it_was() -> None:
    model, optimizer = prepared(inline(), 3)
    with torch.no_grad():
        whole = model(batch())
    optimizer.close()
    assert "forward" not in model.blocks[0].__dict__
    torch.testing.assert_close(whole, model(batch()).detach())


class Shares(Block):
    def forward(self, x: Tensor, cache: object = None) -> Any:
        return super().forward(x)


class Sums(Block):
    def forward(self, x: Tensor) -> Any:
        return x, x.sum()


def test_what_cannot_be_sliced_is_named() -> None:
    class Outer(nn.Module):
        def __init__(self, kind: type[Block]) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(kind() for _ in range(2))

    for kind, args, match in ((Shares, (object(),), "called with a object"), (Sums, (), "one value for each of them")):
        model = Outer(kind)
        _, optimizer = prepared(inline(), 2, model, units=[kind])
        with pytest.raises(EngineError, match=match):
            model.blocks[0](batch(), *args)
        optimizer.close()
    with pytest.raises(ConfigError, match="unit_micro_batches=0"):
        penstock.prepare(Net(), torch.optim.SGD(Net().parameters()), unit_micro_batches=0)


def on_rank(rank: int, slices: int) -> tuple[float, list[Tensor]]:
    return gradients(inline(), slices)


@pytest.mark.thorough
def test_on_two_ranks() -> None:
    for found, expected in zip(run_ranks(on_rank, 2, 3), run_ranks(on_rank, 2, 1), strict=True):
        for a, b in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_transformers_model(recwarn: pytest.WarningsRecorder) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    tokens = torch.arange(60).view(4, 15) % 64
    found = []
    for slices in (1, 4):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        stock = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = penstock.prepare(model, stock, precision="fp32", unit_micro_batches=slices)
        optimizer.backward(model(tokens, labels=tokens).loss)
        found.append([optimizer.full_grad(p) for p in model.parameters()])
        optimizer.close()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
