"""Errors say what, which, and what to do next; and a request that is refused has changed nothing."""

import copy
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
import penstock.construct
import penstock.preparing
from penstock import ConfigError, EngineError, MemoryBudgetError, Options, Placement, checks
from penstock.tiers.host import DeviceTier, HostTier
from tests.lib.engines import loss_of, prepared, squared
from tests.lib.models import Blocks
from tests.lib.refusals import METHODS, Refusal, call, refused, refused_unchanged, rows
from tests.lib.streams import inline, simulated


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **options)


def with_(**arguments: Any) -> Callable[[nn.Module], Any]:
    """`prepare` with these arguments and an AdamW of the model's parameters."""
    return lambda model: penstock.prepare(model, adamw(model), **arguments)


def by(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """`prepare` with the optimizer that `make` returns."""
    return lambda model: penstock.prepare(model, make(model))


def stranger() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, 5))


# Before prepare


def mixed() -> nn.Module:
    """A trained embedding in bf16 before layers in fp32."""
    return nn.Sequential(nn.Embedding(8, 4, dtype=torch.bfloat16), nn.Linear(4, 4), nn.Linear(4, 4))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Blocks(seed=None)


def changed(change: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """The choice of a model on which something was done before."""

    def make() -> nn.Module:
        model = Blocks()
        change(model)
        return model

    return {"model": make}


def frozen_up(model: Any) -> None:
    for block in model.blocks:
        block.up.requires_grad_(False)


#: What is done with a model; `how` makes another one.
REFUSED = {
    # Values that do not exist
    "stage": Refusal(with_(stage=4), "stage=4: use 0 (nothing sharded), 1, 2 or 3."),
    "stage True": Refusal(with_(stage=True), "stage=True: use 0"),
    "precision": Refusal(with_(precision="int8"), "precision='int8': use one of 'fp32', 'bf16', 'fp16'."),
    "overlap": Refusal(with_(overlap="always"), "overlap='always': use one of 'none', 'forward', 'backward', 'auto'."),
    "master": Refusal(with_(master="bf16"), "master='bf16': use one of 'remainder', 'fp32', 'none'."),
    "placement": Refusal(with_(placement="cpu"), "placement='cpu': give a penstock.Placement, 'auto' or None."),
    "options": Refusal(with_(options={"tile_bytes": 1}), "options={'tile_bytes': 1}: give a penstock.Options."),
    "reduce_dtype": Refusal(
        with_(reduce_dtype=torch.int32),
        "reduce_dtype=torch.int32: use torch.float32, torch.bfloat16, torch.float16 or None.",
    ),
    "max_grad_norm 0": Refusal(
        with_(max_grad_norm=0), "max_grad_norm=0: use a finite number above 0, or None not to clip."
    ),
    "max_grad_norm inf": Refusal(with_(max_grad_norm=float("inf")), "max_grad_norm=inf: use a finite number above 0"),
    "units that match nothing": Refusal(
        with_(units=[nn.LSTM, nn.GRU]),
        "units: no module of Blocks matches LSTM, GRU. Use units=None to find blocks.",
    ),
    "a predicate that matches nothing": Refusal(
        with_(units=lambda name, module: False),
        "units: no module of Blocks matches the predicate. Use units=None to find blocks.",
    ),
    "units that are no classes": Refusal(
        with_(units=["Block"]),
        "units=['Block']: give module classes, a predicate on (name, module), or None.",
    ),
    "nvme without a folder": Refusal(
        with_(placement=Placement(optimizer="nvme")),
        "optimizer='nvme' needs a folder for its files. Name one on a fast disk: Placement(nvme_path=...).",
    ),
    # Not available
    # Optimizers
    "no rule": Refusal(
        by(lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1)),
        "torch.optim.lbfgs.LBFGS is not supported",
    ),
    "an option of the second group": Refusal(
        by(
            lambda m: torch.optim.Adam(
                [{"params": m.first.parameters()}, {"params": m.last.parameters(), "capturable": True}]
            )
        ),
        "Parameter group 1: capturable=True is not supported",
    ),
    "strangers": Refusal(
        by(lambda m: torch.optim.AdamW([{"params": m.parameters()}, {"params": [stranger()]}])),
        "1 of the optimizer's 17 parameters are not the model's; the first has shape (3, 5) in group 1. Build the "
        "optimizer from model.parameters() after the model has its final modules.",
    ),
    # Models
    "no model": Refusal(lambda m: penstock.prepare(m.forward, adamw(m)), "model=method: give a torch.nn.Module."),
    "no parameters": Refusal(lambda m: penstock.prepare(nn.ReLU(), adamw(m)), "ReLU has no parameters."),
    "a model on the meta device": Refusal(
        by(adamw),
        "'first.weight' (16, 8) is on the meta device. Say where its values come from: prepare(weights=",
        how={"model": on_meta},
    ),
    "a buffer on the meta device": Refusal(
        by(adamw),
        "'table' (3,) is on the meta device",
        how=changed(lambda m: m.register_buffer("table", torch.empty(3, device="meta"))),
    ),
    "several dtypes that nobody said are cast": Refusal(
        by(adamw),
        "1 of bfloat16 (such as '0.weight'), 4 of float32 (such as '1.weight'). Use prepare(precision=",
        how={"model": mixed},
    ),
    "a lazy parameter": Refusal(
        by(lambda m: torch.optim.AdamW(m[0].parameters())),
        "'1.weight' has no shape yet. Run the model once first, so that lazy modules",
        how={"model": lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))},
    ),
    "a complex parameter": Refusal(
        by(adamw),
        "Parameter 'phase' is torch.complex64. Store its real and imaginary parts apart.",
        how=changed(lambda m: m.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))),
    ),
    "a gradient that is there": Refusal(
        by(adamw),
        "Parameter 'first.weight' has a gradient already. Call zero_grad() or step() before prepare().",
        how=changed(lambda m: loss_of(m).backward()),
    ),
    # In bf16, each parameter on 256 elements: root 4 * 256, a block 4 * 256 + 2 * 512.
    "live_bytes with frozen parameters": Refusal(
        with_(options=Options(live_bytes=6143)),
        "Options(live_bytes=6,143) is 1 bytes too small: unit 'blocks.1.frozen' and the units around it "
        "take 6,144 bytes when gathered. Raise live_bytes, or choose smaller units.",
        MemoryBudgetError,
        changed(frozen_up),
    ),
}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that `prepare` would change."""
    there = {name: p for name, p in model.named_parameters() if not p.is_meta and not nn.parameter.is_lazy(p)}
    return {
        "values": {n: (id(p), p.data_ptr(), p.dtype, p.detach().clone()) for n, p in there.items()},
        "gradients": {n: p.grad for n, p in there.items() if p.grad is not None}.keys(),
        "buffers": {n: id(b) for n, b in model.named_buffers()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "gradient hooks": [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        "attributes": sorted(model.__dict__),
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = state_of(model)
    for name, (*identity, value) in before.pop("values").items():
        *identity_now, value_now = after["values"][name]
        assert identity_now == identity, name
        assert value_now.equal(value) or value.isnan().any(), name
    del after["values"]
    assert after == before


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tier, no update pool and no thread is left of what was refused."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was allocated before the error")

    monkeypatch.setattr(penstock.construct, "Pool", forbidden)
    for tier in (DeviceTier, HostTier):
        monkeypatch.setattr(tier, "reserve", forbidden)
    # What an accelerator has: streams with threads of their own.
    monkeypatch.setattr(penstock.preparing, "streams_for", lambda device, **_: simulated())
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def refused_untouched(row: Refusal, model: nn.Module) -> None:
    """Assert that `prepare` refuses a row, and leaves the model as it was."""
    before = state_of(model)
    refused(row, model)
    assert_untouched(model, before)


@rows(REFUSED)
@pytest.mark.usefixtures("nothing_allocated")
def test_prepare_refuses(row):
    refused_untouched(row, row.how["model"]() if row.how else Blocks())


def frozen_below(adapter: torch.dtype) -> nn.Module:
    """A frozen base in bf16, and what is trained on top of it, as peft makes it."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=adapter))
    model[0].requires_grad_(False)
    return model


