"""What one rank refuses, all refuse, by name; and ranks that differ say in what, before anything has changed."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.streams import FailedEvent
from tests.support import inline, prepare_on, run_ranks, separate

WIDTH = 16


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, width if i == 0 else WIDTH) for i in range(depth))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.frozen(x) * self.scale


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, WIDTH)).float().square().sum()


def prepared(**rest: Any) -> tuple[Net, penstock.Optimizer]:
    model = Net()
    rest.setdefault("precision", "fp32")
    return model, prepare_on(inline(), model, torch.optim.AdamW(model.parameters(), lr=1e-2), **rest)


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def everything(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [optimizer.full_param(p) for p in model.parameters()] + [
        optimizer.full_state(p, name) for p in parameters for name in ("exp_avg", "exp_avg_sq", "step")
    ]


# Refusals


def refusals(rank: int, folder: str) -> dict[str, str]:
    """Rank 1 alone refuses; both must raise, and go on afterwards."""
    model, optimizer = prepared()
    optimizer.backward(loss_of(model))
    optimizer.step()
    before = everything(model, optimizer)
    weight = model.blocks[0].weight
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    found: dict[str, str] = {}

    def only_second(name: str, set_up: Callable[[], object], take_back: Callable[[], object], verb: Any) -> None:
        if rank == 1:
            set_up()
        found[name] = said_by(verb)
        if rank == 1:
            take_back()

    def unfreeze(value: bool) -> None:
        model.frozen.weight.requires_grad_(value)

    def set_grad(value: Tensor | None) -> None:
        weight.grad = value

    def fail(value: bool) -> None:
        optimizer._engine.hooks.backward.has_failed = value

    def hold(count: int) -> None:
        for unit in optimizer._engine.context.units:
            unit.holding.blocks += count

    step, clip = optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)
    only_second("a frozen parameter", lambda: unfreeze(True), lambda: unfreeze(False), step)
    kept, sparse = weight.grad, torch.eye(WIDTH).to_sparse()
    only_second("a gradient by hand", lambda: set_grad(sparse), lambda: set_grad(kept), step)
    only_second("a clip", lambda: set_grad(sparse), lambda: set_grad(kept), clip)
    only_second("a backward that failed", lambda: fail(True), lambda: fail(False), step)
    for name in ("step", "save", "load", "set_full_param"):
        verb = {
            "step": step,
            "save": lambda: optimizer.save(Path(folder, "kept")),
            "load": lambda: optimizer.load(Path(folder, "kept")),
            "set_full_param": lambda: optimizer.set_full_param(weight, torch.zeros(WIDTH, WIDTH)),
        }[name]
        only_second(f"{name} inside gathered", lambda: hold(1), lambda: hold(-1), verb)
    stranger = nn.Parameter(torch.ones(2)) if rank == 1 else weight
    looks = {
        "full_param": lambda: optimizer.full_param(stranger),
        "full_grad": lambda: optimizer.full_grad(stranger),
        "full_state": lambda: optimizer.full_state(weight, "exp_avg" if rank == 0 else "momentum"),
        "set_full_grad": lambda: optimizer.set_full_grad(weight, torch.ones(WIDTH, WIDTH + rank)),
        "set_full_state": lambda: optimizer.set_full_state(weight, "exp_avg", torch.ones(WIDTH, WIDTH + rank)),
        "gathered": lambda: optimizer.gathered([stranger]).__enter__(),
        "load_state_dict": lambda: optimizer.load_state_dict(
            {"state": {0: {"momentum" if rank == 1 else "exp_avg": torch.ones(WIDTH, WIDTH)}}}
            | {"param_groups": optimizer.param_groups_of_torch}  # type: ignore[attr-defined]
        ),
    }
    optimizer.param_groups_of_torch = [  # type: ignore[attr-defined]
        {**{k: v for k, v in group.items() if k != "params"}, "params": list(range(len(group["params"])))}
        for group in optimizer.param_groups
    ]
    found |= {name: said_by(verb) for name, verb in looks.items()}

    after = everything(model, optimizer)
    found["unchanged"] = str(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    found["goes on"] = str(not optimizer.step().skipped)
    if rank == 1:
        optimizer._engine.context.units[0].params.note_write(FailedEvent(EngineError("an update failed")))
    found["close"] = said_by(optimizer.close)
    found["empty"] = str(all(p.numel() == 0 for p in model.parameters()))
    return found


def test_a_refusal_on_one_rank_is_a_refusal_on_all_and_training_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(refusals, 2, str(tmp_path))
    for found in (first, second):
        assert [found.pop(name) for name in ("unchanged", "goes on", "empty")] == ["True"] * 3
    assert second.pop("close") == "EngineError: an update failed"  # at once: it does not wait for the others
    assert first.pop("close").startswith("EngineError: Rank 0 of 2 hears nothing from another one in close()")
    expected = {
        "a frozen parameter": "EngineError: Parameter 'frozen.weight' was frozen when",
        "a gradient by hand": "ConfigError: The value for 'blocks.0.weight' is sparse",
        "a clip": "ConfigError: The value for 'blocks.0.weight' is sparse",
        "a backward that failed": "EngineError: The last backward did not finish",
        "step inside gathered": "EngineError: step() was called inside gathered()",
        "save inside gathered": "EngineError: save() was called inside gathered()",
        "load inside gathered": "EngineError: load() was called inside gathered()",
        "set_full_param inside gathered": "EngineError: Unit ",
        "full_param": "ConfigError: This is no parameter of the prepared model",
        "full_grad": "ConfigError: This is no parameter of the prepared model",
        "full_state": "ConfigError: There is no optimizer state 'momentum'",
        "set_full_grad": "ConfigError: The value for 'blocks.0.weight' has shape (16, 17)",
        "set_full_state": "ConfigError: The value for 'blocks.0.weight' has shape (16, 17)",
        "gathered": "ConfigError: This is no parameter of the prepared model",
        "load_state_dict": "ConfigError: There is no optimizer state 'momentum'",
    }
    assert second.keys() == expected.keys()
    for name, beginning in expected.items():
        assert second[name].startswith(beginning), (name, second[name])
        assert first[name].startswith("EngineError: Rank 1 of 2 failed in "), (name, first[name])
        assert second[name] in first[name], (name, first[name])


# Ranks that do different things


def differences(rank: int) -> dict[str, str]:
    model, optimizer = prepared()
    first, second = model.blocks[0].weight, model.blocks[1].weight
    optimizer.backward(loss_of(model))
    before = everything(model, optimizer)
    found = {}
    group = optimizer.param_groups[0]
    group["lr"] = 1e-2 if rank == 0 else 2e-2
    found["learning rates"] = said_by(optimizer.step)
    group["lr"] = torch.tensor(1e-2) if rank == 0 else 0.01
    group["betas"] = (0.9, 0.999 - rank / 10)
    found["betas"] = said_by(optimizer.step)
    group["betas"], group["lr"] = (0.9, 0.999), 1e-2
    found["clips"] = said_by(lambda: optimizer.clip_grad_norm_(1.0 + rank))
    found["parameters"] = said_by(lambda: optimizer.full_param([first, second][rank]))
    found["methods"] = said_by([optimizer.step, lambda: optimizer.full_grad(first)][rank])
    found["kinds"] = said_by(lambda: optimizer.offload_states({["grad", "master"][rank]}))
    same = all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))
    found["unchanged"] = str(same)
    found["goes on"] = str(not optimizer.step().skipped)
    optimizer.close()
    return found


def test_ranks_that_do_different_things_say_in_what_they_differ() -> None:
    first, second = run_ranks(differences, 2)
    assert first == second
    assert first.pop("unchanged") == first.pop("goes on") == "True"
    expected = {
        "learning rates": "Ranks differ in param_groups[0]['lr']: rank 0: 0.01; rank 1: 0.02. Nothing was changed",
        "betas": "Ranks differ in param_groups[0]['lr']: rank 0: 0.009999999776482582; rank 1: 0.01.",
        "clips": "Ranks differ in max_norm: rank 0: 1.0; rank 1: 2.0.",
        "parameters": 'Ranks differ in parameter: rank 0: "blocks.0.weight"; rank 1: "blocks.1.weight".',
        "methods": "Ranks are out of step: they have called different methods (rank 0: step(); rank 1: full_grad())",
        "kinds": 'Ranks differ in include: rank 0: ["grad"]; rank 1: ["master"].',
    }
    for name, beginning in expected.items():
        assert first[name].startswith(f"EngineError: {beginning}"), (name, first[name])


# Ranks that disagree at prepare


def disagreements(rank: int) -> dict[str, str]:
    second = rank == 1
    found = {}

    def attempt(name: str, make: Callable[[], nn.Module] = Net, **rest: Any) -> None:
        model = make()
        before = [p.detach().clone() for p in model.parameters()]
        chosen = rest.pop("owned", list(model.parameters()))
        if callable(chosen):
            chosen = chosen(model)
        given = rest.pop("optimizer", torch.optim.AdamW)(chosen, lr=1e-2)
        found[name] = said_by(lambda: penstock.prepare(model, given, **({"precision": "fp32"} | rest)))
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert same, name

    def frozen() -> nn.Module:
        model = Net()
        model.blocks[1].weight.requires_grad_(False)
        return model

    def with_buffer() -> nn.Module:
        model = Net()
        model.register_buffer("offset", torch.zeros(3))
        return model

    attempt("frozen sets", frozen if second else Net)
    attempt("shapes", (lambda: Net(width=8)) if second else Net)
    attempt("depths", (lambda: Net(depth=3)) if second else Net)
    attempt("dtypes", (lambda: Net().bfloat16()) if second else Net)
    attempt("buffers", with_buffer if second else Net)
    attempt("owners", owned=lambda model: list(model.parameters())[: 4 if second else 6])
    attempt("optimizers", optimizer=torch.optim.SGD if second else torch.optim.AdamW)
    attempt("precision", precision="bf16" if second else "fp32")
    attempt("stage", stage=0 if second else 3)
    attempt("units", units=(nn.Linear,) if second else None)
    attempt("placement", placement=penstock.Placement(grads="cpu" if second else "device"))
    attempt("an option", options=penstock.Options(on_nonfinite="raise" if second else "skip"))
    attempt("a refusal", placement=penstock.Placement(), precision="fp12" if second else "fp32")
    attempt("a budget", options=penstock.Options(live_bytes=1 if second else 1 << 20))
    model = Net()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = penstock.Options(update_threads=1 + rank, io_queue_depth=4 + rank)  # each rank's own
    optimizer = penstock.prepare(model, given, precision="fp32", options=options)
    optimizer.backward(loss_of(model))
    found["goes on"] = str(not optimizer.step().skipped)
    optimizer.close()
    return found


def test_ranks_that_disagree_at_prepare_name_the_first_difference() -> None:
    first, second = run_ranks(disagreements, 2)
    assert first.pop("goes on") == second.pop("goes on") == "True"
    for refused, own in (("a refusal", "ConfigError: precision='fp12'"), ("a budget", "MemoryBudgetError: Options(")):
        assert second.pop(refused).startswith(own)
        assert first.pop(refused).startswith("EngineError: Rank 1 of 2 failed in prepare(), and this one stops with it")
    assert first == second
    matrix = "torch.float32 (16, 16), in param group 0"

    def differ(what: str, first: str, second: str) -> str:
        return f"{what}: rank 0: {first}; rank 1: {second}. Nothing was changed: make it the same on every rank"

    def at(name: str, first: str, second: str) -> str:
        return differ(f"parameter '{name}'", f'"{first}"', f'"{second}"')

    expected = {
        "frozen sets": at("blocks.1.weight", matrix, f"{matrix}, frozen"),
        "shapes": at("blocks.0.weight", matrix, matrix.replace("16,", "8,")),
        "depths": differ("parameter 'blocks.2.weight'", "none", f'"{matrix}"'),
        "dtypes": at("blocks.0.weight", matrix, matrix.replace("float32", "bfloat16")),
        "buffers": differ("buffer 'offset'", "none", '"torch.float32 (3,)"'),
        "owners": at("frozen.weight", f"{matrix}, frozen", "torch.float32 (16, 16), in no param group, frozen"),
        "optimizers": differ("optimizer", '"adamw"', '"sgd"'),
        "precision": differ("compute_dtype", '"torch.float32"', '"torch.bfloat16"'),
        "stage": differ("stage", "3", "0"),
        "units": "unit 'root.frozen': rank 0: ",
        "placement": differ("Placement(grads=)", '"device"', '"cpu"'),
        "an option": differ("Options(on_nonfinite=)", '"skip"', '"raise"'),
    }
    assert first.keys() == expected.keys()
    for name, beginning in expected.items():
        assert first[name].startswith(f"ConfigError: Ranks differ in {beginning}"), (name, first[name])


# Silence


def silence(rank: int) -> list[str]:
    """Rank 1 does not come: rank 0 stops when its patience ends, at each place where it waits."""
    torch.distributed.barrier()  # both come to `prepare` at once, which is as impatient
    model, optimizer = prepared(options=penstock.Options(timeout_s=4.0))
    optimizer.backward(loss_of(model))
    said = []
    if rank == 0:
        said.append(said_by(optimizer.step))
        said.append(said_by(lambda: ControlGroup((0, 1), 0, timeout_s=0.1)))
    torch.distributed.barrier()
    return said


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_was_asked() -> None:
    (step, group), _ = run_ranks(silence, 2)
    assert step.startswith("EngineError: Rank 0 of 2 hears nothing from another one in step(), ")
    assert "Ranks wait for 4 s at most: Options(timeout_s=)." in step
    assert group.startswith("EngineError: Rank 0 of 2 waited 0.1 s in prepare() for rank 1: ended, or not there yet.")


# What ranks say


def one_micro_batch_is_not_finite(rank: int, which: int) -> list[Any]:
    """Of rank 1, of two that are added where the host alone reaches the sum."""
    model = Net()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    on_cpu = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    optimizer = prepare_on(separate(), model, stock, precision="fp32", placement=on_cpu, overlap="backward")
    before, found = everything(model, optimizer), []
    for bad in (which, None):  # and the flaw is forgotten with the gradient
        for micro in range(2):
            scale = math.inf if rank == 1 and micro == bad else 1.0
            with optimizer.no_sync() if micro == 0 else nullcontext():
                optimizer.backward(loss_of(model) * scale)
        found.append(optimizer.step().skipped)
        optimizer.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))
        found.append(same)
    optimizer.close()
    return found


@pytest.mark.parametrize("which", [0, 1])
def test_a_micro_batch_that_is_not_finite_on_one_rank_skips_the_step_on_all_before_any_update(which: int) -> None:
    assert run_ranks(one_micro_batch_is_not_finite, 2, which) == [[True, True, False, False]] * 2


def words(rank: int) -> dict[str, Any]:
    ranks = Collectives.from_mesh(None, sharded=True)
    control_group = ranks.control_group
    found: dict[str, Any] = {"collected": control_group.collect({"rank": rank, "text": "é" * (1 + 50 * rank)})}
    found["shared"] = control_group.share([rank, None, 1.5])
    with torch.device("meta"), torch.inference_mode(), pytest.raises(TypeError):  # in whatever state the thread is
        control_group.collect(object())
    with torch.device("meta"), torch.inference_mode():
        found["in a state"] = control_group.collect(rank)
        with control_group.together("anything()") as rank_checks:
            rank_checks["nothing"] = math.nan
    other = control_group.another(error=ConfigError)
    found["another"] = said_by(lambda: other.agree(ValueError("no") if rank == 1 else None) if rank == 0 else None)
    if rank == 1:
        with pytest.raises(ValueError, match="no"):
            other.agree(ValueError("no"))
    ranks.close()
    return found


def test_what_ranks_say_is_json() -> None:
    for found in run_ranks(words, 2):
        assert [said["rank"] for said in found["collected"]] == [0, 1]
        assert [len(said["text"]) for said in found["collected"]] == [1, 51]
        assert found["shared"] == [0, None, 1.5]
        assert found["in a state"] == [0, 1]
    assert json.loads(json.dumps(found)) == found


def test_one_rank_agrees_with_itself() -> None:
    control_group = ControlGroup()
    assert control_group.collect("all") == ["all"]
    with control_group.together("anything()"), nullcontext():
        pass
    with pytest.raises(EngineError, match="own"), control_group.together("anything()"):
        raise EngineError("own")
