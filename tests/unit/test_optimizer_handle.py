"""The handle is a `torch.optim.Optimizer`: schedulers, state dicts, hooks and models behave as with torch's own."""

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import penstock
from tests.lib.covering import covering, named
from tests.lib.engines import ON_CPU, loss_of, prepared
from tests.lib.models import Blocks
from tests.lib.streams import inline, simulated

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-2}
STREAMS = {"inline": inline, "simulated": simulated}


@pytest.fixture(params=STREAMS)
def streams(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return STREAMS[request.param]


def grouped(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Two groups, the way most training scripts split them."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-2},
    ]
    return torch.optim.AdamW(groups, foreach=False, **HYPER)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return grouped([p for p in model.parameters() if p.requires_grad])


def prepare(model: nn.Module, given: Any = None, streams: Any = simulated, **how: Any) -> penstock.Optimizer:
    stock = grouped if given is None else lambda _: given
    return prepared(model, streams, stock=stock, **{**ON_CPU, **how})[1]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """As a loop that knows nothing of Penstock."""
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    return [optimizer.full_param(p) for p in model.parameters()]


def assert_close(ours: list[Tensor], plain: Any) -> None:
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6 * float(b.detach().abs().max()))


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


# Param groups and schedulers


def test_it_is_a_torch_optimizer():
    model = Blocks()
    given = adamw(model)
    optimizer = prepare(model, given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert len(optimizer.param_groups) == 2
    for ours, theirs in zip(optimizer.param_groups, given.param_groups, strict=True):
        assert ours is theirs
    assert optimizer.defaults == given.defaults
    assert "lr: 0.03" in repr(optimizer)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=[1e-2, 3e-2], total_steps=8),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.1, patience=0, threshold=10.0),
}


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = 6) -> list[Any]:
    seen = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
        scheduler.step(1.0) if plateau else scheduler.step()
        seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
    return seen


ROWS = covering({"name": list(SCHEDULERS), "given": [True, False], "streams": list(STREAMS)})


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_stock_schedulers_reach_the_update(row):
    """Of our optimizer, and of the one that was given, before prepare."""
    plain_model, model = Blocks(), Blocks()
    plain, given, make = adamw(plain_model), adamw(model), SCHEDULERS[row["name"]]
    expected = scheduled(plain_model, plain, make(plain))
    assert len({str(rates) for rates in expected}) > 2  # it does change them
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" would be wrong
        scheduler = make(given) if row["given"] else None
        optimizer = prepare(model, given, STREAMS[row["streams"]])
        seen = scheduled(model, optimizer, scheduler or make(optimizer))
    assert seen == expected
    assert_close(values_of(model, optimizer), plain_model.parameters())


def test_step_hooks_of_torch_run_also_those_of_before_prepare():
    model = Blocks()
    given = adamw(model)
    calls = []
    given.register_step_pre_hook(lambda *args: calls.append("before"))
    after = given.register_step_post_hook(lambda *args: calls.append("after"))
    optimizer = prepare(model, given)
    train(model, optimizer, range(1))
    after.remove()
    optimizer.register_step_post_hook(lambda *args: calls.append("ours"))
    train(model, optimizer, range(1))
    assert calls == ["before", "after", "before", "ours"]


# State dicts


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-5, atol=1e-7)


def test_state_dicts_are_those_of_torch_both_ways(streams):
    plain_model, model = Blocks(), Blocks()
    plain, optimizer = adamw(plain_model), prepare(model, streams=streams)
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    for m, o in ((plain_model, plain), (model, optimizer)):
        train(m, o, range(3))
        o.param_groups[0]["lr"] = 0.02
    assert_same_state(optimizer.state_dict(), plain.state_dict())

    # Torch's into ours, and ours into torch's, through a file; then both go on.
    def through_a_file(state: dict[str, Any]) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    to_ours, to_plain = through_a_file(plain.state_dict()), through_a_file(optimizer.state_dict())
    with optimizer.gathered():
        parameters = copy.deepcopy(model.state_dict())
    optimizer.close()
    resumed_model, resumed_plain_model = Blocks(seed=1), Blocks(seed=2)
    resumed_model.load_state_dict(plain_model.state_dict())
    resumed_plain_model.load_state_dict(parameters)
    resumed, resumed_plain = prepare(resumed_model, streams=streams), adamw(resumed_plain_model)
    resumed.load_state_dict(to_ours)
    resumed_plain.load_state_dict(to_plain)
    for m, o in ((plain_model, plain), (resumed_model, resumed), (resumed_plain_model, resumed_plain)):
        train(m, o, range(3, 6))
    assert_close(values_of(resumed_model, resumed), plain_model.parameters())
    assert_close(list(resumed_plain_model.parameters()), plain_model.parameters())


