"""`overlap="backward"`: what begins in backward, what it refuses, and how it ends."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.engine.step.owner_thread import in_backward
from penstock.errors import ConfigError, EngineError
from penstock.runtime.streams import UPDATE, Event, InlineStreams, Streams, Work
from tests.lib.covering import covering
from tests.lib.engines import prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import BreakingStreams, BrokenError, inline, separate, simulated

BLOCKS, WIDTH = 4, 48
ON_CPU = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
OPTIMIZER = {"optimizer": "cpu"}
SPLIT = {"params": "cpu", "grads": "cpu", "optimizer": {"device": 0.5, "cpu": 0.5}}
KIND_OF_STREAMS = {"inline": inline, "separate": separate, "late": lambda: simulated(most_seconds=0.001)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks of one unit each, run as the test says."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.run = run or straight

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def straight(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def without_the_second(net: Net, x: Tensor) -> Tensor:
    for block in (*net.blocks[:1], *net.blocks[2:]):
        x = block(x)
    return x


def first_twice(net: Net, x: Tensor) -> Tensor:
    return net.blocks[0](straight(net, x))


def reentrant(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def not_reentrant(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def weights_without_gradient_once_more(net: Net, x: Tensor) -> Tensor:
    """The first block's weights are read again by the backward of a second use that gives them no gradient."""
    linear = net.blocks[0].linear
    weights = {"linear.weight": linear.weight.detach(), "linear.bias": linear.bias.detach()}
    first = torch.func.functional_call(net.blocks[0], weights, (x,))
    return straight(net, net.blocks[2](first))


def prepared(
    streams: Streams, overlap: str = "backward", tiers: dict[str, Any] = ON_CPU, net: Net | None = None, **rest: Any
) -> tuple[Net, penstock.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = net or Net()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.2)
    stock = torch.optim.AdamW(model.parameters(), lr=0.05)
    placement = penstock.Placement(**tiers)
    return model, prepare_on(streams, model, stock, placement=placement, overlap=overlap, precision="fp32", **rest)


def batch(number: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()


def backward(model: Net, optimizer: penstock.Optimizer, number: int = 0, factor: float = 1.0) -> None:
    optimizer.backward(model(batch(number)).square().sum() * factor)


def state(model: Net, optimizer: penstock.Optimizer) -> list[Tensor]:
    found = []
    for p in model.parameters():
        found += [
            optimizer.full_param(p),
            *(optimizer.full_state(p, name) for name in ("exp_avg", "exp_avg_sq", "step")),
        ]
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
    model, optimizer = prepared(streams)
    seen: list[int] = []
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: seen.append(len(streams.seen)))
    backward(model, optimizer)
    assert seen == [0, 0, 1, 2]  # a hook runs before backward leaves the block that comes after its own
    assert streams.seen == [(UPDATE, True)] * BLOCKS
    optimizer.step()
    assert len(streams.seen) == BLOCKS
    optimizer.close()


def test_tiles_of_the_device_wait_for_the_step() -> None:
    model, optimizer = prepared(separate(), tiers=SPLIT, options=penstock.Options(tile_bytes=4096))
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
    optimizer.close()


TIERS = {"cpu": ON_CPU, "optimizer": OPTIMIZER, "split": SPLIT}
GRAPHS = {
    "run": (straight, without_the_second, first_twice, reentrant, not_reentrant),
    "streams": tuple(KIND_OF_STREAMS),
    "tiers": tuple(TIERS),
}


