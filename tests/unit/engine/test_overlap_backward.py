"""`overlap="backward"`: what begins in backward, what it refuses, and how it ends."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.engine.step.owner_thread import in_backward
from penstock.errors import ConfigError, EngineError
from penstock.runtime.streams import UPDATE, Event, InlineStreams, Work
from tests.lib.covering import covering
from tests.lib.engines import ON_CPU, assert_same_state, prepared, squared, state
from tests.lib.models import WIDTH, Blocks, batch_of, seeded
from tests.lib.ranks import run_ranks
from tests.lib.streams import BreakingStreams, BrokenError, inline, separate, simulated

BLOCKS = 4
ON_DEVICE = dict.fromkeys(ON_CPU, "device")
OPTIMIZER = {"optimizer": "cpu"}
SPLIT = {"params": "cpu", "grads": "cpu", "optimizer": {"device": 0.5, "cpu": 0.5}}
KIND_OF_STREAMS = {"inline": inline, "separate": separate, "late": lambda: simulated(most_seconds=0.001)}


def net(*order: int, recomputes: bool | None = None) -> Blocks:
    """Blocks of one unit each, without a root."""
    model = Blocks(BLOCKS, recomputes=recomputes)
    model.first = model.last = nn.Identity()
    model.order = list(order or range(BLOCKS))
    return model


def weights_without_gradient_once_more() -> Blocks:
    """The first block's weights are read again by the backward of a second use that gives them no gradient."""
    model = net()

    def read(module: nn.Module, args: Any) -> Any:
        weights = {name: p.detach() for name, p in model.blocks[0].named_parameters()}
        return model.blocks[2](torch.func.functional_call(model.blocks[0], weights, args))

    model.register_forward_pre_hook(read)
    return model


def begun(streams: Any = separate, model: Any = net, **how: Any) -> tuple[Any, penstock.Optimizer]:
    """Prepared on the cpu, unless it is told where, and updated in backward."""
    return prepared(model, streams, **{"overlap": "backward", **ON_CPU, **how})


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    return squared(model(batch_of(model, number).requires_grad_()))


def backward(model: nn.Module, optimizer: penstock.Optimizer, number: int = 0, factor: float = 1.0) -> None:
    optimizer.backward(loss_of(model, number) * factor)


def updated(optimizer: penstock.Optimizer) -> list[bool]:
    return [unit.trained.optimizer.memory.written.done() for unit in optimizer._engine.context.units]


class Noting(InlineStreams):
    """Nothing asynchronous; notes whether each update ran in backward."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.seen: list[tuple[str, bool]] = []

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        if stream == UPDATE:
            self.seen.append((stream, in_backward()))
        return super().submit(stream, work, **rest)


# What begins, and what it gives


def test_the_host_updates_each_unit_in_backward_as_soon_as_backward_has_left_it() -> None:
    streams = Noting()
    model, optimizer = begun(streams, tile_bytes=4 << 20)
    seen: list[int] = []
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: seen.append(len(streams.seen)))
    backward(model, optimizer)
    assert seen == [0, 0, 1, 2]  # a hook runs before backward leaves the block that comes after its own
    assert streams.seen == [(UPDATE, True)] * BLOCKS
    optimizer.step()
    assert len(streams.seen) == BLOCKS


def test_tiles_of_the_device_wait_for_the_step() -> None:
    model, optimizer = begun(**SPLIT)
    before = [optimizer.full_param(p) for p in model.parameters()]
    backward(model, optimizer)
    units = optimizer._engine.context.units
    tiers = [unit.trained.update_tier(n).value for unit in units for n in range(len(unit.trained.tiles))]
    assert set(tiers) == {"device", "cpu"}
    kept = [torch.equal(a, optimizer.full_param(p)) for a, p in zip(before, model.parameters(), strict=True)]
    assert True in kept
    assert False in kept
    optimizer.step()
    assert not any(torch.equal(a, optimizer.full_param(p)) for a, p in zip(before, model.parameters(), strict=True))


NETS = {
    "straight": net,
    "without the second": lambda: net(0, 2, 3),
    "first twice": lambda: net(0, 1, 2, 3, 0),
    "reentrant": lambda: net(recomputes=True),
    "not reentrant": lambda: net(recomputes=False),
    "tied": lambda: seeded(Tied),
}
PLACES = [ON_CPU, OPTIMIZER, SPLIT, SPLIT, ON_CPU, OPTIMIZER]


class Tied(nn.Sequential):
    """The first layer and the last are of the root, and one weight."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        self[2].weight = self[0].weight


def leaves(losses: Any, **how: Any) -> dict[str, Tensor]:
    """What a run of a few steps leaves."""
    model, optimizer = begun(**how)
    losses(model, optimizer)
    found = state(model, optimizer)
    optimizer.close()
    return found


