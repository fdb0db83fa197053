"""States of rules over whole parameters, also those of other shapes: looked at, set, moved, saved, loaded elsewhere."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError
from penstock.optim import Lamb, register
from tests.lib.engines import assert_same_state
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate
from tests.parity import whole
from tests.parity.rows import Movement
from tests.parity.whole import BATCH, Make, batches, first_model, loss_of, muon

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
CPU = Movement(params="cpu", grads="cpu", optimizer="cpu")
NVME = Movement(params="nvme", grads="nvme", optimizer="nvme")


class RowScaled(torch.optim.Optimizer):
    """Each row by its own average size: a state of one value for each row, and none of the parameter's shape."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                row_rule.update(
                    p, p.grad, {"size": self.state[p].setdefault("size", torch.zeros(size_of(p)))}, group, 0
                )


def size_of(shape: Any) -> tuple[int, ...]:
    shape = tuple(getattr(shape, "shape", shape))
    return (*shape[:-1], 1)


@register(RowScaled)
class RowRule:
    def states(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"size": size_of(shape)}

    def update(self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Any, step: int) -> None:
        size = states["size"].lerp_(grad.square().mean(dim=-1, keepdim=True), 0.1)
        matrix.sub_(grad / (size.sqrt() + 1e-3), alpha=group["lr"])


row_rule = RowRule()

MAKES: dict[str, Make] = {
    "adafactor": lambda model: torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-2),
    "lamb": lambda model: Lamb([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1),
    "rows": lambda model: RowScaled([p for p in model.parameters() if p.requires_grad]),
    "muon": muon,
    "muon of less": lambda model: muon(model, adamw=["blocks.1.q.weight"]),
    "adamw": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
}
State = dict[str, Tensor]


def prepared(make: str, how: Movement, **rest: Any) -> tuple[nn.Module, penstock.Optimizer]:
    return whole.prepared(how, MAKES[make], **rest)


def step(model: nn.Module, optimizer: Any, number: int, rank: int = 0, world_size: int = 1) -> float:
    ids = batches(world_size, 1, number + 1)[number][0][rank]
    assert len(ids) == BATCH
    loss = loss_of(model, ids)
    if isinstance(optimizer, penstock.Optimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def all_of(model: nn.Module, optimizer: penstock.Optimizer) -> State:
    """Every parameter, and every state that it has."""
    found: State = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    by_number = {id(p): number for number, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    states = optimizer.state_dict()["state"]
    for name in names:
        number = by_number[id(dict(model.named_parameters())[name])]
        found |= {f"{name} {state}": value for state, value in states.get(number, {}).items()}
    return found


def states_of(found: State, name: str) -> list[str]:
    return [each.removeprefix(f"{name} ") for each in found if each.startswith(f"{name} ")]


def trained(make: str, how: Movement, steps: int = 3, **rest: Any) -> State:
    model, optimizer = prepared(make, how, **rest)
    for number in range(steps):
        step(model, optimizer, number)
    found = all_of(model, optimizer)
    optimizer.close(keep_params=False)
    return found


@pytest.mark.parametrize("make", ["adafactor", "rows"])
def test_placement_does_not_change_states_of_any_shape(make: str) -> None:
    for precision in ("fp32", "bf16")[make == "adafactor" :]:
        expected = trained(make, Movement(), precision=precision)
        for how in (CPU, NVME, CPU.but(whole_updates="home"), Movement(3, "cpu", "cpu", "cpu", "backward")):
            assert_same_state(trained(make, how, precision=precision, streams=separate()), expected)


@pytest.mark.parametrize("make", ["adafactor", "lamb", "rows"])
def test_states_of_any_shape_are_those_of_the_class(make: str) -> None:
    ours = trained(make, CPU)
    model = deepcopy(first_model())
    optimizer = MAKES[make](model)
    for number in range(3):
        step(model, optimizer, number)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.detach(), rtol=1e-6, atol=1e-7)
        for state, value in optimizer.state.get(p, {}).items():
            kept = ours[f"{name} {state}"]
            assert state == "step" or kept.shape == value.shape
            torch.testing.assert_close(
                kept, torch.as_tensor(value, dtype=torch.float32).view(kept.shape), rtol=1e-6, atol=1e-9
            )


@pytest.mark.parametrize("make", ["adafactor", "rows", "muon"])
def test_states_of_any_shape_are_given_and_taken(make: str) -> None:
    """By `state_dict`, one by one, and from an optimizer that has made steps before `prepare`."""
    if make == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    model, optimizer = prepared(make, NVME)
    step(model, optimizer, 0)
    other, second = prepared(make, CPU)
    second.load_state_dict(optimizer.state_dict())
    third, by_hand = prepared(make, Movement())
    expected = all_of(model, optimizer)
    for (name, p), q, r in zip(model.named_parameters(), other.parameters(), third.parameters(), strict=True):
        second.set_full_param(q, expected[name])
        by_hand.set_full_param(r, expected[name])
        if p.requires_grad:
            for state in states_of(expected, name):
                by_hand.set_full_state(r, state, expected[f"{name} {state}"])
    assert_same_state(all_of(other, second), expected)
    assert_same_state(all_of(third, by_hand), expected)
    step(model, optimizer, 1)
    step(other, second, 1)
    expected = all_of(model, optimizer)
    assert_same_state(all_of(other, second), expected)

    plain = deepcopy(first_model())
    before = MAKES[make](plain)
    step(plain, before, 0)
    went_on = penstock.prepare(plain, before, placement=CPU.placement, precision="fp32")
    step(plain, went_on, 1)
    for name, value in all_of(plain, went_on).items():
        if name.endswith(" step") and make in ("muon", "rows"):
            continue  # torch's class counts no steps, and neither can who takes its states over
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_a_state_of_another_shape_is_refused_by_its_own() -> None:
    model, optimizer = prepared("adafactor", CPU)
    weight = model.get_parameter("blocks.0.up.weight")
    with pytest.raises(ConfigError, match=r"has shape \(3,\); this state of it has \(48, 1\)"):
        optimizer.set_full_state(weight, "row_var", torch.zeros(3))
    optimizer.set_full_state(weight, "row_var", torch.arange(48.0).view(48, 1))
    assert torch.equal(optimizer.full_state(weight, "row_var"), torch.arange(48.0).view(48, 1))
    assert not optimizer.full_state(weight, "col_var").any()
    with pytest.raises(ConfigError, match=r"no optimizer state 'variance'. This rule has 'row_var', 'col_var', 'step'"):
        optimizer.full_state(weight, "variance")


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("adafactor", {}),
    ("muon", {"state_dtype": "int8"}),
]