@pytest.mark.parametrize(("run", "streams", "tiers"), [tuple(row.values()) for row in covering(GRAPHS)])
def test_whatever_the_graph_is_the_result_is_that_of_none(run: Callable[..., Tensor], streams: str, tiers: str) -> None:
    found, norms = [], []
    for overlap in ("none", "backward"):
        model, optimizer = prepared(KIND_OF_STREAMS[streams](), overlap, TIERS[tiers], Net(run))
        results = []
        for number in range(3):
            for micro in range(2):
                with optimizer.no_sync() if micro == 0 else nullcontext():
                    backward(model, optimizer, 2 * number + micro)
            results.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        found.append(state(model, optimizer))
        norms.append(results)
        optimizer.close()
    assert same(*found)
    assert norms[0] == norms[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def test_tied_weights_are_updated_once() -> None:
    found = []
    for overlap in ("none", "backward"):
        model, optimizer = prepared(separate(), overlap, net=Tied(), units=lambda name, module: name == "middle")
        for number in range(3):
            backward(model, optimizer, number)
            optimizer.step()
            optimizer.zero_grad()
        found.append(state(model, optimizer))
        optimizer.close()
    assert same(*found)


def test_states_that_move_between_backward_and_step_lose_nothing() -> None:
    """What updates wrote beside the device is in its parameters' home before homes move."""
    for tiers in (OPTIMIZER, SPLIT):
        found = []
        for moves in (False, True):
            model, optimizer = prepared(separate(), tiers=tiers)
            for number in range(3):
                backward(model, optimizer, number)
                if moves:
                    optimizer.offload_states({"param", "optimizer", "master"})
                optimizer.step()
                optimizer.zero_grad()
                if moves:
                    optimizer.reload_states()
            found.append(state(model, optimizer))
            optimizer.close()
        assert same(*found), tiers


@pytest.mark.parametrize("streams", KIND_OF_STREAMS)
def test_looks_between_backward_and_step_see_finished_updates_and_change_nothing(streams: str) -> None:
    model, optimizer = prepared(KIND_OF_STREAMS[streams]())
    backward(model, optimizer)
    seen = [optimizer.full_param(p) for p in model.parameters()]
    assert all(updated(optimizer))
    with torch.no_grad():
        loss = model(batch(1)).square().sum().item()
    with optimizer.gathered():
        pass
    assert {row.kind for row in optimizer.locations().rows} >= {"param", "grad", "exp_avg"}
    assert optimizer.full_grad(next(model.parameters())).abs().sum() > 0
    optimizer.step()
    assert same(seen, [optimizer.full_param(p) for p in model.parameters()])
    with torch.no_grad():
        assert model(batch(1)).square().sum().item() == loss
    optimizer.close()


# What it refuses

REFUSED: dict[str, Callable[[Net, penstock.Optimizer], Any]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "set_full_param": lambda model, optimizer: optimizer.set_full_param(model.blocks[0].linear.bias, torch.ones(WIDTH)),
    "set_full_grad": lambda model, optimizer: optimizer.set_full_grad(model.blocks[0].linear.bias, torch.ones(WIDTH)),
    "set_full_state": lambda model, optimizer: optimizer.set_full_state(
        model.blocks[0].linear.bias, "exp_avg", torch.ones(WIDTH)
    ),
    "gathered": lambda model, optimizer: optimizer.gathered(modify=True),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({}),
}


@pytest.mark.parametrize("verb", REFUSED)
def test_what_updates_depend_on_is_refused_by_name_until_step(verb: str) -> None:
    model, optimizer = prepared(inline())
    backward(model, optimizer)
    with pytest.raises(EngineError, match=rf"^{verb}\(\) was called between backward and step"):
        REFUSED[verb](model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()


def test_clipping_is_refused() -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"max_grad_norm=1\.0 needs the whole gradient"):
        penstock.prepare(model, torch.optim.SGD(model.parameters()), overlap="backward", max_grad_norm=1.0)


def assert_ended(model: Net, optimizer: penstock.Optimizer, message: str) -> None:
    """Every use of a unit says why, and close leaves no half of a step behind."""
    with pytest.raises(EngineError, match=message):
        model(batch())
    with pytest.raises(EngineError, match=message):
        optimizer.full_param(next(model.parameters()))
    with pytest.raises(EngineError, match=message):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters())


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("streams", KIND_OF_STREAMS)
def test_a_second_backward_before_step_ends_the_optimizer(streams: str) -> None:
    model, optimizer = prepared(KIND_OF_STREAMS[streams]())
    backward(model, optimizer)
    with pytest.raises(EngineError, match="Run all micro-batches but the last under"):
        backward(model, optimizer)
    assert_ended(model, optimizer, "Backward came back to unit")


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_backward_that_reads_updated_weights_is_refused_even_where_it_gives_no_gradient() -> None:
    model, optimizer = prepared(inline(), net=Net(weights_without_gradient_once_more))
    with pytest.raises(EngineError, match=r"Backward came back to unit 'blocks\.0'"):
        backward(model, optimizer)
    assert_ended(model, optimizer, "Backward came back to unit")


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_a_rate_that_changes_between_backward_and_step_is_refused() -> None:
    model, optimizer = prepared(separate())
    backward(model, optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(EngineError, match="Change learning rates after step"):
        optimizer.step()
    assert_ended(model, optimizer, "options of a param group changed")


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_close_between_backward_and_step_passes_no_half_of_a_step_off_as_whole() -> None:
    model, optimizer = prepared(inline())
    backward(model, optimizer)
    with pytest.raises(EngineError, match=r"no step\(\) followed"):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters())
    model, optimizer = prepared(inline())
    backward(model, optimizer)
    optimizer.close(keep_params=False)


class StoppedError(RuntimeError):
    pass


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("ours", [True, False], ids=["optimizer.backward", "loss.backward"])
@pytest.mark.parametrize("block", [0, BLOCKS - 1], ids=["late", "early"])
def test_a_backward_that_fails_ends_the_optimizer_only_after_updates_have_begun(block: int, ours: bool) -> None:
    model, optimizer = prepared(separate())
    before = state(model, optimizer)

    def fail(*_: Any) -> None:
        raise StoppedError

    handle = model.blocks[block].register_full_backward_hook(fail)
    loss = model(batch()).square().sum()
    with pytest.raises(StoppedError):
        optimizer.backward(loss) if ours else loss.backward()
    handle.remove()
    optimizer.zero_grad()
    if block == 0:
        assert_ended(model, optimizer, "Updates had begun in a backward that failed")
        return
    assert same(before, state(model, optimizer))
    backward(model, optimizer)
    assert not optimizer.step().skipped
    optimizer.close()


