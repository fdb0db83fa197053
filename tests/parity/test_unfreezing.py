"""Parameters that come into a param group while training goes on: as plain torch trains them, wherever state is."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import assert_same_state, prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, late, released, separate
from tests.parity.rows import Movement, Net, batches, changed, loss_of, make_model, shares

STEPS = 10
SMALL = {"tile_bytes": 4 << 10}
THIRDS = shares(device=0.3, cpu=0.4, nvme=0.3)


class Widened(nn.Linear):
    """A layer with a low-rank path beside it, as adapters have."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(1, 1)
        del self.weight, self.bias
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def make() -> Net:
    """The blocks and the first layer are frozen."""
    model = make_model()
    model.first.requires_grad_(False)
    model.blocks.requires_grad_(False)
    return model


def unfreeze_a_block(model: Net) -> list[nn.Parameter]:
    model.blocks[1].requires_grad_(True)
    return list(model.blocks[1].parameters())


def unfreeze_a_layer(model: Net) -> list[nn.Parameter]:
    """Some of a unit's."""
    model.blocks[0].up.requires_grad_(True)
    return list(model.blocks[0].up.parameters())


def add_an_adapter(model: Net) -> list[nn.Parameter]:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model.blocks[0].down = widened = Widened(model.blocks[0].down)
    return [*widened.down.parameters(), *widened.up.parameters()]


def unfreeze_the_rest(model: Net) -> list[nn.Parameter]:
    """What is left of a unit that others have left, and another unit."""
    found = [p for p in model.parameters() if not p.requires_grad]
    for parameter in found:
        parameter.requires_grad_(True)
    return found


Changes = Mapping[int, Callable[[Net], list[nn.Parameter]]]
CHANGES: Changes = {2: unfreeze_a_block, 4: unfreeze_a_layer, 5: add_an_adapter, 7: unfreeze_the_rest}


def stock(model: nn.Module, **rest: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.05, **rest)


def group(params: list[nn.Parameter], step: int) -> dict[str, Any]:
    return {"params": params, "lr": 1e-3 * step, **({"weight_decay": 0.0} if step == 4 else {})}


def train(model: Net, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        if step in CHANGES:
            optimizer.add_param_group(group(CHANGES[step](model), step))
        loss = loss_of(model, batches(1, 1)[step][0][0])
        optimizer.backward(loss) if isinstance(optimizer, penstock.Optimizer) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def plain() -> dict[str, Tensor]:
    model = make()
    train(model, stock(model, foreach=False))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def ours(how: Movement, streams: Streams) -> dict[str, Tensor]:
    """The parameters."""
    model = make()
    optimizer = prepare_on(
        streams,
        model,
        stock(model),
        stage=how.stage,
        placement=how.placement,
        overlap=how.overlap,
        precision="fp32",
        options=penstock.Options(**dict(how.but(**SMALL).options)),
    )
    train(model, optimizer)
    found = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    assert_same_state({name: p.detach().float() for name, p in model.named_parameters()}, found)
    return found


ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu")
IN_FILES = Movement(params="nvme", grads="nvme", optimizer="nvme")
MOVEMENTS = [
    (inline, Movement()),
    (separate, ON_CPU),
    (released, Movement(optimizer="cpu", overlap="forward")),
    (late, IN_FILES),
    (late, Movement(params=THIRDS, grads=THIRDS, optimizer=THIRDS)),
    (separate, ON_CPU.but(persistent_bytes=200)),
]


@pytest.mark.parametrize(("streams", "how"), MOVEMENTS)
def test_as_plain_torch_trains_them(streams: Callable[[], Streams], how: Movement) -> None:
    wanted = plain()
    found = ours(how, streams())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        largest = wanted[name].abs().max()
        assert (value - wanted[name]).abs().max() <= 2e-6 * largest, (changed(how), name)


def on_a_rank(rank: int, how: Movement) -> dict[str, Tensor]:
    return ours(how, separate())


@pytest.mark.parametrize("how", [ON_CPU, Movement(1, optimizer="cpu")], ids=changed)
def test_two_ranks_train_what_one_does(how: Movement) -> None:
    first, second = run_ranks(on_a_rank, 2, how)
    assert_same_state(first, second)
    torch.testing.assert_close(first, on_a_rank(0, how), rtol=1e-5, atol=1e-6)


def told_apart(rank: int) -> list[Any]:
    """Ranks that add something else; then the same, with values of their own; then in the middle of no_sync."""
    model = make()
    optimizer = prepare_on(separate(), model, stock(model), stage=1, precision="fp32")
    found: list[Any] = []
    before, allocations = optimizer.locations().to_dict(), len(optimizer._engine.context.store._left)
    layer = (model.blocks[0].up, model.blocks[0].down)[rank].requires_grad_(True)
    with pytest.raises(penstock.EngineError) as caught:
        optimizer.add_param_group({"params": layer.parameters()})
    found.append(str(caught.value))
    model.blocks.requires_grad_(False)
    assert optimizer.locations().to_dict() == before
    assert len(optimizer._engine.context.store._left) == allocations
    with optimizer.no_sync():
        optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    torch.manual_seed(rank)
    model.blocks[0].mix = widened = Widened(model.blocks[0].mix)
    torch.nn.init.normal_(widened.up.weight)
    widened.register_buffer("seen", torch.tensor([float(rank)]))
    widened.down.register_buffer("seen", torch.tensor([float(rank)]))
    optimizer.add_param_group({"params": [*widened.down.parameters(), *widened.up.parameters()]})
    found.append(optimizer.full_param(widened.up.weight).tolist())
    found.append([widened.seen.item(), widened.down.seen.item()])
    optimizer.backward(loss_of(model, batches(1, 1)[1][0][0]))
    found.append(optimizer.step().grad_norm)
    found.append(optimizer.full_param(widened.down.weight).tolist())
    optimizer.close()
    return found


def test_ranks_that_add_something_else_are_told_and_new_values_are_the_first_ranks() -> None:
    first, second = run_ranks(told_apart, 2)
    for message in (first.pop(0), second.pop(0)):
        assert "add_param_group()" in message
        assert "blocks.0" in message
    # Buffers of modules that are new as a whole are the first rank's; a module around an old one keeps its own.
    assert (first.pop(1), second.pop(1)) == ([0.0, 0.0], [1.0, 0.0])
    assert first == second
