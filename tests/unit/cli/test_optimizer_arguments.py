"""Optimizers by name, and their arguments by signature."""

from typing import Any

import pytest
import torch

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.model import Built
from penstock.cli.training.learning.optimizer import about_decay, parameter_groups, preparation
from penstock.cli.training.learning.optimizer_arguments import CLASSES, optimizer_arguments, takes_weight_decay
from penstock.cli.training.recipe import recipe_for
from penstock.cli.training.settings.learning import OPTIMIZERS
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("adamw", (), {"betas": (0.9, 0.95)}),
        ("adamw", ("eps=1e-6", "amsgrad=true"), {"betas": (0.9, 0.95), "eps": 1e-6, "amsgrad": True}),
        ("adam", (), {}),
        ("sgd", ("momentum=0.9", "nesterov=Yes"), {"momentum": 0.9, "nesterov": True}),
        ("sgd", ("momentum=0.9", "nesterov=0"), {"momentum": 0.9, "nesterov": False}),
        ("rprop", ("etas=0.5,1.3", "step_sizes=1e-5, 10"), {"etas": (0.5, 1.3), "step_sizes": (1e-5, 10.0)}),
        ("nadam", ("momentum_decay = 0.01", "decoupled_weight_decay=on"), {"momentum_decay": 0.01} | {
            "decoupled_weight_decay": True
        }),
        ("lion", ("maximize=false",), {"maximize": False}),
        ("muon", ("ns_steps=3", "momentum=0.9"), {"betas": (0.9, 0.95), "ns_steps": 3, "momentum": 0.9}),
    ],
)  # fmt: skip
def test_what_the_constructor_is_given(name: str, given: tuple[str, ...], read: dict[str, Any]) -> None:
    assert optimizer_arguments(TrainConfig(optimizer_name=name, optimizer_args=given)) == read


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("sgd", "adagrad", "rmsprop")])
def test_betas_are_for_those_that_have_them(name: str) -> None:
    config = TrainConfig(optimizer_name=name, betas=(0.8, 0.9))
    if name in ("adadelta", "asgd", "rprop"):
        with pytest.raises(ConfigError, match=rf"^--betas: {name} has none\. Leave the option out\.$"):
            optimizer_arguments(config)
    else:
        assert optimizer_arguments(config) == {"betas": (0.8, 0.9)}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "adamw",
            ("epsilon=1e-6",),
            "--optimizer-args: adamw has no 'epsilon'. Did you mean eps? It has eps, amsgrad, max",
        ),
        ("sgd", ("eps=1e-6",), "--optimizer-args: sgd has no 'eps'. It has momentum, dampening, nesterov, maximize."),
        ("sgd", ("momentun=1",), "--optimizer-args: sgd has no 'momentun'. Did you mean momentum? It has"),
        ("adamw", ("foreach=true",), "--optimizer-args: adamw has no 'foreach'."),
        ("adamw", ("params=3",), "--optimizer-args: adamw has no 'params'."),
        ("adamw", ("lr=3",), "--optimizer-args lr=: use --lr, which says the same."),
        ("adamw", ("betas=0.1,0.2",), "--optimizer-args betas=: use --betas, which says the same."),
        ("sgd", ("weight_decay=1",), "--optimizer-args weight_decay=: use --weight-decay, which says the same."),
        ("adamw", ("eps",), "--optimizer-args 'eps': write name=value, such as eps=1e-6."),
        ("adamw", ("eps=",), "--optimizer-args 'eps=': write name=value"),
        ("adamw", ("=1",), "--optimizer-args '=1': write name=value"),
        ("adamw", ("eps=small",), "--optimizer-args eps=small: adamw takes a number."),
        ("adamw", ("eps=nan",), "--optimizer-args eps=nan: adamw takes a number."),
        ("adamw", ("amsgrad=perhaps",), "--optimizer-args amsgrad=perhaps: adamw takes true or false."),
        ("rprop", ("etas=1",), "--optimizer-args etas=1: rprop takes 2 numbers, such as 0.5,1.2."),
        ("rprop", ("etas=1,x",), "--optimizer-args etas=1,x: rprop takes 2 numbers"),
        ("adamw", ("eps=1", "eps=2"), "--optimizer-args names eps twice. Give it one value."),
        (
            "adamw",
            ("eps=-1",),
            "--optimizer-args: adamw does not take them: Invalid epsilon value: -1.0 (Val",
        ),
        (
            "sgd",
            ("nesterov=true",),
            "--optimizer-args: sgd does not take them: Nesterov momentum requires a ",
        ),
        ("sgd", ("a\x1b[2J\n=1",), "--optimizer-args: sgd has no 'a\\x1b[2J'."),
    ],
)
def test_a_mistake_is_one_line(name: str, given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        optimizer_arguments(TrainConfig(optimizer_name=name, optimizer_args=given))
    assert str(error.value).startswith(said)
    assert str(error.value).isprintable()


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2, bias=False))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_its_class_does(name: str) -> None:
    decay = {} if name == "rprop" else {"weight_decay": 0.1}
    config = TrainConfig(
        optimizer_name=name, lr=0.01, precision="fp32", max_grad_norm=None, batch_size=1, steps=3, **decay
    )
    plain, ours = model_of(), model_of()
    maker: Any = CLASSES[name]
    alone = maker(parameter_groups(plain, config), lr=0.01, **optimizer_arguments(config))
    recipe = recipe_for(config, positions=None, world_size=1)
    optimizer = preparation(Built(ours, None), config, recipe, "fp32").prepare()
    assert [group.get("weight_decay") for group in optimizer.param_groups] == (
        [0.1, 0.0] if name != "rprop" else [None, None]
    )
    for step in range(3):
        inputs = torch.full((2, 4), 0.5 + step)
        alone.zero_grad()
        plain(inputs).square().sum().backward()
        alone.step()
        optimizer.backward(ours(inputs).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    for wanted, got in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(got), wanted.detach(), rtol=1e-6, atol=1e-7)
    optimizer.close(keep_params=False)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = model_of()
    decayed, others = parameter_groups(model, TrainConfig(weight_decay=0.3))
    assert [tuple(p.shape) for p in decayed["params"]] == [(6, 4), (2, 6)]
    assert [tuple(p.shape) for p in others["params"]] == [(6,), (6,), (6,)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert about_decay(model, TrainConfig()) == "weight decay 0.1 on 2 matrices (36), none on 3 norms and biases"
    assert about_decay(model, TrainConfig(weight_decay=0.0)) == "no weight decay"
    rprop = TrainConfig(optimizer_name="rprop")
    assert about_decay(model, rprop) == "no weight decay: rprop has none"
    with torch.device("meta"):
        large = torch.nn.Linear(1000, 1300)
    assert "1 matrices (1.3M)" in about_decay(large, TrainConfig())
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"^No parameter of the model is trained"):
        parameter_groups(model, TrainConfig())