def test_loading_replaces_all_state():
    """A state dict of a fresh optimizer, or one in which some parameters have no state, resets the others."""
    model = Blocks()
    optimizer = prepare(model)
    fresh = optimizer.state_dict()
    train(model, optimizer, range(2))
    trained = optimizer.state_dict()
    del trained["state"][3]
    optimizer.load_state_dict(trained)
    assert_same_state(optimizer.state_dict(), trained)
    optimizer.load_state_dict(fresh)
    assert_same_state(optimizer.state_dict(), fresh)
    for parameter in model.parameters():
        assert not optimizer.full_state(parameter, "exp_avg").any()
        assert not optimizer.full_state(parameter, "exp_avg_sq").any()


def test_state_is_matched_by_the_numbers_in_the_groups():
    """As torch does: the numbers are keys, not positions."""
    model = Blocks()
    optimizer = prepare(model)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    renamed = {number: 100 - number for number in state["state"]}
    for group in state["param_groups"]:
        group["params"] = [renamed[number] for number in group["params"]]
    expected = optimizer.state_dict()
    state["state"] = {renamed[number]: values for number, values in state["state"].items()}
    optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), expected)


def test_a_scheduler_on_the_given_optimizer_survives_load_state_dict():
    model = Blocks()
    given = adamw(model)
    scheduler = schedulers.ExponentialLR(given, gamma=0.5)
    optimizer = prepare(model, given)
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 1.5e-2]


def test_state_from_before_prepare_is_taken_over(streams):
    plain_model, model = Blocks(), Blocks()
    plain, given = adamw(plain_model), adamw(model)
    train(plain_model, plain, range(6))
    train(model, given, range(3))
    optimizer = prepare(model, given, streams)
    assert not given.state  # its memory is given back
    assert float(optimizer.full_state(model.first.weight, "step")) == 3
    train(model, optimizer, range(3, 6))
    assert_close(values_of(model, optimizer), plain_model.parameters())