TOLD = "prepare() was told no precision, and computes {} in bf16; trained ones have fp32 masters. precision='fp32'"
CASTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "fp32": (lambda: nn.Linear(4, 4), {}, TOLD.format("2 of float32 (such as 'weight')")),
    "fp64": (lambda: nn.Linear(4, 4).double(), {}, TOLD.format("2 of float64 (such as 'weight')")),
    "fp32 on the meta device": (
        lambda: nn.Linear(4, 4, device="meta"),
        {"weights": "init"},
        TOLD.format("2 of float32 (such as 'weight')"),
    ),
    "fp32, and bf16 is said": (lambda: nn.Linear(4, 4), {"precision": "bf16"}, ""),
    "bf16": (lambda: nn.Linear(4, 4).bfloat16(), {}, ""),
    "bf16, and fp32 is said": (lambda: nn.Linear(4, 4).bfloat16(), {"precision": "fp32"}, ""),
    "both, and bf16 is said": (mixed, {"precision": "bf16"}, ""),
    "both, and fp32 is said": (
        mixed,
        {"precision": "fp32"},
        "precision='fp32' is that of all parameters: prepare() computes 1 of bfloat16 (such as '0.weight') in fp32",
    ),
    "adapters in fp32": (lambda: frozen_below(torch.float32), {}, TOLD.format("2 of float32 (such as '1.weight')")),
    "adapters in bf16": (lambda: frozen_below(torch.bfloat16), {}, ""),
    "batch norms in fp32": (lambda: nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.BatchNorm1d(4)), {}, ""),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_that_nobody_asked_for_is_a_line_in_the_log(name, caplog):
    make, arguments, line = CASTS[name]
    model = make()
    with caplog.at_level("INFO", logger="penstock"):
        penstock.prepare(model, adamw(model), **arguments).close()
    said = [record.getMessage() for record in caplog.records if "precision" in record.getMessage()]
    assert [text[: len(line)] for text in said] == [line] * bool(line)


