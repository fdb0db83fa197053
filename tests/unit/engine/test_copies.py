"""Copies of a prepared model and of its parts: plain ones where its parameters are there, else an error."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import penstock
from tests.lib.engines import ON_CPU, prepared
from tests.lib.models import seeded
from tests.lib.streams import inline, separate
from tests.models.modules_rows import Stack, squared


def stack(streams: Callable[[], Any] = separate, precision: str = "bf16") -> tuple[Stack, penstock.Optimizer]:
    model, optimizer = prepared(seeded(Stack), streams, precision=precision, **ON_CPU)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(squared(model(torch.linspace(-1, 1, 32).reshape(4, 8))))
    assert not optimizer.step().skipped
    optimizer.zero_grad()


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("name", [*COPIES, "AveragedModel"])
def test_released_parameters_are_not_copied(name: str) -> None:
    model, optimizer = stack()
    for part in (model, model.blocks, model.last):
        with pytest.raises(
            penstock.EngineError, match=r"cannot be copied or pickled.*before prepare\(\).*gathered\(\).*penstock\.EMA"
        ):
            (COPIES | {"AveragedModel": AveragedModel})[name](part)
    with optimizer.gathered(model.last.parameters()):
        assert torch.isfinite(copy.deepcopy(model.last).weight).all()
        with pytest.raises(penstock.EngineError, match="would read as NaN"):
            copy.deepcopy(model)
    step(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("streams", [inline, separate])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_a_plain_model(name: str, streams: Any) -> None:
    model, optimizer = stack(streams, precision="fp32")
    with optimizer.gathered():
        whole, part = COPIES[name](model), COPIES[name](model.blocks[0])
        expected = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, expected[key])
        assert name != "deepcopy" or value.untyped_storage().nbytes() == value.nbytes, "memory of its own"
    for module in [*whole.modules(), *part.modules()]:
        fresh = type(module).__new__(type(module))
        nn.Module.__init__(fresh)
        assert vars(module).keys() >= vars(fresh).keys()
        ours = {"_apply", "zero_grad", "forward", "__reduce_ex__", "_ddp_params_and_buffers_to_ignore"}
        assert not ours & vars(module).keys()
        hooks = [value for key, value in vars(module).items() if "hooks" in key and value]
        assert not hooks
        assert type(module._parameters) is dict
    assert {value for p in whole.parameters() for value in vars(p).values()} <= {None}
    with torch.no_grad():
        assert torch.equal(whole(x), model(x))
    other = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole(x).square().sum().backward()
    other.step()
    other.zero_grad()
    whole.half().float()
    step(model, optimizer)
    prepared(whole, streams)[1].close()
    optimizer.close()
    assert torch.isfinite(COPIES[name](model)(x)).all()


def test_averaged_model_inside_gathered() -> None:
    model, optimizer = stack(precision="fp32")
    with optimizer.gathered():
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        average.update_parameters(model)
        first = [p.clone() for p in model.parameters()]
    step(model, optimizer)
    with optimizer.gathered():
        average.update_parameters(model)
        second = [p.clone() for p in model.parameters()]
    for p, a, b in zip(average.module.parameters(), first, second, strict=True):
        torch.testing.assert_close(p.detach(), (a + b) / 2)
    optimizer.close()


def test_hooks_and_attributes_of_people_are_copied() -> None:
    model = Stack()
    model.last.register_forward_hook(double)
    model.last.weight.tag = "mine"
    _, optimizer = prepared(model)
    with optimizer.gathered():
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert list(copied.last._forward_hooks.values()) == [double]
        assert pickle.loads(pickle.dumps(model)).last.weight.tag == "mine"
    optimizer.close()


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("name", COPIES)
def test_a_parameter_is_copied_where_it_is_there(name: str) -> None:
    model, optimizer = stack()
    with pytest.raises(penstock.EngineError, match=r"'last.weight' \(4, 16\).*which is released"):
        COPIES[name](model.last.weight)
    with pytest.raises(penstock.EngineError, match="which is released"):
        COPIES[name]([model.last.weight])
    with optimizer.gathered():
        copied = COPIES[name](model.last.weight)
        expected = model.last.weight.detach().clone()
    assert torch.equal(copied, expected)
    assert {*vars(copied).values()} <= {None}
    other = nn.Linear(16, 4)
    other.weight = copied
    prepared(other, inline)[1].close()
    optimizer.close()
    assert not vars(model.last.weight)


def test_a_shallow_copy_is_another_name_for_the_same_model() -> None:
    model, optimizer = stack(precision="fp32")
    reference, other = stack(precision="fp32")
    alias = copy.copy(model)
    for _ in range(2):
        step(alias, optimizer)
        step(reference, other)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(p), other.full_param(q))
    optimizer.close()
    other.close()
