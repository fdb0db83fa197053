"""Which optimizers have a rule, and what is refused by name."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.optim import Lion
from penstock.rules import StateFormat, rule_for


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("cls", "options", "name", "states"),
    [
        (torch.optim.AdamW, {}, "adamw", ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adam, {}, "adam", ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adam, {"amsgrad": True}, "adam", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.SGD, {}, "sgd", []),
        (torch.optim.SGD, {"momentum": 0.9}, "sgd", ["momentum_buffer"]),
        (torch.optim.Adagrad, {}, "adagrad", ["sum"]),
        (Lion, {}, "lion", ["exp_avg"]),
    ],
)
def test_supported_classes(cls: Any, options: dict[str, Any], name: str, states: list[str]) -> None:
    rule = rule_for(cls(params(), **options))
    assert rule.name == name
    assert [spec.name for spec in rule.states] == states
    assert all(spec.dtype == torch.float32 and spec.scale_name is None for spec in rule.states)


def test_states_in_fewer_bits() -> None:
    optimizer = torch.optim.AdamW(params())
    assert [spec.dtype for spec in rule_for(optimizer, StateFormat("bf16")).states] == [torch.bfloat16] * 2
    first, second = rule_for(optimizer, StateFormat("int8")).states
    assert (first.dtype, first.signed, first.scale_name) == (torch.uint8, True, "exp_avg_scale")
    assert (second.dtype, second.signed, second.scale_name) == (torch.uint8, False, "exp_avg_sq_scale")


def test_every_group_is_checked() -> None:
    groups = [{"params": params()}, {"params": params(), "capturable": True}]
    with pytest.raises(ConfigError, match="Parameter group 1: capturable=True"):
        rule_for(torch.optim.AdamW(groups))


def test_options_that_need_another_state_cannot_be_turned_on_later() -> None:
    adam, sgd = torch.optim.AdamW(params()), torch.optim.SGD(params(), lr=0.1)
    for optimizer, change, message in ((adam, {"amsgrad": True}, "amsgrad"), (sgd, {"momentum": 0.9}, "momentum")):
        rule = rule_for(optimizer)
        optimizer.param_groups[0].update(change)
        with pytest.raises(ConfigError, match=f"{message} was turned on after prepare"):
            rule.step_scalars(optimizer.param_groups[0], 1)


def test_the_tensor_among_several_numbers_is_named() -> None:
    optimizer = torch.optim.AdamW(params())
    optimizer.param_groups[0]["betas"] = [0.9, torch.tensor(0.99)]
    with pytest.raises(ConfigError, match=r"Parameter group 0: betas\[1\] is a tensor"):
        rule_for(optimizer)


def test_keys_that_torch_ignores_are_ignored() -> None:
    groups = [{"params": params(), "name": "all", "initial_lr": 1.0, "max_lr": 2.0, "note": object()}]
    assert rule_for(torch.optim.AdamW(groups)).name == "adamw"


def test_lion_of_lion_pytorch_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(torch.optim.Optimizer):
        decoupled_wd = False

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})

    Theirs.__module__, Theirs.__qualname__ = "lion_pytorch.lion_pytorch", "Lion"
    monkeypatch.setitem(sys.modules, "lion_pytorch", ModuleType("lion_pytorch"))
    optimizer = Theirs(params())
    assert rule_for(optimizer).name == "lion"
    optimizer.decoupled_wd = True
    with pytest.raises(ConfigError, match="decoupled_weight_decay=True"):
        rule_for(optimizer)


def test_other_classes_are_named() -> None:
    class Mine(torch.optim.AdamW):
        pass

    supported = r"Use exactly one of torch\.optim\.AdamW, Adam, SGD, Adagrad, .*penstock\.elementwise"
    with pytest.raises(ConfigError, match=rf"Mine is not supported. {supported}"):
        rule_for(Mine(params()))


def test_equal_groups_give_equal_values() -> None:
    optimizer = torch.optim.AdamW([{"params": params()}, {"params": params()}, {"params": params(), "lr": 0.5}])
    rule = rule_for(optimizer)
    first, second, third = (rule.step_scalars(group, 4) for group in optimizer.param_groups)
    assert first == second != third
    assert hash(first) == hash(second)