# Gradients that are not finite


@pytest.mark.parametrize("streams", KIND_OF_STREAMS)
def test_a_loss_that_is_not_finite_is_skipped_whole(streams: str) -> None:
    """Also where the updates of the step before are late: what was updated then says nothing about this step."""
    found = []
    for overlap in ("none", "backward"):
        model, optimizer = prepared(KIND_OF_STREAMS[streams](), overlap)
        for number, factor in enumerate((1.0, float("nan"), 1.0)):
            backward(model, optimizer, number, factor)
            assert optimizer.step().skipped == (factor != factor)
            optimizer.zero_grad()
        found.append(state(model, optimizer))
        optimizer.close()
    assert same(*found)


def poison(grad: Tensor) -> Tensor:
    return torch.full_like(grad, float("nan"))


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("streams", KIND_OF_STREAMS)
def test_a_gradient_that_becomes_nan_after_updates_ends_the_optimizer(streams: str) -> None:
    model, optimizer = prepared(KIND_OF_STREAMS[streams]())
    model.blocks[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(poison) and None)
    backward(model, optimizer)
    with pytest.raises(EngineError, match="A gradient is not finite, and units whose gradients came before"):
        optimizer.step()
    assert_ended(model, optimizer, "A gradient is not finite")


def on_two_ranks(rank: int) -> list[str]:
    failures = []
    choices = {"case": tuple(CASES), "streams": tuple(KIND_OF_STREAMS), "stage": (0, 1, 2, 3)}
    for row in covering(choices):
        found = CASES[row["case"]](rank, KIND_OF_STREAMS[row["streams"]], row["stage"])
        failures += [f"{row}: {each}" for each in found]
    return failures


def nan_on_one_rank(rank: int, make: Callable[[], Streams], stage: int) -> list[str]:
    """A loss that is not finite on one rank, in the last micro-batch of a step, is skipped whole on both."""
    found = []
    for overlap in ("none", "backward"):
        model, optimizer = prepared(make(), overlap, stage=stage)
        for number in range(3):
            with optimizer.no_sync():
                backward(model, optimizer, 2 * number + rank)
            backward(model, optimizer, 2 * number + rank, float("nan") if (number, rank) == (1, 1) else 1.0)
            if optimizer.step().skipped != (number == 1):
                return [f"{overlap}: step {number}"]
            optimizer.zero_grad()
        found.append(state(model, optimizer))
        optimizer.close()
    return [] if same(*found) else ["another result"]


def late_nan_on_one_rank(rank: int, make: Callable[[], Streams], stage: int) -> list[str]:
    """Where it becomes NaN in the first layers, all ranks end."""
    model, optimizer = prepared(make(), stage=stage)
    if rank == 1:
        model.blocks[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(poison) and None)
    backward(model, optimizer, rank)
    found = []
    try:
        optimizer.step()
        found.append("step went on")
    except EngineError as error:
        if "not finite" not in str(error):
            found.append(str(error))
    try:
        optimizer.close()
        found.append("closed as if whole")
    except EngineError:
        pass
    return found


def gradient_on_one_rank(rank: int, make: Callable[[], Streams], stage: int) -> list[str]:
    """A bias without gradient on one rank is updated by both: in backward here, in step there."""
    found = []
    for overlap in ("none", "backward"):
        model, optimizer = prepared(make(), overlap, stage=stage)

        def use(block: Block, x: Tensor) -> Tensor:
            bias = block.linear.bias if rank == 0 else block.linear.bias.detach()
            return x + torch.tanh(nn.functional.linear(x, block.linear.weight, bias))

        for block in model.blocks:
            block.forward = use.__get__(block)  # type: ignore[method-assign]
        for number in range(2):
            backward(model, optimizer, 2 * number + rank)
            optimizer.step()
            optimizer.zero_grad()
        found.append(state(model, optimizer))
        optimizer.close()
    return [] if same(*found) else ["another result"]


CASES = {"nan": nan_on_one_rank, "late nan": late_nan_on_one_rank, "one rank": gradient_on_one_rank}


def test_two_ranks_agree_on_what_begins_and_how_it_ends() -> None:
    assert run_ranks(on_two_ranks, 2) == [[], []]


# Updates that fail


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("call", ["step", "forward", "backward", "full_param", "synchronize"])
def test_an_update_that_fails_in_backward_is_raised_by_the_next_call(call: str) -> None:
    streams = BreakingStreams()
    model, optimizer = prepared(streams)
    loss = model(batch()).square().sum()
    streams.broken = UPDATE
    optimizer.backward(loss)
    calls: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "forward": lambda: model(batch()),
        "backward": lambda: backward(model, optimizer),
        "full_param": lambda: optimizer.full_param(next(model.parameters())),
        "synchronize": optimizer.synchronize,
    }
    with pytest.raises(BrokenError, match=UPDATE):
        calls[call]()
    with pytest.raises(BrokenError, match=UPDATE):
        optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters())
