"""Which parameters are handled together."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from penstock.engine.unit.partition import UnitSpec, find_units
from penstock.rules.select import NO_RULE
from tests.lib.fuzz import examples


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def units_of(
    model: nn.Module, policy: Any = None, *, owned: Any = None, dtype: torch.dtype = torch.float32, persistent: int = 0
) -> dict[str, UnitSpec]:
    owned = set(model.parameters()) if owned is None else owned
    specs = find_units(
        model,
        policy,
        rules=None if owned is None else dict.fromkeys(owned, NO_RULE),
        compute_dtype=dtype,
        persistent_bytes=persistent,
    )
    assert len({spec.name for spec in specs}) == len(specs)
    return {spec.name: spec for spec in specs}


def names(units: dict[str, UnitSpec]) -> dict[str, list[str]]:
    return {name: list(spec.names) for name, spec in units.items()}


class Model(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_each_repeated_block_is_a_unit_and_the_rest_is_the_root() -> None:
    model = Model(embed=layer(), layers=nn.ModuleList([layer(), layer()]), head=layer())
    units = units_of(model)
    assert names(units) == {
        "root": ["embed.weight", "embed.bias", "head.weight", "head.bias"],
        "layers.0": ["layers.0.weight", "layers.0.bias"],
        "layers.1": ["layers.1.weight", "layers.1.bias"],
    }
    assert units["root"].hooked_modules == (model, model.embed, model.head)
    assert units["layers.0"].hooked_modules == (model.layers[0],)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(layer(), nn.ReLU(), layer()), ["0", "2"]),
        (Model(net=nn.Sequential(layer(), layer())), ["net.0", "net.1"]),
        (Model(by_name=nn.ModuleDict({"a": layer(), "b": layer()})), ["by_name.a", "by_name.b"]),
        (Model(stages=nn.ModuleList([nn.ModuleList([layer(), layer()]) for _ in range(2)])), None),
        (Model(layers=nn.ModuleList([nn.Sequential(layer(), layer()), layer()])), ["layers.0", "layers.1"]),
        (Model(only=nn.ModuleList([nn.Sequential(layer(), layer())])), ["only.0.0", "only.0.1"]),
        (Model(one=nn.ModuleList([layer()]), other=layer()), ["root"]),
        (Model(encoder=nn.ModuleList([layer(), layer()]), decoder=nn.ModuleList([layer(), layer()])), None),
        (layer(), ["root"]),
    ],
    ids=["sequential", "in a module", "dict", "nested lists", "outermost", "list of one", "no list", "two", "leaf"],
)
def test_blocks_are_the_outermost_members_of_lists(model: nn.Module, expected: list[str] | None) -> None:
    everything = [name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith(".weight")]
    assert list(units_of(model)) == (expected or everything)


def test_a_parameter_that_two_blocks_share_belongs_to_the_root() -> None:
    model = Model(layers=nn.ModuleList([layer(), layer()]))
    model.layers[1].weight = model.layers[0].weight
    units = units_of(model)
    assert names(units) == {"root": ["layers.0.weight"], "layers.0": ["layers.0.bias"], "layers.1": ["layers.1.bias"]}
    assert set(units["root"].hooked_modules) == {model, *model.layers}, "gathered in whichever block runs"


def test_frozen_and_unowned_parameters_form_units_of_their_own() -> None:
    model = Model(layers=nn.ModuleList([layer(), layer()]))
    model.layers[0].weight.requires_grad_(False)
    owned = {model.layers[0].weight, model.layers[0].bias, model.layers[1].weight}
    units = units_of(model, owned=owned)
    assert {name: (list(spec.names), spec.trainable) for name, spec in units.items()} == {
        "layers.0.frozen": (["layers.0.weight"], False),
        "layers.0": (["layers.0.bias"], True),
        "layers.1": (["layers.1.weight"], True),
        "layers.1.frozen": (["layers.1.bias"], False),
    }


def test_small_parameters_stay_gathered_in_a_unit_of_their_own() -> None:
    model = Model(layers=nn.ModuleList([layer(), layer()]), head=layer())
    units = units_of(model, persistent=8)  # a bias of two fp32 values
    small = units.pop("root.small")
    assert (small.persistent, list(small.names)) == (True, ["layers.0.bias", "layers.1.bias", "head.bias"])
    assert {model, *model.layers} <= set(small.hooked_modules)
    assert not any(spec.persistent for spec in units.values())
    assert "root.small" not in units_of(model, persistent=7)
    assert "root.small" in units_of(model, persistent=4, dtype=torch.bfloat16), "bytes are those of the compute dtype"


def test_floating_point_parameters_take_the_compute_dtype_and_others_keep_theirs() -> None:
    model = layer()
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    units = units_of(model, dtype=torch.bfloat16)
    assert {name: spec.dtype for name, spec in units.items()} == {
        "root": torch.bfloat16,
        "root.frozen.int64": torch.int64,
    }


blocks = nn.ModuleList([nn.Sequential(layer(), nn.LayerNorm(2)) for _ in range(2)])
MODEL = Model(norm=nn.LayerNorm(2), layers=blocks)
POLICIES: dict[str, tuple[Any, list[str]]] = {
    "the model": (Model, []),
    "the model and others": ((Model, nn.Sequential), ["layers.0", "layers.1"]),
    "the model by name": (lambda name, module: name == "", []),
    "a class": (nn.Sequential, ["layers.0", "layers.1"]),
    "classes": ([nn.Linear], ["layers.0.0", "layers.1.0"]),
    "nested": ((nn.Linear, nn.Sequential), ["layers.0", "layers.0.0", "layers.1", "layers.1.0"]),
    "by name": (lambda name, module: name == "layers.1", ["layers.1"]),
    "by module": (lambda name, module: isinstance(module, nn.LayerNorm), ["norm", "layers.0.1", "layers.1.1"]),
}


@pytest.mark.parametrize(("policy", "expected"), POLICIES.values(), ids=POLICIES)
def test_policies_choose_the_blocks(policy: Any, expected: list[str]) -> None:
    found = list(units_of(MODEL, policy))
    assert "root" in found
    assert [name for name in found if name != "root"] == expected


@st.composite
def trees(draw: Any) -> nn.Module:
    """Nested containers of layers, some of them tied, frozen or standing twice."""
    layers = [layer() for _ in range(draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        layers[-1].weight = layers[0].weight
    if draw(st.booleans()):
        layers[0].bias.requires_grad_(False)

    def build(depth: int) -> nn.Module:
        if depth == 0 or draw(st.integers(0, 2)) == 0:
            return draw(st.sampled_from(layers))
        children = [build(depth - 1) for _ in range(draw(st.integers(1, 3)))]
        container = draw(st.sampled_from([nn.ModuleList, nn.Sequential, "module"]))
        if container == "module":
            return Model(**{f"part{i}": child for i, child in enumerate(children)})
        return container(children) if container is nn.ModuleList else container(*children)

    return Model(top=build(3), rest=draw(st.sampled_from(layers)))


@examples(60)
@given(trees(), st.sampled_from([None, [nn.Linear], [nn.Sequential, nn.ModuleList]]), st.sampled_from([0, 8, 1000]))
def test_every_parameter_is_in_one_unit_and_gathered_wherever_it_is_used(
    model: nn.Module, policy: Any, persistent: int
) -> None:
    inner = [module for module in model.modules() if module is not model]
    assume(policy is None or any(isinstance(module, tuple(policy)) for module in inner))
    units = units_of(model, policy, persistent=persistent)
    owner = {}
    for spec in units.values():
        for name, parameter in zip(spec.names, spec.parameters, strict=True):
            assert parameter not in owner
            owner[parameter] = spec
            assert model.get_parameter(name) is parameter
            assert parameter.requires_grad == spec.trainable
        assert not set(spec.hooked_modules) & spec.inside
    assert owner.keys() == set(model.parameters())
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            assert module in owner[parameter].hooked_modules