@MUON
@pytest.mark.parametrize(("make", "options"), FORMS, ids=str)
def test_a_run_goes_on_elsewhere_bit_for_bit(make: str, options: dict[str, Any], tmp_path: Path) -> None:
    precision = "bf16" if options else "fp32"
    model, optimizer = prepared(make, NVME.but(**options), precision=precision)
    for number in range(2):
        step(model, optimizer, number)
    optimizer.save(tmp_path / "a", blocking=False)
    for number in range(2, 4):
        step(model, optimizer, number)
    expected = all_of(model, optimizer)
    for how in (Movement(2, "cpu", "cpu", "nvme", "forward"), Movement(3, "cpu", "cpu", "cpu", "backward")):
        again, resumed = prepared(make, how.but(**options), precision=precision, streams=separate())
        resumed.load(tmp_path / "a")
        for number in range(2, 4):
            step(again, resumed, number)
        assert_same_state(all_of(again, resumed), expected)


def _save(rank: int, world_size: int, make: str, how: Movement, folder: str) -> State:
    model, optimizer = prepared(make, how)
    for number in range(2):
        step(model, optimizer, number, rank, world_size)
    optimizer.save(Path(folder, "a"))
    found = all_of(model, optimizer)
    optimizer.close(keep_params=False)
    return found


def _load(rank: int, world_size: int, make: str, how: Movement, folder: str) -> State:
    model, optimizer = prepared(make, how)
    optimizer.load(Path(folder, "a"))
    found = all_of(model, optimizer)
    step(model, optimizer, 2, rank, world_size)  # and it trains
    optimizer.close(keep_params=False)
    return found


@MUON
def test_saved_by_two_ranks_and_loaded_by_three_and_by_one(tmp_path: Path) -> None:
    given = str(tmp_path)
    saved, same = run_ranks(_save, 2, 2, "muon", CPU, given)
    assert_same_state(saved, same)
    for found in (*run_ranks(_load, 3, 3, "muon", NVME, given), _load(0, 1, "muon", CPU.but(stage=1), given)):
        assert_same_state(found, saved)


def test_a_count_that_adafactor_kept_in_checkpoints_before_is_read(tmp_path: Path) -> None:
    """Version 0.2 ran the class itself, whose own count of steps was a scalar of each parameter in the manifest."""
    model, optimizer = prepared("adafactor", CPU)
    for k in range(2):
        step(model, optimizer, k)
    scalars = optimizer._engine.updater.scalars
    scalars.update({parameter: {"step": 2.0} for parameter in scalars})
    optimizer.save(tmp_path / "two")
    assert '"scalars":{"step":2.0}' in (tmp_path / "two" / "checkpoint.json").read_text()
    other, second = prepared("adafactor", CPU)
    second.load(tmp_path / "two")
    for each in ((model, optimizer), (other, second)):
        step(*each, 2)
    assert_same_state(all_of(other, second), all_of(model, optimizer))


#: What is saved, what loads it, and what is said.
OTHER_RULES = {
    "of matrices, into one of elements": ("muon", "adamw", "Prepare with the optimizer that it was saved from"),
    "of matrices, into another": ("lamb", "adafactor", "Prepare with the optimizer that it was saved from"),
    "of a parameter": ("muon", "muon of less", r"groups|blocks\.1\.q\.weight"),
}


@MUON
@pytest.mark.parametrize(("saves", "loads", "text"), OTHER_RULES.values(), ids=OTHER_RULES)
def test_a_checkpoint_of_another_rule_is_refused_before_anything_changes(
    saves: str, loads: str, text: str, tmp_path: Path
) -> None:
    model, optimizer = prepared(saves, CPU)
    step(model, optimizer, 0)
    optimizer.save(tmp_path / "a")
    other, second = prepared(loads, CPU)
    before = all_of(other, second)
    with pytest.raises(CheckpointError, match=text):
        second.load(tmp_path / "a")
    assert_same_state(all_of(other, second), before)