@pytest.mark.parametrize(("model", "streams", "tiers"), list(zip(NETS, [*KIND_OF_STREAMS] * 2, PLACES, strict=True)))
def test_whatever_the_graph_is_the_result_is_that_of_none(model: str, streams: str, tiers: dict[str, Any]) -> None:
    """The table of parity has every kind of streams in every place."""
    norms = []

    def run(model: nn.Module, optimizer: penstock.Optimizer) -> None:
        for number in range(3):
            for micro in range(2):
                with optimizer.no_sync() if micro == 0 else nullcontext():
                    backward(model, optimizer, 2 * number + micro)
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()

    how = {"model": NETS[model], "streams": KIND_OF_STREAMS[streams], **ON_DEVICE, **tiers}
    assert_same_state(leaves(run, **how), leaves(run, overlap="none", **how))
    assert norms[:3] == norms[3:]


@pytest.mark.parametrize("where", [OPTIMIZER, SPLIT], ids=["optimizer", "split"])
def test_states_that_move_between_backward_and_step_lose_nothing(where: dict[str, Any]) -> None:
    """What updates wrote beside the device is in its parameters' home before homes move."""

    def run(model: nn.Module, optimizer: penstock.Optimizer, *, moves: bool) -> None:
        for number in range(3):
            backward(model, optimizer, number)
            if moves:
                optimizer.offload_states({"param", "optimizer", "master"})
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                optimizer.reload_states()

    found = [leaves(partial(run, moves=moves), **ON_DEVICE | where) for moves in (True, False)]
    assert_same_state(*found)


@pytest.mark.parametrize("streams", KIND_OF_STREAMS)
def test_looks_between_backward_and_step_see_finished_updates_and_change_nothing(streams: str) -> None:
    model, optimizer = begun(KIND_OF_STREAMS[streams])
    backward(model, optimizer)
    seen = [optimizer.full_param(p) for p in model.parameters()]
    assert all(updated(optimizer))
    with torch.no_grad():
        loss = loss_of(model, 1).item()
    with optimizer.gathered():
        pass
    assert {row.kind for row in optimizer.locations().rows} >= {"param", "grad", "exp_avg"}
    assert optimizer.full_grad(next(model.parameters())).abs().sum() > 0
    optimizer.step()
    assert all(torch.equal(a, optimizer.full_param(p)) for a, p in zip(seen, model.parameters(), strict=True))
    with torch.no_grad():
        assert loss_of(model, 1).item() == loss


# What it refuses

CALLS: dict[str, Callable[[Blocks, penstock.Optimizer], Any]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "set_full_param": lambda model, optimizer: optimizer.set_full_param(bias(model), torch.ones(WIDTH)),
    "set_full_grad": lambda model, optimizer: optimizer.set_full_grad(bias(model), torch.ones(WIDTH)),
    "set_full_state": lambda model, optimizer: optimizer.set_full_state(bias(model), "exp_avg", torch.ones(WIDTH)),
    "gathered": lambda model, optimizer: optimizer.gathered(modify=True),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({}),
}


def bias(model: Blocks) -> nn.Parameter:
    return model.blocks[0].down.bias


def test_what_updates_depend_on_is_refused_by_name_until_step() -> None:
    model, optimizer = begun(inline)
    for name, call in CALLS.items():
        backward(model, optimizer)
        with pytest.raises(EngineError, match=rf"^{name}\(\) was called between backward and step"):
            call(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def test_clipping_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"max_grad_norm=1\.0 needs the whole gradient"):
        penstock.prepare(model, torch.optim.SGD(model.parameters()), overlap="backward", max_grad_norm=1.0)