def test_the_names_are_those_of_the_option() -> None:
    assert tuple(CLASSES) == OPTIMIZERS
    assert [name for name in OPTIMIZERS if not takes_weight_decay(name)] == ["rprop"]


def test_muon_gets_the_matrices_and_adamw_the_rest() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    config = TrainConfig(optimizer_name="muon", lr=1e-2)
    groups = parameter_groups(model, config)
    named = {id(p): name for name, p in model.named_parameters()}
    said = [(group["rule"], group["weight_decay"], [named[id(p)] for p in group["params"]]) for group in groups]
    assert said == [
        ("muon", 0.1, ["1.weight"]),
        ("adamw", 0.1, ["0.weight"]),
        ("adamw", 0.0, ["1.bias", "2.weight", "2.bias"]),
    ]
    optimizer = CLASSES["muon"](groups, lr=1e-2, **optimizer_arguments(config))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2] * 3
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.95)
    with pytest.raises(ConfigError, match=r"^--optimizer-args ns_steps=2\.5: muon takes a whole number"):
        optimizer_arguments(TrainConfig(optimizer_name="muon", optimizer_args=("ns_steps=2.5",)))
    with pytest.raises(ConfigError, match="no matrix for Muon"):
        parameter_groups(torch.nn.LayerNorm(8), config)
