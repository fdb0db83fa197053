"""The table of rules, storages and formats, inputs for them, and what compares segments bit by bit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock import _native
from penstock.optim import Lion
from penstock.rules import StateFormat, UpdateSlice, rule_for, split_master
from penstock.rules.formats import write_state
from penstock.rules.fused import FusedRule, FusedScalars
from penstock.rules.rule import BLOCK_NUMEL

# dtype of the parameter, dtype of the master
STORAGES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.int16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
GRADS = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [
    StateFormat(),
    StateFormat("fp32", "stochastic", seed=7),
    StateFormat("bf16", "nearest"),
    StateFormat("bf16", "stochastic", seed=7),
    StateFormat("int8", "stochastic", seed=7),
]
ADAM, SGD = torch.optim.Adam, torch.optim.SGD
# Every kernel, and every branch of one.
RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam-l2": (ADAM, {"weight_decay": 0.1, "maximize": True, "betas": (0.3, 0.99)}),
    "amsgrad": (ADAM, {"amsgrad": True}),
    "sgd": (SGD, {"weight_decay": 0.1}),
    "sgd-momentum": (SGD, {"momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    "lion": (Lion, {"weight_decay": 0.1}),
}

WORDS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.int16: torch.int16,
    torch.uint8: torch.uint8,
}

#: Of rules, storages and formats those that tell most, where a row takes long: each kernel, each dtype of parameter and
#: master and each format of states once. The first one is what most people use.
TELLING = [
    ("adamw", STORAGES[2], FORMATS[0]),
    ("lion", STORAGES[1], FORMATS[3]),
    ("adamw", STORAGES[0], FORMATS[4]),
    ("adam-l2", STORAGES[3], FORMATS[2]),
    ("amsgrad", STORAGES[4], FORMATS[0]),
    ("sgd", STORAGES[1], FORMATS[1]),
    ("sgd-momentum", STORAGES[2], FORMATS[4]),
    ("sgd-nesterov", STORAGES[0], FORMATS[2]),
    ("adagrad", STORAGES[4], FORMATS[3]),
]


def rule_and_hyper(name: str, format_: StateFormat = FORMATS[0], step: int = 3) -> tuple[FusedRule, FusedScalars]:
    cls, options = RULES[name]
    optimizer = cls([torch.zeros(1)], lr=1e-2, **options)
    rule = rule_for(optimizer, format_)
    assert isinstance(rule, FusedRule)
    return rule, rule.step_scalars(optimizer.param_groups[0], step)


def make(
    rule: FusedRule, value: Tensor, grad: Tensor, moments: tuple[Tensor, ...], storage: tuple[Any, Any], grad_dtype: Any
) -> UpdateSlice:
    """Build a segment that holds `value`, as nearly as its storage can."""
    param_dtype, master_dtype = storage
    if master_dtype is torch.int16:
        param, master = split_master(value)
    else:
        param, master = value.to(param_dtype, copy=True), None if master_dtype is None else value.clone()
    states, scales = [], []
    for spec, moment in zip(rule.states, moments, strict=False):
        states.append(torch.empty(value.numel(), dtype=spec.dtype))
        scales.append(torch.empty(-(-value.numel() // BLOCK_NUMEL)) if spec.scale_name else None)
        write_state(spec, states[-1], scales[-1], moment if spec.signed else moment.abs())
    return UpdateSlice(param, grad.to(grad_dtype), master, tuple(states), tuple(scales), first=3 * BLOCK_NUMEL)


def copy_of(update_slice: UpdateSlice) -> UpdateSlice:
    return replace(copy_to(update_slice, update_slice.param.device), grad=update_slice.grad)


def copy_to(update_slice: UpdateSlice, device: torch.device) -> UpdateSlice:
    """The same in the memory of a device, the gradient as well."""
    return replace(
        update_slice,
        param=update_slice.param.to(device, copy=True),
        grad=update_slice.grad.to(device, copy=True),
        master=None if update_slice.master is None else update_slice.master.to(device, copy=True),
        states=tuple(state.to(device, copy=True) for state in update_slice.states),
        scales=tuple(None if scale is None else scale.to(device, copy=True) for scale in update_slice.scales),
    )


def parts(update_slice: UpdateSlice) -> Iterator[tuple[str, Tensor]]:
    yield "param", update_slice.param
    if update_slice.master is not None:
        yield "master", update_slice.master
    for index, state in enumerate(update_slice.states):
        yield f"state {index}", state
    for index, scale in enumerate(update_slice.scales):
        if scale is not None:
            yield f"scale {index}", scale


def tensors_of(update_slice: UpdateSlice) -> list[Tensor]:
    """All that an update reads or writes."""
    return [update_slice.grad, *(tensor for _, tensor in parts(update_slice))]


Inputs = tuple[Tensor, Tensor, tuple[Tensor, ...]]  # value, gradient and states


def random_inputs(numel: int) -> Inputs:
    generator = torch.Generator().manual_seed(numel)
    spread = 10 ** torch.empty(numel).uniform_(-8, 3, generator=generator)
    value = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator) * spread
    return value, grad, (grad * 0.3, (grad * 0.2).square(), (grad * 0.1).square())


def hard_values() -> Tensor:
    """Every sign and exponent with mantissas at the borders of both halves: ties, denormals, infinities and NaNs."""
    exponents = torch.arange(256) << 23
    highs = torch.tensor([0x000000, 0x010000, 0x020000, 0x3F0000, 0x400000, 0x7E0000, 0x7F0000])
    lows = torch.tensor([0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    magnitudes = (exponents[:, None, None] | highs[:, None] | lows).flatten()
    bits = torch.cat([magnitudes, magnitudes | (1 << 31)])
    return bits.to(torch.int32).view(torch.float32)


def hard_inputs(every: int = 1) -> Inputs:
    """Values that meet others of all sizes: parameter, gradient and states each in an order of its own."""
    hard = hard_values()[::every]
    orders = [torch.randperm(hard.numel(), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    value, grad, *states = (hard[order] for order in orders)
    return value, grad, tuple(states)


def hard_in_turn(every: int = 11) -> Inputs:
    """Hard values as the parameter, the gradient and the states in turn, beside ones: most results are numbers."""
    hard = hard_values()[::every]
    shuffled = hard[torch.randperm(hard.numel(), generator=torch.Generator().manual_seed(1))]
    one = torch.ones_like(hard)
    value, grad, moment = (
        torch.cat(columns) for columns in ((hard, shuffled, one), (shuffled, one, one), (one, hard, shuffled))
    )
    return value, grad, (moment, moment.abs(), moment.abs())


def mixed(seed: int, numel: int = 300, hard: bool = True) -> Tensor:
    """Ordinary values of many sizes, and every fourth a hard one: denormal, huge, infinite, NaN, or a zero.

    Arguments:
        hard: or else all are finite, and the largest is 1e10.
    """
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(numel, generator=generator) * 10 ** torch.empty(numel).uniform_(-8, 3, generator=generator)
    bad = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, torch.inf, -torch.inf, torch.nan])
    chosen = bad[torch.randint(len(bad), (numel,), generator=generator)]
    value = torch.where(torch.rand(numel, generator=generator) < 0.25, chosen, value)
    return value if hard else torch.nan_to_num(value, nan=1.0, posinf=1e10, neginf=-1e10).clamp(-1e10, 1e10)


#: By name, for tables: what makes inputs.
INPUTS = {
    "ordinary": lambda: random_inputs(3 * BLOCK_NUMEL + 39),
    "hard in turn": hard_in_turn,
    "mixed": lambda: (mixed(1), mixed(5), (mixed(2), mixed(3).abs(), mixed(4).abs())),
}


def each_isa() -> Iterator[str]:
    """Every instruction set of this machine, in use while it is the turn of it; a fixture brings back the best."""
    for isa in _native.isas():
        _native.set_isa(isa)
        yield isa


class Guarded:
    """A flat tensor inside a larger one, at any offset; `check` finds writes outside of it."""

    def __init__(self, values: Tensor, offset: int) -> None:
        self._base = torch.full((offset + values.numel() + 64,), 77, dtype=values.dtype)
        self.tensor = self._base[offset : offset + values.numel()]
        self.tensor.copy_(values)
        self._offset = offset

    def check(self) -> None:
        assert (self._base[: self._offset] == 77).all()
        assert (self._base[self._offset + self.tensor.numel() :] == 77).all()


def same_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Where bits are equal, signs of zeros included; a NaN is a NaN, whatever its payload."""
    assert actual.dtype == expected.dtype
    words = WORDS[actual.dtype]
    same = actual.view(words) == expected.view(words)
    return same | (actual.isnan() & expected.isnan()) if actual.is_floating_point() else same


def differences(actual: UpdateSlice, expected: UpdateSlice) -> list[str]:
    """What differs, part by part: how many elements, and the first of them."""
    found = []
    for (name, a), (_, b) in zip(parts(actual), parts(expected), strict=True):
        wrong = (~same_bits(a, b)).nonzero().flatten()
        if wrong.numel():
            first = wrong[:3]
            found.append(
                f"{name}: {wrong.numel()} of {a.numel()} differ, at {first.tolist()}: {a[first].tolist()} instead of "
                f"{b[first].tolist()}"
            )
    return found


def assert_same(actual: UpdateSlice, expected: UpdateSlice, *what: object) -> None:
    assert not (found := differences(actual, expected)), f"{what}: {found}"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit by bit, signs of zeros included; a NaN is a NaN, whatever its payload."""
    wrong = (~same_bits(actual, expected)).nonzero().flatten()
    first = wrong[:5]
    assert wrong.numel() == 0, (
        f"{wrong.numel()} of {actual.numel()} differ, at {first.tolist()}: "
        f"{actual[first].tolist()} instead of {expected[first].tolist()}"
    )