def assert_ended(model: nn.Module, optimizer: penstock.Optimizer, message: str) -> None:
    """Every use of a unit says why, and close leaves no half of a step behind."""
    with pytest.raises(EngineError, match=message):
        loss_of(model)
    with pytest.raises(EngineError, match=message):
        optimizer.full_param(next(model.parameters()))
    with pytest.raises(EngineError, match=message):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters())


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("streams", ["inline", "late"])
def test_a_second_backward_before_step_ends_the_optimizer(streams: str) -> None:
    model, optimizer = begun(KIND_OF_STREAMS[streams])
    backward(model, optimizer)
    with pytest.raises(EngineError, match="Run all micro-batches but the last under"):
        backward(model, optimizer)
    assert_ended(model, optimizer, "Backward came back to unit")


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_backward_that_reads_updated_weights_is_refused_even_where_it_gives_no_gradient() -> None:
    model, optimizer = begun(inline, weights_without_gradient_once_more)
    with pytest.raises(EngineError, match=r"Backward came back to unit 'blocks\.0'"):
        backward(model, optimizer)
    assert_ended(model, optimizer, "Backward came back to unit")


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_a_rate_that_changes_between_backward_and_step_is_refused() -> None:
    model, optimizer = begun()
    backward(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(EngineError, match="Change learning rates after step"):
        optimizer.step()
    assert_ended(model, optimizer, "options of a param group changed")


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_close_between_backward_and_step_passes_no_half_of_a_step_off_as_whole() -> None:
    model, optimizer = begun(inline)
    backward(model, optimizer)
    with pytest.raises(EngineError, match=r"no step\(\) followed"):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters())
    model, optimizer = begun(inline)
    backward(model, optimizer)
    optimizer.close(keep_params=False)


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("ours", [True, False], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("block", [0, BLOCKS - 1], ids=["late", "early"])
def test_a_backward_that_fails_ends_the_optimizer_only_after_updates_have_begun(block: int, ours: bool) -> None:
    model, optimizer = begun()
    before = state(model, optimizer)

    handle = model.blocks[block].register_full_backward_hook(lambda *_: 1 / 0)
    loss = loss_of(model)
    with pytest.raises(ZeroDivisionError):
        optimizer.backward(loss) if ours else loss.backward()
    handle.remove()
    optimizer.zero_grad()
    if block == 0:
        assert_ended(model, optimizer, "Updates had begun in a backward that failed")
        return
    assert_same_state(before, state(model, optimizer))
    backward(model, optimizer)
    assert not optimizer.step().skipped


# Gradients that are not finite


def poison(grad: Tensor) -> Tensor:
    return torch.full_like(grad, float("nan"))


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("streams", KIND_OF_STREAMS)
def test_a_gradient_that_becomes_nan_after_updates_ends_the_optimizer(streams: str) -> None:
    model, optimizer = begun(KIND_OF_STREAMS[streams])
    model.blocks[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(poison) and None)
    backward(model, optimizer)
    with pytest.raises(EngineError, match="A gradient is not finite, and units whose gradients came before"):
        optimizer.step()
    assert_ended(model, optimizer, "A gradient is not finite")


def on_two_ranks(rank: int) -> None:
    for row in covering({"case": tuple(CASES), "streams": ("separate", "late"), "stage": (1, 3)}):
        try:
            CASES[row["case"]](rank, streams=KIND_OF_STREAMS[row["streams"]], stage=row["stage"])
        except BaseException as error:
            error.add_note(str(row))
            raise


def nan_on_one_rank(rank: int, **how: Any) -> None:
    """A loss that is not finite on one rank, in the last micro-batch of a step, is skipped whole on both."""

    def run(model: nn.Module, optimizer: penstock.Optimizer) -> None:
        for number in range(3):
            with optimizer.no_sync():
                backward(model, optimizer, 2 * number + rank)
            backward(model, optimizer, 2 * number + rank, float("nan") if (number, rank) == (1, 1) else 1.0)
            assert optimizer.step().skipped == (number == 1)
            optimizer.zero_grad()

    assert_same_state(leaves(run, **how), leaves(run, overlap="none", **how))


def late_nan_on_one_rank(rank: int, **how: Any) -> None:
    """Where it becomes NaN in the first layers, all ranks end."""
    model, optimizer = begun(**how)
    if rank == 1:
        model.blocks[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(poison) and None)
    backward(model, optimizer, rank)
    with pytest.raises(EngineError, match="not finite"):
        optimizer.step()
    with pytest.raises(EngineError):
        optimizer.close()


def gradient_on_one_rank(rank: int, **how: Any) -> None:
    """A bias without gradient on one rank is updated by both: in backward here, in step there."""

    def run(model: Blocks, optimizer: penstock.Optimizer) -> None:
        for block in model.blocks if rank else []:
            block.forward = lambda x, block=block: (
                x
                + nn.functional.linear(torch.tanh(block.up(block.norm(x))), block.down.weight, block.down.bias.detach())
            )
        for number in range(2):
            backward(model, optimizer, 2 * number + rank)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_state(leaves(run, **how), leaves(run, overlap="none", **how))


CASES = {"nan": nan_on_one_rank, "late nan": late_nan_on_one_rank, "one rank": gradient_on_one_rank}


def test_two_ranks_agree_on_what_begins_and_how_it_ends() -> None:
    run_ranks(on_two_ranks, 2)


# Updates that fail


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("call", ["step", "forward", "backward", "full_param", "synchronize"])
def test_an_update_that_fails_in_backward_is_raised_by_the_next_call(call: str) -> None:
    streams = BreakingStreams()
    model, optimizer = begun(streams)
    loss = loss_of(model)
    streams.broken = UPDATE
    optimizer.backward(loss)
    calls: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "forward": lambda: loss_of(model),
        "backward": lambda: backward(model, optimizer),
        "full_param": lambda: optimizer.full_param(next(model.parameters())),
        "synchronize": optimizer.synchronize,
    }
    with pytest.raises(BrokenError, match=UPDATE):
        calls[call]()
    with pytest.raises(BrokenError, match=UPDATE):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters())
