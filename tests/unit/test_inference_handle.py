"""The handle of a model that nothing trains: what works on it, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib import engines
from tests.lib.engines import adamw, squared, train
from tests.lib.memory import disks
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused, rows
from tests.lib.streams import inline, separate, simulated
from tests.models.adapters_rows import Float8Linear

INPUTS = torch.linspace(-1, 1, 32).reshape(4, 8)


def prepared(model: nn.Module, streams: Any = separate, **how: Any) -> penstock.Optimizer:
    return engines.prepared(model, streams, stock=None, **{"params": "cpu", **how})[1]


def trained(model: nn.Module, **how: Any) -> penstock.Optimizer:
    """An optimizer that has made some steps."""
    _, optimizer = engines.prepared(model, **{"params": "cpu", "precision": "bf16", **how})
    train(model, optimizer, 2)
    return optimizer


@torch.no_grad()
def answer(model: nn.Module) -> Tensor:
    return model(INPUTS)


# What is refused


def test_it_is_an_optimizer_of_nothing() -> None:
    model = Blocks()
    optimizer = prepared(model)
    assert isinstance(optimizer, penstock.Optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups == []
    assert "Inference" in repr(optimizer)
    optimizer.zero_grad()  # loops over several models clear and hold back all of them
    model.zero_grad()
    with optimizer.no_sync():
        assert torch.equal(answer(model), answer(Blocks()))
    assert optimizer.state_dict() == {"state": {}, "param_groups": []}
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()


def closure() -> None:
    pytest.fail("the closure was called")


def trains(name: str, do: Callable[[Any, penstock.Optimizer], Any]) -> Refusal:
    """What is refused by its name."""
    return Refusal(do, name, penstock.EngineError)


GONE = "'last.weight' is frozen: it has no gradient"
REFUSED = {
    "step": trains("step()", lambda m, o: o.step()),
    "step with a closure": trains("step()", lambda m, o: o.step(closure)),
    "backward": trains("backward()", lambda m, o: o.backward(torch.ones((), requires_grad=True))),
    "clip": trains("clip_grad_norm_()", lambda m, o: o.clip_grad_norm_(1.0)),
    "a group": trains("add_param_group()", lambda m, o: o.add_param_group({"params": [m.last.weight]})),
    "a scheduler": trains("A learning-rate scheduler", lambda m, o: torch.optim.lr_scheduler.LambdaLR(o, float)),
    "full_grad": Refusal(lambda m, o: o.full_grad(m.last.weight), GONE),
    "set_full_grad": Refusal(lambda m, o: o.set_full_grad(m.last.weight, torch.zeros(4, 16)), GONE),
    "full_state": Refusal(lambda m, o: o.full_state(m.last.weight, "exp_avg"), GONE),
    "set_full_state": Refusal(lambda m, o: o.set_full_state(m.last.weight, "exp_avg", torch.zeros(4, 16)), GONE),
    "to save nothing": Refusal(lambda m, o: o.save("nowhere", frozen=False), "frozen=False"),
    "state of an optimizer": Refusal(
        lambda m, o: o.load_state_dict(adamw(list(m.parameters())).state_dict()),
        "different number of parameter groups",
        ValueError,
    ),
}


@rows(REFUSED)
def test_what_trains_is_refused_by_name(row: Refusal) -> None:
    model = Blocks()
    before = answer(model)
    optimizer = prepared(model)
    refused(row, model, optimizer)
    if row.error is penstock.EngineError:
        with pytest.raises(penstock.EngineError, match=r"prepare\(model, None\).*prepare\(model, optimizer\)"):
            row.do(model, optimizer)
    assert torch.equal(answer(model), before)
    optimizer.close()


def test_backward_of_a_loss_without_a_graph_says_why() -> None:
    """By the optimizer of another model: torch would say that element 0 of tensors does not require grad."""
    policy, reference = Blocks(), Blocks(seed=1)
    _, optimizer_of_policy = engines.prepared(policy)
    optimizer = prepared(reference)
    loss = squared(reference(INPUTS))
    with pytest.raises(penstock.EngineError, match=r"does not require a gradient.*prepare\(model, None\)"):
        optimizer_of_policy.backward(loss)
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        loss.backward()
    optimizer_of_policy.zero_grad()
    optimizer_of_policy.backward(squared(policy(INPUTS)) + loss)
    assert not optimizer_of_policy.step().skipped
    optimizer.close()
    optimizer_of_policy.close()


def test_two_models_do_not_share_parameters() -> None:
    policy, reference = Blocks(), Blocks(seed=1)
    reference.last = policy.last
    adamw = torch.optim.AdamW(policy.parameters())
    trains = penstock.prepare(policy, adamw)
    with pytest.raises(penstock.ConfigError, match=r"prepared already.*'last.weight' \(4, 16\) has an optimizer"):
        penstock.prepare(reference, None)
    assert reference.first.weight.requires_grad, "nothing has changed"
    trains.close()
    optimizer = penstock.prepare(reference, None)
    with pytest.raises(penstock.ConfigError, match="prepared already"):
        penstock.prepare(policy, adamw)
    optimizer.close()


# What works


@pytest.mark.parametrize("streams", [inline, separate, simulated], ids=["in place", "gathered", "late"])
def test_parameters_are_read_and_written_by_people(streams: Any) -> None:
    """As training frameworks sync a reference model: in a `gathered` block, one by one, and by a state dict."""
    model, other = Blocks(), Blocks(seed=1)
    optimizer = prepared(model, streams)
    with optimizer.gathered(modify=True), torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.lerp_(q, 0.5)
    mixed = Blocks()
    with torch.no_grad():
        for p, q in zip(mixed.parameters(), other.parameters(), strict=True):
            p.lerp_(q, 0.5)
    assert torch.equal(answer(model), answer(mixed))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        optimizer.set_full_param(p, q.detach())
        assert torch.equal(optimizer.full_param(p), q)
    assert torch.equal(answer(model), answer(other))
    with optimizer.gathered(modify=True):
        model.load_state_dict(mixed.state_dict())
    assert torch.equal(answer(model), answer(mixed))
    with optimizer.gathered([model.last.weight], modify=True), torch.no_grad():
        model.last.weight.copy_(other.last.weight)
    assert torch.equal(optimizer.full_param(model.last.weight), other.last.weight)
    optimizer.close()


def test_parameters_move_and_come_back() -> None:
    model = Blocks()
    before = answer(model)
    optimizer = prepared(model, params="device", nvme_path=disks())
    at_home = optimizer.locations().bytes(kind="param", tier="device")
    for tier in ("cpu", "nvme"):
        optimizer.offload_states({"param"}, to=tier)
        report = optimizer.locations()
        assert report.bytes(kind="param", tier=tier) == report.bytes(kind="param") == at_home
        assert torch.equal(answer(model), before)
    optimizer.offload_states({"grad", "master", "optimizer"})  # there is none
    optimizer.reload_states(non_blocking=True)
    assert torch.equal(answer(model), before)
    optimizer.synchronize()
    assert optimizer.locations().bytes(kind="param", tier="device") == at_home
    optimizer.close()


def test_evaluation_inference_mode_and_compiled_blocks() -> None:
    model = Blocks()
    before = answer(model)
    optimizer = prepared(model)
    model.eval()
    with torch.inference_mode():
        assert torch.equal(model(INPUTS), before)
    assert torch.equal(answer(model), before)
    for block in model.blocks:
        block.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(answer(model), before)
    assert torch.equal(torch.compile(model, backend="eager")(INPUTS), before)
    optimizer.close()


def test_codes_are_not_cast_whatever_they_require() -> None:
    """All parameters count as frozen: 8-bit floats, and what stands beside them, as they are."""
    torch.manual_seed(0)
    linear = Float8Linear(8, 4)
    linear.requires_grad_(True)
    before = linear(INPUTS.bfloat16())
    optimizer = prepared(linear, precision="bf16")
    assert linear.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(linear(INPUTS.bfloat16()), before)
    optimizer.close()


# Files


def test_a_model_larger_than_host_memory_comes_from_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    model = Blocks()
    save_model(model, str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        other = Blocks(seed=None)
    parameters = list(other.parameters())
    optimizer = prepared(other, params="nvme", weights=tmp_path / "model.safetensors")
    assert [id(p) for p in other.parameters()] == [id(p) for p in parameters]
    assert torch.equal(answer(other), answer(model))
    assert optimizer.locations().bytes(kind="param", tier="cpu") == 0
    optimizer.close()


@pytest.mark.parametrize(
    ("precision", "master"),
    [("fp32", "remainder"), ("bf16", "remainder"), ("bf16", "fp32")],
)
def test_it_takes_up_the_parameters_of_a_training_checkpoint(precision: str, master: str, tmp_path: Path) -> None:
    policy = Blocks()
    trains = trained(policy, precision=precision, master=master)
    trains.save(tmp_path / "trained", extra={"step": 2})
    reference = Blocks(seed=1)
    optimizer = prepared(reference, precision=precision, params="nvme")
    states = torch.get_rng_state()
    assert optimizer.load(tmp_path / "trained") == {"step": 2}
    assert torch.equal(torch.get_rng_state(), states), "the run's random numbers are not this model's"
    assert torch.equal(answer(reference), answer(policy))
    # Saved again there are parameters alone, for another one, or for export.
    optimizer.save(tmp_path / "parameters")
    third = Blocks(seed=2)
    again = prepared(third, precision=precision)
    again.load(tmp_path / "parameters")
    assert torch.equal(answer(third), answer(policy))
    penstock.export(tmp_path / "parameters", tmp_path / "exported", dtype=precision)
    fourth = Blocks(seed=3)
    exported = prepared(fourth, precision=precision, weights=tmp_path / "exported")
    assert torch.equal(answer(fourth), answer(policy))
    with pytest.raises(penstock.CheckpointError, match=r"'groups' are none.*penstock.export\(\)"):
        trains.load(tmp_path / "parameters")
    assert torch.equal(answer(policy), answer(reference)), "nothing has changed"
    for handle in (trains, optimizer, again, exported):
        handle.close()


def test_a_tie_of_rounding_is_taken_as_it_was_computed_with(tmp_path: Path) -> None:
    """The master is rounded half away to the parameter, a float half to even."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    _, trains = engines.prepared(model, precision="bf16")
    trains.set_full_param(model.weight, torch.tensor([[1 + 2**-8]]))
    trains.save(tmp_path / "trained")
    optimizer = prepared(other, precision="bf16")
    optimizer.load(tmp_path / "trained")
    with trains.gathered(), optimizer.gathered():
        assert torch.equal(model.weight, other.weight)
    for handle in (trains, optimizer):
        handle.close()


# Ranks


def apart(rank: int) -> str:
    """One rank trains, and the other one does not."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters()) if rank else None
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.prepare(model, optimizer)
    return str(caught.value)


def test_ranks_agree_on_whether_they_train() -> None:
    assert all("optimizer" in said and "none" in said for said in run_ranks(apart, 2))