# gathered()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_modify_takes_over_what_was_written(precision, streams):
    model = Blocks()
    optimizer = prepare(model, streams=streams, precision=precision)
    train(model, optimizer, range(2))
    before = values_of(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    with optimizer.gathered([model.blocks[1].up.weight], modify=True), torch.no_grad():
        model.blocks[1].up.weight[3].fill_(0.123)
    written = float(torch.tensor(0.123).to(torch.bfloat16 if precision == "bf16" else torch.float32))
    for name, old, new in zip(names, before, values_of(model, optimizer), strict=True):
        expected = old.clone()
        if name == "blocks.1.up.weight":
            expected[3] = written
        assert torch.equal(new, expected), name  # master precision where nothing was written
    with optimizer.gathered():
        assert (model.blocks[1].up.weight[3] == written).all()
    # Reading does not write.
    with optimizer.gathered(modify=True):
        pass
    assert torch.equal(values_of(model, optimizer)[0], before[0])
    # An exception drops what was written.
    now = values_of(model, optimizer)

    def write_and_fail() -> None:
        with optimizer.gathered(modify=True), torch.no_grad():
            model.first.weight.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert_equal(values_of(model, optimizer), now)
    with optimizer.gathered():
        assert_close([model.first.weight.detach().float()], [now[0].to(model.first.weight.dtype).float()])
    train(model, optimizer, range(2, 3))


def test_a_write_that_would_be_lost_is_an_error():
    """Outside `gathered(modify=True)` a write is kept, refused by torch, or an error at the next step: never lost."""
    fates = set()
    for streams, placement, precision in product(STREAMS, ({}, {"optimizer": "cpu"}, ON_CPU), ("fp32", "bf16")):
        model, other = Blocks(), Blocks()
        _, optimizer = prepared(model, STREAMS[streams], stock=grouped, precision=precision, **placement)
        train(model, optimizer, range(1))
        weight = model.blocks[0].up.weight
        fate = "kept"
        try:
            with torch.no_grad():
                weight.copy_(torch.ones_like(weight))
        except RuntimeError:
            fate = "refused"
        loss_of(model, 1).backward()
        before = [optimizer.full_param(p) for p in model.parameters() if p is not weight]
        try:
            optimizer.step()
        except penstock.EngineError as error:
            assert "Parameter 'blocks.0.up.weight' was written outside gathered(modify=True)" in str(error)  # noqa: PT017
            fate = "error"
            assert_equal([optimizer.full_param(p) for p in model.parameters() if p is not weight], before)
            optimizer.set_full_param(weight, other.blocks[0].up.weight)
            assert not optimizer.step().skipped
        fates.add((fate, streams, precision, not placement))

        def write(model: Any = model, optimizer: penstock.Optimizer = optimizer) -> None:
            with optimizer.gathered(), torch.no_grad():
                model.first.weight.zero_()

        if precision == "fp32" and (streams == "inline" or not placement):
            write()  # the home itself: there is no other copy
            assert not optimizer.full_param(model.first.weight).any()
        else:
            with pytest.raises(
                penstock.EngineError, match=r"'first.weight' was written outside gathered\(modify=True\)"
            ):
                write()
    resident = {("kept", s, "fp32", True) for s in STREAMS} | {("error", s, "bf16", True) for s in STREAMS}
    elsewhere = {("kept", "inline", "fp32", False), ("error", "inline", "bf16", False)}
    # The first where params are on the device, and the optimizer on the cpu.
    late = {(fate, "simulated", p, False) for fate in ("error", "refused") for p in ("fp32", "bf16")}
    assert fates == resident | elsewhere | late


# close()


class Various(Blocks):
    """Parameters of several dtypes, frozen ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].double()
        self.blocks[1].bfloat16()
        self.last.requires_grad_(False)
        self.table = nn.Parameter(torch.tensor([2**40 + 1, -3, 2**24 + 1]), requires_grad=False)
        self.fine = nn.Parameter(torch.tensor([1.0 + 2**-40], dtype=torch.float64), requires_grad=False)
        self.register_buffer("ticks", torch.arange(3))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_close_gives_the_model_back(precision, streams):
    model = Various()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    identities = [id(p) for p in model.parameters()]
    given = torch.optim.AdamW(model.parameters(), **HYPER)
    optimizer = prepare(model, given, streams, precision=precision)
    with optimizer.gathered():
        assert model.table.tolist() == [2**40 + 1, -3, 2**24 + 1]
    assert optimizer.full_param(model.table).dtype == torch.float32
    train(model, optimizer, range(2))
    masters = {n: optimizer.full_param(p) for n, p in model.named_parameters() if p.is_floating_point()}
    optimizer.close()
    optimizer.close()
    assert [id(p) for p in model.parameters()] == identities
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    for name, parameter in model.named_parameters():
        assert parameter.device == torch.device("cpu")
        assert parameter.grad is None
        assert parameter.requires_grad == (not name.startswith(("last", "table", "fine")))
        if name in masters:
            assert torch.equal(parameter, masters[name].to(parameter.dtype)) or name == "fine", name
    assert model.fine.item() == 1.0 + 2**-40  # beside codes it is a scale, and stays as it is
    assert model.table.tolist() == [2**40 + 1, -3, 2**24 + 1]
    assert_no_trace(model)


def assert_no_trace(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
        assert not module._forward_hooks_with_kwargs
        assert not [key for key in module.__dict__ if "penstock" in key or key == "zero_grad"]
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
        assert not parameter.__dict__


def test_close_in_the_middle(streams):
    """After a forward without backward, after a backward without step, and after one that failed."""
    for middle in ("forward", "backward", "failed backward"):
        model = Blocks()
        optimizer = prepare(model, streams=streams)
        expected = values_of(model, optimizer)
        loss = loss_of(model, 0)
        if middle == "backward":
            loss.backward()
        if middle == "failed backward":
            handle = model.blocks[0].register_full_backward_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, 0).backward()
            handle.remove()
        optimizer.close()
        assert_equal(list(model.parameters()), expected)
        assert_no_trace(model)


# Neighbours


def changed_groups(model: Any, optimizer: Any) -> None:
    train(model, optimizer, range(2))
    is_ours = isinstance(optimizer, penstock.Optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05) if is_ours else 0.05
    optimizer.param_groups[1]["weight_decay"] = 0.3
    optimizer.param_groups[1]["maximize"] = True
    train(model, optimizer, range(2, 4))


def replaced_outputs(model: Any, optimizer: Any) -> None:
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: output * 0.5 + args[0])
    train(model, optimizer, range(3))


def full_backward_hooks(model: Any, optimizer: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    for module in (model, model.blocks[0], model.blocks[1].up):
        module.register_full_backward_hook(lambda mod, into, out: seen.append(out[0].clone()))
    train(model, optimizer, range(2))
    return seen


def a_hook_of_a_parameter(model: Any, optimizer: Any) -> None:
    model.blocks[0].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    train(model, optimizer, range(3))


HABITS = [changed_groups, replaced_outputs, full_backward_hooks, a_hook_of_a_parameter]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("habit", HABITS)
def test_what_people_do_is_as_in_torch(habit, streams):
    plain_model, model = Blocks(), Blocks()
    optimizer = prepare(model, streams=streams)
    expected, seen = habit(plain_model, adamw(plain_model)), habit(model, optimizer)
    assert_close(seen or [], expected or [])
    assert_close(values_of(model, optimizer), plain_model.parameters())