class Borrower(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


OTHERS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "the same": (lambda m: m, "This Blocks is prepared already: parameter 'first.weight' "),
    "a block": (lambda m: m.blocks[0], "This Block is prepared already: parameter '"),
    "a layer of a block": (lambda m: m.blocks[0].up, "This Linear is prepared already: parameter 'weight' "),
    "a parent": (lambda m: nn.Sequential(m, nn.ReLU()), "Sequential is prepared already: parameter '0.first.weight' "),
    "another holder of a block": (lambda m: nn.Sequential(m.blocks[1]), "is prepared already: parameter '0."),
    "another holder of a parameter": (
        lambda m: Borrower(m.first.weight),
        "This Borrower is prepared already: parameter 'weight' ",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_is_prepared_once(name):
    other_of, text = OTHERS[name]
    model = Blocks()
    optimizer = penstock.prepare(model, adamw(model))
    other = other_of(model)
    refused_untouched(Refusal(lambda _: penstock.prepare(other, adamw(other)), text), model)
    optimizer.close()
    penstock.prepare(other, adamw(other)).close()


@pytest.mark.usefixtures("nothing_allocated")
def test_the_launcher_and_the_process_group_agree(monkeypatch):
    def refused_now(text: str, **arguments: Any) -> None:
        refused_untouched(Refusal(with_(**arguments), text), Blocks())

    monkeypatch.setenv("WORLD_SIZE", "2")
    refused_now(
        "WORLD_SIZE=2, but torch.distributed is not initialised. Call torch.distributed.init_process_group() before "
        "prepare(), with the launcher's world size, or unset WORLD_SIZE."
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    for said in ("2", "two"):
        monkeypatch.setenv("WORLD_SIZE", said)
        refused_now(f"WORLD_SIZE={said}, but the process group has 4 ranks.")
    mesh: Any = SimpleNamespace(ndim=3, mesh_dim_names=("a", "tp", "b"), mesh=torch.arange(8).view(2, 2, 2))
    refused_now(
        "mesh (a 2 x tp 2 x b 2; ranks [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]): it does not say what 'a', 'b' is. Name "
        "each dimension dp_replicate, dp_shard, cp, tp or ep; one or two without such names are (shard) and "
        "(replicate, shard).",
        mesh=mesh,
    )


@pytest.mark.usefixtures("nothing_allocated")
def test_an_nvme_path_that_is_not_there_leaves_the_model_alone(tmp_path):
    there = Placement(optimizer="nvme", nvme_path=[tmp_path, tmp_path / "not there"])
    refused_untouched(Refusal(with_(placement=there), "not there' cannot be found", penstock.NvmeError), Blocks())
    assert list(tmp_path.iterdir()) == []


def test_pinned_memory_has_a_budget_of_its_own():
    with pytest.raises(MemoryBudgetError) as caught:
        checks.check_pinned_memory(500_000, 4096, torch.device("cuda"), Options(pinned_bytes=30_000, tile_bytes=4096))
    assert str(caught.value) == (
        "The buffers through which host memory and the device exchange tiles take 36,864 bytes of pinned memory, 6,864 "
        "more than Options(pinned_bytes=30,000). Raise it, choose a smaller tile_bytes, or keep nothing on the cpu "
        "tier."
    )
    checks.check_pinned_memory(500_000, 4096, torch.device("cuda"), Options(pinned_bytes=36_864, tile_bytes=4096))
    checks.check_pinned_memory(30_000, 4096, torch.device("cuda"), Options(pinned_bytes=30_000, tile_bytes=4096))
    checks.check_pinned_memory(500_000, 4096, torch.device("cpu"), Options(pinned_bytes=30_000, tile_bytes=4096))


# After prepare


def test_after_close():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(EngineError, RuntimeError)
    _, optimizer = prepared(Blocks)
    optimizer.close()
    for verb in sorted({*METHODS} - {"close"}):
        with pytest.raises(EngineError) as caught:
            call(optimizer, verb)
        assert str(caught.value) == f"{verb}() was called after close(). Prepare the model again to go on."


def step_inside(register: str) -> Callable[..., None]:
    """A step in a hook of a block; what it raises there is raised when the backward is over."""

    def do(model: Any, optimizer: penstock.Optimizer) -> None:
        caught = []

        def step(*_: Any) -> None:
            with pytest.raises(EngineError) as error:
                optimizer.step()
            caught.append(error.value)

        hook = getattr(model.blocks[0], register)(step)
        optimizer.backward(loss_of(model))
        hook.remove()
        optimizer.zero_grad()
        (error,) = caught
        raise error

    return do


def inside_gathered(model: Any, optimizer: penstock.Optimizer) -> None:
    with optimizer.gathered():
        optimizer.step()


def with_amsgrad(model: Any, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(loss_of(model))
    optimizer.param_groups[0]["amsgrad"] = True
    try:
        optimizer.step()
    finally:
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.zero_grad()


def with_an_unfrozen_bias(model: Any, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(loss_of(model))
    model.blocks[0].up.bias.requires_grad_(True)
    try:
        optimizer.step()
    finally:
        model.blocks[0].up.bias.requires_grad_(False)
        optimizer.zero_grad()


def with_infinite_inputs(model: Any, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(squared(model(torch.full((2, 8), float("inf")))))
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()


def loading(change: Callable[[dict[str, Any]], Any]) -> Callable[..., None]:
    """Load the optimizer's own state dict after some change."""

    def do(model: Any, optimizer: penstock.Optimizer) -> None:
        changed = copy.deepcopy(optimizer.state_dict())
        change(changed)
        optimizer.load_state_dict(changed)

    return do


IN_USE = "step() was called inside a forward or a backward. Call it after backward has returned."
STRANGE = "This is no parameter of the prepared model: Parameter (3, 5). Pass one of model.parameters()."
FROZEN = "Parameter 'first.weight' is frozen: it has no gradient and no optimizer"
SHAPE = "The value for 'last.weight' has shape (16, 4); the parameter has ("
FIRST_FROZEN = changed(lambda m: m.first.requires_grad_(False))
WRONG = torch.zeros(16, 4)
#: What is done with a model and its handle.
HANDLE_REFUSED = {
    "step in a forward": Refusal(step_inside("register_forward_hook"), IN_USE, EngineError),
    "step in a backward": Refusal(step_inside("register_full_backward_hook"), IN_USE, EngineError),
    "step in gathered": Refusal(
        inside_gathered, "step() was called inside gathered(). Leave the block first: step changes what", EngineError
    ),
    "a closure that is none": Refusal(
        lambda m, o: o.step(torch.ones(())),
        "step(Tensor): give a function that runs zero_grad, forward and backward, or call backward first, then step().",
    ),
    "a group of a stranger": Refusal(
        lambda m, o: o.add_param_group({"params": [stranger()]}),
        "add_param_group: a parameter of shape (3, 5) is not the model's. Put its module into the model first.",
    ),
    "to read a stranger": Refusal(lambda m, o: o.full_param(stranger()), STRANGE),
    "gradient of a frozen one": Refusal(lambda m, o: o.full_grad(m.first.weight), FROZEN, how=FIRST_FROZEN),
    "state of a frozen one": Refusal(lambda m, o: o.full_state(m.first.weight, "exp_avg"), FROZEN, how=FIRST_FROZEN),
    "no such state": Refusal(
        lambda m, o: o.full_state(m.last.bias, "momentum_buffer"),
        "There is no optimizer state 'momentum_buffer'. This rule has 'exp_avg', 'exp_avg_sq', 'step'.",
    ),
    "shape of a parameter": Refusal(lambda m, o: o.set_full_param(m.last.weight, WRONG), SHAPE),
    "a group that no rule honours": Refusal(with_amsgrad, "amsgrad was turned on after prepare"),
    "a parameter unfrozen after prepare": Refusal(
        with_an_unfrozen_bias,
        "Parameter 'blocks.0.up.bias' was frozen when the model was prepared, so it has no optimizer state, and "
        "requires a gradient now. Have it trained with optimizer.add_param_group({'params': [...]}) before its "
        "forward. What is to be frozen for a while only is frozen after prepare(), which keeps its state.",
        EngineError,
        changed(lambda m: m.blocks[0].requires_grad_(False)),
    ),
    "a norm that is not finite": Refusal(
        with_infinite_inputs,
        "The norm of the gradient is not finite; nothing was updated. Not finite: of 'first.weight', 'first.bias', "
        "'last.weight', 'last.bias', 'blocks.0.norm.weight', 'blocks.0.norm.bias', 'blocks.0.up.weight', "
        "'blocks.0.up.bias' and 8 more. Look for an overflow in the loss or in the model "
        "(torch.autograd.detect_anomaly() finds the operation), and for a bad batch; or use "
        "Options(on_nonfinite='skip').",
        EngineError,
        {"on_nonfinite": "raise"},
    ),
    "to load a state of another shape": Refusal(
        loading(lambda state: state["state"][2].update(exp_avg=torch.zeros(5))), "has shape (5,); the parameter has ("
    ),
}


@rows(HANDLE_REFUSED)
def test_the_handle_refuses(row):
    refused_unchanged(row, model=Blocks, params="cpu", optimizer="cpu", streams=inline)


def test_sparse_gradients_are_refused():
    model, optimizer = prepared(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    with pytest.raises(EngineError) as caught:
        optimizer.backward(loss_of(model))
    assert str(caught.value) == "Parameter '0.weight' got a sparse gradient. Build its embedding with sparse=False."
