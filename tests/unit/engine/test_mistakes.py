"""Stock idioms of training loops around a prepared model: each works, or raises an error that says what to call."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import penstock
from penstock.errors import ConfigError, EngineError
from tests.lib.engines import ON_CPU, adamw, assert_same_state, state
from tests.lib.engines import prepared as prepare
from tests.lib.models import seeded
from tests.lib.streams import inline, separate
from tests.models.modules_rows import Stack

METHODS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: o.step(),
    "zero_grad": lambda o: o.zero_grad(),
    "add_param_group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "state_dict": lambda o: o.state_dict(),
    "load_state_dict": lambda o: o.load_state_dict({"state": {}, "param_groups": []}),
    "register_step_pre_hook": lambda o: o.register_step_pre_hook(print),
    "register_step_post_hook": lambda o: o.register_step_post_hook(print),
}


def prepared(
    streams: Callable[[], Any] = separate, precision: str = "fp32"
) -> tuple[Stack, torch.optim.Optimizer, penstock.Optimizer]:
    """The model, the optimizer that was given, and the one that `prepare` returned."""
    model = seeded(Stack)
    given = adamw(model.parameters())
    return model, given, prepare(model, streams, stock=lambda _: given, precision=precision, **ON_CPU)[1]


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 32).reshape(4, 8)).float().square().sum()


def step(model: nn.Module, optimizer: penstock.Optimizer) -> float:
    loss = loss_of(model)
    optimizer.backward(loss)
    assert not optimizer.step().skipped
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# The optimizer that was given


def test_the_given_optimizer_refuses_until_close() -> None:
    model, given, optimizer = prepared()
    loss_of(model).backward()
    for name, call in METHODS.items():
        text = rf"{name}\(\) of the AdamW that was given to prepare\(\).*prepare\(\) returned"
        with pytest.raises(EngineError, match=text):
            call(given)
    assert not optimizer.step().skipped
    optimizer.close()
    assert not vars(given).keys() & METHODS.keys()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    given.step()
    given.zero_grad()
    given.load_state_dict(given.state_dict())


@pytest.mark.parametrize("made", ["before prepare", "after prepare", "over ours"])
def test_schedulers_over_the_given_optimizer_work(made: str) -> None:
    def run(plain: bool) -> tuple[list[float], list[float]]:
        model = seeded(Stack)
        given = adamw(model.parameters())
        make = torch.optim.lr_scheduler.CosineAnnealingLR
        scheduler = make(given, 4) if made == "before prepare" else None
        optimizer: Any = given
        if not plain:
            _, optimizer = prepare(model, stock=lambda _: given, **ON_CPU)
        scheduler = scheduler or make(optimizer if made == "over ours" else given, 4)
        rates, losses = [], []
        for _ in range(4):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
        if not plain:
            optimizer.close()
        loss_of(model).backward()
        given.step()  # its own again, as the scheduler has wrapped it
        return rates, losses

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()", "has been overridden"
        rates, losses = run(plain=False)
        expected_rates, expected = run(plain=True)
    assert rates == expected_rates
    assert losses == pytest.approx(expected, rel=1e-5)


# Wrappers


def test_distributed_data_parallel_around_a_prepared_model_or_a_part(group: None) -> None:
    for streams in (inline, separate):
        model, _, optimizer = prepared(streams)
        for part in (model, model.blocks[0]):
            with pytest.raises(EngineError, match=r"DistributedDataParallel was put around a prepared \w+.*as it is"):
                nn.parallel.DistributedDataParallel(part)
        step(model, optimizer)
        optimizer.close()
        nn.parallel.DistributedDataParallel(model)


def test_data_parallel_around_a_prepared_model() -> None:
    model, _, optimizer = prepared()
    with pytest.raises(EngineError, match=r"DataParallel was put around a prepared Stack"):
        model._replicate_for_data_parallel()  # which it calls where it has several devices
    step(nn.DataParallel(model), optimizer)  # on one, it is nothing
    optimizer.close()
    model._replicate_for_data_parallel()


def test_fully_shard_around_a_prepared_model(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model, _, optimizer = prepared()
    with pytest.raises((EngineError, RuntimeError)):  # noqa: PT012 - at the call, or at the next forward
        fully_shard(model)
        loss_of(model)
    optimizer.close(keep_params=False)


def test_a_wrapped_model_is_not_prepared(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    wrapped = [nn.DataParallel(Stack()), nn.parallel.DistributedDataParallel(Stack()), fully_shard(Stack())]
    for model in [*wrapped, nn.Sequential(wrapped[1])]:
        kind = "FSDPModule" if model is wrapped[2] else "DataParallel"
        with pytest.raises(ConfigError, match=rf"is a \w*{kind}.*(model\.module|before it is sharded)"):
            penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Loss scaling by people


@pytest.mark.parametrize(("precision", "unscales"), [("fp32", False), ("bf16", True), ("fp16", False)])
def test_a_grad_scaler_is_named(precision: str, unscales: bool) -> None:
    model, _, optimizer = prepared(precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(EngineError, match="GradScaler"):  # noqa: PT012 - fp16 at backward, else where it is unscaled
        scaler.scale(loss_of(model)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    optimizer.zero_grad()
    step(model, optimizer)
    optimizer.close()


def test_a_disabled_grad_scaler_passes_through() -> None:
    model, _, optimizer = prepared(precision="bf16")
    reference, _, other = prepared(precision="bf16")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step(reference, other)
    assert_same_state(state(model, optimizer), state(reference, other))
    optimizer.close()
    other.close()


# Saving a model that is not there


def through_dcp(model: nn.Module, folder: Path) -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model)


def through_safetensors(model: nn.Module, folder: Path) -> Any:
    from safetensors.torch import save_model

    return save_model(model, str(folder / "model.safetensors"))


#: What needs the values of a whole model.
SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "model.state_dict()": lambda model, _: model.state_dict(),
    "submodule.state_dict()": lambda model, _: model.blocks[1].state_dict(),
    "state_dict(keep_vars=True)": lambda model, _: model.state_dict(keep_vars=True),
    "torch.save(model)": lambda model, folder: torch.save(model, folder / "model.pt"),
    "torch.save(model.state_dict())": lambda model, folder: torch.save(model.state_dict(), folder / "model.pt"),
    "torch.save(parameters)": lambda model, folder: torch.save(list(model.parameters()), folder / "model.pt"),
    "get_model_state_dict": through_dcp,
    "safetensors.save_model": through_safetensors,
}


@pytest.mark.parametrize("name", SAVES)
def test_a_model_is_not_saved_while_it_is_released(name: str, tmp_path: Path, group: None) -> None:
    model, _, optimizer = prepared()
    step(model, optimizer)
    with pytest.raises(EngineError, match=r"(inside|enter) optimizer\.gathered\(\).*(optimizer\.save|full_param)\(\)"):
        SAVES[name](model, tmp_path)
    if name != "safetensors.save_model":  # which wants each tensor in memory of its own
        with optimizer.gathered():
            SAVES[name](model, tmp_path)
    step(model, optimizer)
    optimizer.close()


# Loops


def test_hooks_of_gradients_see_them_or_are_refused() -> None:
    model, _, optimizer = prepared()
    seen = []
    model.last.bias.register_hook(lambda grad: seen.append(grad.norm()))
    loss_of(model).backward()
    torch.testing.assert_close(model.last.bias.grad.norm(), seen[0])
    optimizer.step()
    for use in (lambda p: torch.optim.SGD([p], lr=0.1).step(), lambda p: p.grad.add_(1), lambda p: p.grad.add_(p.grad)):
        optimizer.zero_grad()
        handle = model.last.bias.register_post_accumulate_grad_hook(use)
        with pytest.raises(EngineError, match=r"on the \.grad of 'last.bias'.*full_grad"):
            optimizer.backward(loss_of(model))
        handle.remove()
    optimizer.zero_grad()
    handle = model.last.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    step(model, optimizer)
    assert seen.pop() is not None, "those that only look on are let"
    handle.remove()
    step(model, optimizer)
    optimizer.close()
