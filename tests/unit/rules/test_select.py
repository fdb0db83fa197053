"""Which optimizers have a rule, and what is refused by name."""

from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.rules import rule_for


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(("cls", "name"), [(torch.optim.AdamW, "adamw"), (torch.optim.Adam, "adam")])
def test_supported_classes(cls: type[torch.optim.Optimizer], name: str) -> None:
    rule = rule_for(cls(params()))
    assert rule.name == name
    assert rule.state_names == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_options_are_refused_by_name(cls: Any, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"Parameter group 0: {option}=True is not supported.*Set {option}=False"):
        rule_for(cls(params(), **{option: True}))


def test_every_group_is_checked() -> None:
    groups = [{"params": params()}, {"params": params(), "amsgrad": True}]
    with pytest.raises(ConfigError, match="Parameter group 1: amsgrad=True"):
        rule_for(torch.optim.AdamW(groups))


def test_a_change_after_the_choice_is_refused_too() -> None:
    optimizer = torch.optim.AdamW(params())
    rule = rule_for(optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="amsgrad=True"):
        rule.hyper(optimizer.param_groups[0], 1)


def test_betas_as_tensors_are_refused() -> None:
    optimizer = torch.optim.AdamW(params())
    optimizer.param_groups[0]["betas"] = (0.9, torch.tensor(0.99))
    with pytest.raises(ConfigError, match=r"Parameter group 0: betas\[1\] is a tensor"):
        rule_for(optimizer)


def test_weight_decay_as_a_tensor_is_refused() -> None:
    optimizer = torch.optim.AdamW(params())
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.1)
    with pytest.raises(ConfigError, match="weight_decay is a tensor"):
        rule_for(optimizer)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_flags_that_only_choose_a_back_end_are_accepted(options: dict[str, bool]) -> None:
    assert rule_for(torch.optim.AdamW(params(), **options)).name == "adamw"


def test_keys_that_torch_ignores_are_ignored() -> None:
    groups = [{"params": params(), "name": "all", "initial_lr": 1.0, "max_lr": 2.0, "note": object()}]
    assert rule_for(torch.optim.AdamW(groups)).name == "adamw"


def test_other_classes_are_named() -> None:
    class Mine(torch.optim.AdamW):
        pass

    supported = r"Use exactly one of torch\.optim\.AdamW, torch\.optim\.Adam"
    with pytest.raises(ConfigError, match=rf"Mine is not supported. {supported}"):
        rule_for(Mine(params()))
    with pytest.raises(ConfigError, match=rf"torch\.optim\.sgd\.SGD is not supported. {supported}"):
        rule_for(torch.optim.SGD(params(), lr=0.1))


def test_equal_groups_give_equal_values() -> None:
    optimizer = torch.optim.AdamW([{"params": params()}, {"params": params()}, {"params": params(), "lr": 0.5}])
    rule = rule_for(optimizer)
    first, second, third = (rule.hyper(group, 4) for group in optimizer.param_groups)
    assert first == second != third
    assert hash(first) == hash(second)
