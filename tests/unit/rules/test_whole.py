"""Rules over whole parameters: what they compute, on what is stored, beside torch's own classes, element by element."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from penstock.errors import ConfigError
from penstock.optim import Lamb, MuonAdamW
from penstock.rules import StateFormat, UpdateSlice, join_master, rule_for, split_master
from penstock.rules.formats import read_state
from penstock.rules.rule import BLOCK_NUMEL, Rule
from tests.unit.rules.segments import STORAGES, assert_same_bits

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought it")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numel_of(rule: Rule, name: str, shape: tuple[int, ...]) -> int:
    found = rule.state_shape(name, shape)
    return 0 if found is None else math.prod(found)


def segment_of(
    rule: Rule, value: Tensor, storage: tuple[Any, Any] = (torch.float32, None), padding: int = 5
) -> UpdateSlice:
    """A whole parameter as it is stored, with states of zeros."""
    dtype, master_dtype = storage
    flat = value.flatten().clone()
    param, master = flat.to(dtype), None
    if master_dtype == torch.int16:
        param, master = split_master(flat)
    elif master_dtype is not None:
        master = flat.clone()
    states, scales = [], []
    for spec in rule.states:
        numel = numel_of(rule, spec.name, tuple(value.shape))
        is_alike = spec.dtype != torch.float32
        zeros = torch.zeros(numel if is_alike else numel + padding, dtype=spec.dtype)
        states.append(zeros)
        scales.append(torch.zeros(-(-numel // BLOCK_NUMEL)) if spec.scale_name else None)
    return UpdateSlice(param, torch.zeros_like(flat), master, tuple(states), tuple(scales), 0, tuple(value.shape))


def run(
    optimizer: torch.optim.Optimizer,
    value: Tensor,
    grads: list[Tensor],
    format_: StateFormat = StateFormat(),  # noqa: B008
    storage: tuple[Any, Any] = (torch.float32, None),
    scale: float = 1.0,
) -> tuple[Rule, UpdateSlice]:
    """Update one parameter by the rule of an optimizer, with its first group's options."""
    group = optimizer.param_groups[0]
    rule = rule_for(optimizer, format_).part(group)
    update_slice = segment_of(rule, value, storage)
    scalars: Mapping[str, Any] = {}
    for step, grad in enumerate(grads, 1):
        update_slice.grad.copy_(grad.flatten())
        step_scalars = rule.step_scalars(group, step, scalars)
        scalars = rule.advance(step_scalars)
        rule.update_many([(update_slice, step_scalars)], scale, None)
    return rule, update_slice


def by_class(
    make: Callable[[Any], torch.optim.Optimizer], value: Tensor, grads: list[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Update one parameter by the class itself."""
    parameter = nn.Parameter(value.clone())
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach(), dict(optimizer.state[parameter])


def state(rule: Rule, update_slice: UpdateSlice, name: str, numel: int) -> Tensor:
    k = [spec.name for spec in rule.states].index(name)
    stored = update_slice.states[k]
    return read_state(rule.states[k], stored[:numel], update_slice.scale(k))


MUON_OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "weight_decay": 0.3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": torch.tensor(0.02), "momentum": 0.8, "ns_steps": 3, "adjust_lr_fn": "original"},
    {"lr": torch.tensor([0.02]), "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "weight_decay": 0.0},
]


@MUON
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *(((12, 40), options) for options in MUON_OPTIONS),
        *zip([(16, 16), (40, 12), (7, 33), (1, 5)], MUON_OPTIONS, strict=True),
    ],
    ids=str,
)
def test_muon_is_that_of_torch_bit_for_bit(shape: tuple[int, int], options: dict[str, Any]) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, **options)

    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2, 3)]
    rule, update_slice = run(make([nn.Parameter(value.clone())]), value, grads)
    theirs, kept = by_class(make, value, grads)
    assert torch.equal(update_slice.param.view(shape), theirs)
    assert torch.equal(state(rule, update_slice, "momentum_buffer", value.numel()).view(shape), kept["momentum_buffer"])


@MUON
def test_masters_hold_what_fp32_does() -> None:
    shape = (12, 40)
    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2, 3)]
    optimizer = torch.optim.Muon([nn.Parameter(value.clone())], lr=0.02)
    fp32, split, full = (run(optimizer, value, grads, storage=STORAGES[k])[1] for k in (0, 2, 3))
    assert_same_bits(join_master(split.param, split.master), fp32.param)
    assert_same_bits(split.param, split_master(fp32.param)[0])
    assert_same_bits(full.master, fp32.param)
    assert_same_bits(full.param, fp32.param.bfloat16())


@MUON
def test_a_gradient_in_bf16_is_scaled_and_stays() -> None:
    shape = (12, 40)
    value, grad = normal(*shape), normal(*shape, seed=1).bfloat16()
    optimizer = torch.optim.Muon([nn.Parameter(value.clone())], lr=0.02)
    rule = rule_for(optimizer)
    for scale in (0.25, 1.0):
        update_slice = replace(segment_of(rule, value), grad=grad.flatten().clone())
        rule.update(update_slice, rule.step_scalars(optimizer.param_groups[0], 1), scale, None)
        theirs, kept = by_class(lambda p: torch.optim.Muon(p, lr=0.02), value, [grad.float() * scale])
        assert torch.equal(update_slice.param.view(shape), theirs)
        assert torch.equal(state(rule, update_slice, "momentum_buffer", 480).view(shape), kept["momentum_buffer"])
        assert torch.equal(update_slice.grad.view(shape), grad)


@MUON
@pytest.mark.parametrize(
    ("format_", "tolerance"),
    [
        (StateFormat("bf16", "nearest"), 0.02),
        (StateFormat("bf16", "stochastic", seed=3), 0.02),
        (StateFormat("int8"), 0.06),
    ],
)
def test_momentum_in_fewer_bits(format_: StateFormat, tolerance: float) -> None:
    """The first update decodes zeros: the momentum is what fp32 has, once encoded. Later ones are near it."""
    shape = (16, 36)
    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2, 3)]
    optimizer = torch.optim.Muon([nn.Parameter(value.clone())], lr=0.02)
    exact = [run(optimizer, value, grads[:n]) for n in (1, 3)]
    found = [run(optimizer, value, grads[:n], format_) for n in (1, 3)]
    assert torch.equal(found[0][1].param, exact[0][1].param)
    for (rule, update_slice), (plain, ours) in zip(found, exact, strict=True):
        assert rule.states[0].dtype in (torch.bfloat16, torch.uint8)
        a, b = (state(*pair, "momentum_buffer", 16 * 36) for pair in ((rule, update_slice), (plain, ours)))
        torch.testing.assert_close(a, b, rtol=tolerance, atol=0.01)
    if format_.stochastic:
        again, nearest = (run(optimizer, value, grads, f)[1].states[0] for f in (format_, StateFormat("bf16")))
        assert torch.equal(again, found[1][1].states[0])
        assert not torch.equal(again, nearest)


@MUON
def test_pieces_of_what_is_decoded_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (30, 40)
    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2, 3)]
    optimizer = torch.optim.Muon([nn.Parameter(value.clone())], lr=0.02)
    stochastic = StateFormat("bf16", "stochastic", seed=3)
    for format_, master in ((stochastic, torch.int16), (stochastic, None), (StateFormat("int8"), torch.float32)):
        whole = run(optimizer, value, grads, format_, (torch.bfloat16, master))[1]
        with monkeypatch.context() as patch:
            patch.setattr("penstock.ext.matrix.PIECE_NUMEL", 512)
            pieces = run(optimizer, value, grads, format_, (torch.bfloat16, master))[1]
        for a, b in zip((whole.param, *whole.states), (pieces.param, *pieces.states), strict=True):
            assert torch.equal(a, b)
        if whole.master is not None and pieces.master is not None:
            assert torch.equal(whole.master, pieces.master)


@MUON
@pytest.mark.parametrize(
    ("shape", "split", "shapes"),
    [
        ((24, 8), 3, [(8, 8)] * 3),
        ((20, 8), (12, 4, 4), [(12, 8), (4, 8), (4, 8)]),
        ((3, 10, 6), None, [(10, 6)] * 3),
        ((2, 10, 6), 2, [(5, 6)] * 4),
    ],
)
def test_parts_are_made_orthogonal_by_themselves(shape: Any, split: Any, shapes: list[tuple[int, int]]) -> None:
    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2)]
    named = [("w", nn.Parameter(value.clone()))]
    optimizer = MuonAdamW(named, lr=0.02, split={"w": split}, adjust_lr_fn="original")
    _, update_slice = run(optimizer, value, grads)
    cuts = [value, *grads]
    columns = shape[-1]
    rows = [tensor.reshape(-1, columns).split([n for n, _ in shapes]) for tensor in cuts]
    for k, (_, ours) in enumerate(
        zip(shapes, update_slice.param.view(-1, columns).split([n for n, _ in shapes]), strict=True)
    ):
        theirs, _ = by_class(lambda p: torch.optim.Muon(p, lr=0.02), rows[0][k], [rows[1][k], rows[2][k]])
        assert torch.equal(ours, theirs), k


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lamb(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, lr=torch.tensor(0.9), eps=(1e-4, 0.1), d=1.5, maximize=True, beta2_decay=-1),
    ],
    ids=["lamb", "adafactor", "adafactor with options"],
)
@pytest.mark.parametrize("shape", [(12, 40), (64,), (3, 4, 5)], ids=str)
def test_rules_are_what_the_class_does(make: Callable[[Any], torch.optim.Optimizer], shape: Any) -> None:
    value, grads = normal(*shape), [normal(*shape, seed=s) for s in (1, 2, 3)]
    rule, update_slice = run(make([nn.Parameter(value.clone())]), value, grads)
    theirs, kept = by_class(make, value, grads)
    assert torch.equal(update_slice.param.view(shape), theirs)
    for spec in rule.states:
        assert torch.equal(state(rule, update_slice, spec.name, kept[spec.name].numel()), kept[spec.name].flatten()), (
            spec.name
        )
        assert (
            update_slice.states[[s.name for s in rule.states].index(spec.name)][kept[spec.name].numel() :].eq(0).all()
        )


def test_lamb_is_that_of_the_paper() -> None:
    value, grad = normal(4, 6).double(), normal(4, 6, seed=1).double()
    p, m, v = value.clone(), torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    for t in (1, 2):
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * p
        p = p - 0.01 * u * p.norm() / u.norm()
    theirs, _ = by_class(lambda q: Lamb(q, lr=0.01, weight_decay=0.1), value.float(), [grad.float()] * 2)
    torch.testing.assert_close(theirs, p.float(), rtol=1e-5, atol=1e-6)
    still, _ = by_class(lambda q: Lamb(q, lr=0.01), torch.zeros(3), [torch.ones(3)])
    torch.testing.assert_close(still, torch.full((3,), -0.01))


@MUON
@pytest.mark.parametrize(
    ("make", "dtype"),
    [(torch.optim.Adafactor, "bf16"), (Lamb, "int8"), (lambda p: torch.optim.Muon(p), "fp32")],
)
def test_an_update_takes_no_more_than_its_working_bytes(make: Any, dtype: Any) -> None:
    value, optimizer = normal(64, 96), make([nn.Parameter(torch.zeros(64, 96))])
    rule: Any = rule_for(optimizer, StateFormat(dtype, "stochastic"))
    update_slice = segment_of(rule, value, (torch.bfloat16, torch.int16), padding=0)
    update_slice.grad.normal_()
    step_scalars, held, most = rule.step_scalars(optimizer.param_groups[0], 1), 0, 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rule.update(update_slice, step_scalars, 0.5, None)
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert value.numel() * 8 <= most <= rule.working_bytes((64, 96))


@MUON
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adjust_lr_fn": "other"}, r"group 0: adjust_lr_fn='other': use None"),
        ({"ns_steps": 100}, "ns_steps=100: use 0 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "use three numbers"),
        ({"momentum": -0.1}, "momentum=-0.1: use 0 or more"),
        ({"momentum": torch.tensor(0.9)}, "momentum is a tensor"),
        ({"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\)"),
        ({"split": 3}, "split is an option of penstock.optim.MuonAdamW"),
        ({"ns_dtype": "fp32"}, "ns_dtype is an option of penstock.optim.MuonAdamW"),
    ],
)
def test_options_that_the_arithmetic_does_not_know(change: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.Muon([nn.Parameter(torch.zeros(2, 4))])
    optimizer.param_groups[0].update(change)
    with pytest.raises(ConfigError, match=message.removeprefix("group 0: ")):
        rule_for(optimizer)
