"""Errors say what, which, and what to do next; and a request that is refused has changed nothing."""

import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
import penstock.construct
import penstock.preparing
from penstock import ConfigError, EngineError, MemoryBudgetError, Options, Placement, checks
from penstock.blueprint import draw_blueprint, request_for
from penstock.runtime.topology import Grid, Reach
from penstock.tiers.host import DeviceTier, HostTier
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, simulated
from tests.models.modules_rows import Stack, squared


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **options)


def with_(**arguments: Any) -> Callable[[nn.Module], Any]:
    """`prepare` with these arguments and an AdamW of the model's parameters."""
    return lambda model: penstock.prepare(model, adamw(model), **arguments)


def by(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """`prepare` with the optimizer that `make` returns."""
    return lambda model: penstock.prepare(model, make(model))


class OwnAdamW(torch.optim.AdamW):
    pass


def stranger() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, 5))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    # Values that do not exist
    "stage": (with_(stage=4), "stage=4: use 0 (nothing sharded), 1, 2 or 3."),
    "stage of another type": (with_(stage="3"), "stage='3': use 0 (nothing sharded), 1, 2 or 3."),
    "stage True": (with_(stage=True), "stage=True: use 0"),
    "precision": (with_(precision="int8"), "precision='int8': use one of 'fp32', 'bf16', 'fp16'."),
    "overlap": (with_(overlap="always"), "overlap='always': use one of 'none', 'forward', 'backward', 'auto'."),
    "master": (with_(master="bf16"), "master='bf16': use one of 'remainder', 'fp32', 'none'."),
    "placement": (with_(placement="cpu"), "placement='cpu': give a penstock.Placement, 'auto' or None."),
    "options": (with_(options={"tile_bytes": 1}), "options={'tile_bytes': 1}: give a penstock.Options."),
    "reduce_dtype": (
        with_(reduce_dtype=torch.int32),
        "reduce_dtype=torch.int32: use torch.float32, torch.bfloat16, torch.float16 or None.",
    ),
    "grad_accumulation_dtype": (
        with_(grad_accumulation_dtype="fp32"),
        "grad_accumulation_dtype='fp32': use torch.float",
    ),
    "max_grad_norm 0": (with_(max_grad_norm=0), "max_grad_norm=0: use a finite number above 0, or None not to clip."),
    "max_grad_norm below 0": (with_(max_grad_norm=-1.0), "max_grad_norm=-1.0: use a finite number above 0"),
    "max_grad_norm nan": (with_(max_grad_norm=float("nan")), "max_grad_norm=nan: use a finite number above 0"),
    "max_grad_norm inf": (with_(max_grad_norm=float("inf")), "max_grad_norm=inf: use a finite number above 0"),
    "max_grad_norm True": (with_(max_grad_norm=True), "max_grad_norm=True: use a finite number above 0"),
    "units that match nothing": (
        with_(units=[nn.LSTM, nn.GRU]),
        "units: no module of Stack matches LSTM, GRU. Use units=None to find blocks.",
    ),
    "a predicate that matches nothing": (
        with_(units=lambda name, module: False),
        "units: no module of Stack matches the predicate. Use units=None to find blocks.",
    ),
    "units that are no classes": (
        with_(units=["Block"]),
        "units=['Block']: give module classes, a predicate on (name, module), or None.",
    ),
    "units of another type": (with_(units=3), "units=3: give module classes, a predicate on (name, module), or None."),
    "nvme without a folder": (
        with_(placement=Placement(optimizer="nvme")),
        "optimizer='nvme' needs a folder for its files. Name one on a fast disk: Placement(nvme_path=...).",
    ),
    "disk without a folder": (
        with_(placement=Placement(params="disk", nvme_path=[])),
        "params='disk' needs a folder for its files.",
    ),
    "a fraction on nvme without a folder": (
        with_(placement=Placement(grads={"cpu": 0.9, "nvme": 0.1})),
        "grads={'cpu': 0.9, 'nvme': 0.1} needs a folder for its files. Name one on a fast disk:",
    ),
    # Not available
    "activations": (
        with_(placement=Placement(activations="nvme")),
        "activations='nvme' needs a folder for its files. Name one on a fast disk: Placement(nvme_path=...).",
    ),
    "auto": (
        with_(placement="auto"),
        "placement='auto' needs to know what it is for: give plan=, the file that penstock plan wrote, or batch=, a "
        "function that makes one micro-batch, to simulate it.",
    ),
    # Optimizers
    "no rule": (
        by(lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1)),
        "torch.optim.lbfgs.LBFGS is not supported",
    ),
    "a subclass": (by(lambda m: OwnAdamW(m.parameters())), "OwnAdamW is not supported. Use exactly one of"),
    "no optimizer but its name": (by(lambda m: "adamw"), "builtins.str is not supported. Use exactly one of"),
    "capturable": (
        by(lambda m: adamw(m, capturable=True)),
        "Parameter group 0: capturable=True is not supported by Penstock's adamw. Set capturable=False in",
    ),
    "an option of the second group": (
        by(
            lambda m: torch.optim.Adam(
                [{"params": m.first.parameters()}, {"params": m.last.parameters(), "capturable": True}]
            )
        ),
        "Parameter group 1: capturable=True is not supported",
    ),
    "strangers": (
        by(lambda m: torch.optim.AdamW([{"params": m.parameters()}, {"params": [stranger()]}])),
        "1 of the optimizer's 17 parameters are not the model's; the first has shape (3, 5) in group 1. Build the "
        "optimizer from model.parameters() after the model has its final modules.",
    ),
    # Models
    "no model": (lambda m: penstock.prepare(m.forward, adamw(m)), "model=method: give a torch.nn.Module."),
    "no parameters": (lambda m: penstock.prepare(nn.ReLU(), adamw(m)), "ReLU has no parameters."),
}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that `prepare` would change."""
    return {
        "values": {n: (id(p), p.data_ptr(), p.dtype, p.detach().clone()) for n, p in model.named_parameters()},
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


@pytest.mark.parametrize("name", REFUSED)
def test_prepare_refuses(name, nothing_allocated):
    call, text = REFUSED[name]
    model = Stack()
    before = state_of(model)
    with pytest.raises(ConfigError) as caught:
        call(model)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert_untouched(model, before)


def refused(call: Callable[[], Any], model: nn.Module, error: type[Exception] = ConfigError) -> str:
    before = state_of(model)
    with pytest.raises(error) as caught:
        call()
    assert_untouched(model, before)
    return str(caught.value)


def test_meta_tensors_are_refused(nothing_allocated):
    with torch.device("meta"):
        model = Stack()
    optimizer = adamw(model)
    with pytest.raises(ConfigError) as caught:
        penstock.prepare(model, optimizer)
    assert "'first.weight' (16, 8) is on the meta device. Say where its values come from: prepare(weights=" in str(
        caught.value
    )
    model = Stack()
    model.register_buffer("table", torch.empty(3, device="meta"))
    assert "'table' (3,) is on the meta device" in refused(lambda: penstock.prepare(model, adamw(model)), model)


def mixed() -> nn.Module:
    """A trained embedding in bf16 before layers in fp32."""
    return nn.Sequential(nn.Embedding(8, 4, dtype=torch.bfloat16), nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_model_that_is_trained_in_several_dtypes_is_not_cast_in_silence(nothing_allocated):
    model = mixed()
    text = refused(lambda: penstock.prepare(model, adamw(model)), model)
    assert "1 of bfloat16 (such as '0.weight'), 4 of float32 (such as '1.weight'). Use prepare(precision=" in text


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


def test_parameters_without_shape_are_refused(nothing_allocated):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    with pytest.raises(ConfigError) as caught:
        penstock.prepare(model, torch.optim.AdamW(model[0].parameters()))
    assert "'1.weight' has no shape yet. Run the model once first, so that lazy modules" in str(caught.value)


def test_complex_parameters_are_refused(nothing_allocated):
    model = Stack()
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    message = refused(lambda: penstock.prepare(model, adamw(model)), model)
    assert message == "Parameter 'phase' is torch.complex64. Store its real and imaginary parts apart."


@pytest.mark.parametrize("wrapper", [nn.DataParallel, "DistributedDataParallel"], ids=["DataParallel", "DDP"])
def test_wrappers_that_share_gradients_themselves_are_refused(wrapper, nothing_allocated):
    model = Stack()
    if wrapper is nn.DataParallel:
        wrapped = nn.DataParallel(model)
    else:  # without a process group
        wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
        nn.Module.__init__(wrapped)
        wrapped.module = model
    message = refused(lambda: penstock.prepare(wrapped, adamw(model)), model)
    assert message == (
        f"model is a {type(wrapped).__name__}, which combines gradients itself. Give the module that it wraps "
        "(model.module)."
    )


def test_gradients_that_are_there_are_refused(nothing_allocated):
    model = Stack()
    squared(model(torch.ones(1, 8))).backward()
    message = refused(lambda: penstock.prepare(model, adamw(model)), model)
    assert message == ("Parameter 'first.weight' has a gradient already. Call zero_grad() or step() before prepare().")
    assert model.first.weight.grad is not None


PREPARED_FIRST = {
    "the same": (lambda m: m, "This Stack is prepared already: parameter 'first.weight' "),
    "a block": (lambda m: m.blocks[0], "This Block is prepared already: parameter '"),
    "a layer of a block": (lambda m: m.blocks[0].up, "This Linear is prepared already: parameter 'weight' "),
    "a parent": (
        lambda m: nn.Sequential(m, nn.ReLU()),
        "Sequential is prepared already: parameter '0.first.weight' ",
    ),
    "another holder of a block": (lambda m: nn.Sequential(m.blocks[1]), "is prepared already: parameter '0."),
    "another holder of a parameter": (
        lambda m: Borrower(m.first.weight),
        "This Borrower is prepared already: parameter 'weight' ",
    ),
}


class Borrower(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@pytest.mark.parametrize("name", PREPARED_FIRST)
def test_a_model_is_prepared_once(name):
    other_of, text = PREPARED_FIRST[name]
    model = Stack()
    optimizer = penstock.prepare(model, adamw(model))
    other = other_of(model)
    message = refused(lambda: penstock.prepare(other, adamw(other)), model)
    assert text in message
    assert message.endswith("Call close() on its optimizer before preparing it again.")
    optimizer.close()
    penstock.prepare(other, adamw(other)).close()


def test_the_launcher_and_the_process_group_agree(monkeypatch, nothing_allocated):
    model = Stack()

    def message() -> str:
        return refused(lambda: penstock.prepare(model, adamw(model)), model)

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message() == (
        "WORLD_SIZE=2, but torch.distributed is not initialised. Call torch.distributed.init_process_group() before "
        "prepare(), with the launcher's world size, or unset WORLD_SIZE."
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    assert message().startswith("WORLD_SIZE=2, but the process group has 4 ranks.")
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert message().startswith("WORLD_SIZE=two, but the process group has 4 ranks.")
    mesh: Any = SimpleNamespace(ndim=3, mesh_dim_names=("a", "tp", "b"), mesh=torch.arange(8).view(2, 2, 2))
    assert refused(lambda: penstock.prepare(model, adamw(model), mesh=mesh), model) == (
        "mesh (a 2 x tp 2 x b 2; ranks [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]): it does not say what 'a', 'b' is. Name "
        "each dimension dp_replicate, dp_shard, cp, tp or ep; one or two without such names are (shard) and "
        "(replicate, shard)."
    )


def test_live_bytes_too_small(nothing_allocated):
    model = Stack()
    message = refused(
        lambda: penstock.prepare(model, adamw(model), options=Options(live_bytes=1000)), model, MemoryBudgetError
    )
    # In bf16, each parameter on 256 elements: root 4 * 256, a block 4 * 256 + 2 * 512.
    need = 2 * (1024 + 2048)
    assert message == (
        f"Options(live_bytes=1,000) is {need - 1000:,} bytes too small: unit 'blocks.1' and the units around it take "
        f"{need:,} bytes when gathered. Raise live_bytes, or choose smaller units."
    )


def test_what_is_gathered_with_a_unit_is_what_spans_it():
    model = nn.ModuleList([Stack(), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))])
    for linear in model[1]:
        linear.bias.requires_grad_(False)  # two units of one module that has none inside
    model[1][0].weight = model[1][2].weight  # a unit of two blocks
    units = draw_blueprint(model, adamw(model), request_for(model), Grid(), Reach(aliases_host=False)).units
    for needs in combinations([(plan.spec, 2**number) for number, plan in enumerate(units)], 2):
        around = [(sum(n for other, n in needs if other.spans(spec)), spec.name) for spec, _ in needs]
        assert checks.most_needed(needs) == max(around)


def test_live_bytes_counts_frozen_and_trained_parameters_of_a_block(nothing_allocated):
    model = Stack()
    for block in model.blocks:
        block.up.requires_grad_(False)
    with pytest.raises(MemoryBudgetError, match=r"take 6,144 bytes when gathered"):
        penstock.prepare(model, adamw(model), options=Options(live_bytes=6143))


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


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown tier": (
        lambda: Placement(params="vram"),
        "params='vram' is not a tier. Use one of 'device', 'cpu', 'nvme'.",
    ),
    "unknown tier of activations": (lambda: Placement(activations="ram"), "activations='ram' is not a tier."),
    "a tier that is no name": (lambda: Placement(grads=0), "grads=0 is not a tier."),
    "fractions": (
        lambda: Placement(optimizer={"cpu": 0.5, "device": 0.4}),
        "The fractions of optimizer={'cpu': 0.5, 'device': 0.4} sum to 0.9. Make them sum to 1.",
    ),
    "no fractions": (lambda: Placement(optimizer={}), "The fractions of optimizer={} sum to 0. Make them sum to 1."),
    "a fraction out of range": (
        lambda: Placement(optimizer={"cpu": 1.5, "device": -0.5}),
        "optimizer['cpu']=1.5 is not a fraction. Use a number from 0 to 1.",
    ),
    "a fraction that is no number": (
        lambda: Placement(params={"cpu": "all"}),
        "params['cpu']='all' is not a fraction.",
    ),
    "a tier twice": (
        lambda: Placement(params={"gpu": 0.5, "device": 0.5}),
        "params={'gpu': 0.5, 'device': 0.5} names the tier 'device' twice. Give each tier one fraction.",
    ),
    "twin_flow": (
        lambda: Placement.twin_flow(1.5),
        "twin_flow(ratio=1.5) is not a fraction. Use a number from 0 to 1.",
    ),
    "tile_bytes": (
        lambda: Options(tile_bytes=10),
        "Options(tile_bytes=10): use a whole number of bytes, 4096 or more.",
    ),
    "live_bytes": (lambda: Options(live_bytes=1e9), "Options(live_bytes=1000000000.0): use a whole number of bytes, 1"),
    "update_threads": (lambda: Options(update_threads=0), "Options(update_threads=0): use a whole number, 1 or more."),
    "on_nonfinite": (lambda: Options(on_nonfinite="warn"), "Options(on_nonfinite='warn'): use one of 'skip', 'raise'."),
    "initial_loss_scale": (lambda: Options(initial_loss_scale=0), "use a finite number above 0."),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_out_of_range(name):
    make, text = VALUES[name]
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


# After prepare


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def backward(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(squared(model(torch.ones(2, 8))))


AFTER_CLOSE: dict[str, Callable[[penstock.Optimizer, nn.Module], Any]] = {
    "backward": lambda o, m: o.backward(torch.ones((), requires_grad=True)),
    "step": lambda o, m: o.step(),
    "zero_grad": lambda o, m: o.zero_grad(),
    "no_sync": lambda o, m: o.no_sync(),
    "locations": lambda o, m: o.locations(),
    "gathered": lambda o, m: o.gathered(),
    "full_param": lambda o, m: o.full_param(m.first.weight),
    "full_grad": lambda o, m: o.full_grad(m.first.weight),
    "full_state": lambda o, m: o.full_state(m.first.weight, "exp_avg"),
    "set_full_param": lambda o, m: o.set_full_param(m.first.weight, torch.zeros(16, 8)),
    "set_full_grad": lambda o, m: o.set_full_grad(m.first.weight, torch.zeros(16, 8)),
    "set_full_state": lambda o, m: o.set_full_state(m.first.weight, "exp_avg", torch.zeros(16, 8)),
    "synchronize": lambda o, m: o.synchronize(),
    "state_dict": lambda o, m: o.state_dict(),
    "load_state_dict": lambda o, m: o.load_state_dict({"state": {}, "param_groups": []}),
}


def test_after_close(model):
    optimizer = penstock.prepare(model, adamw(model))
    optimizer.close()
    for verb, call in AFTER_CLOSE.items():
        with pytest.raises(EngineError) as caught:
            call(optimizer, model)
        assert str(caught.value) == f"{verb}() was called after close(). Prepare the model again to go on."
        assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("make_streams", [inline, simulated])
def test_step_where_it_must_not_be(model, make_streams):
    optimizer = prepare_on(make_streams(), model, adamw(model), placement=Placement(params="cpu"), precision="fp32")
    expected = "step() was called inside a forward or a backward. Call it after backward has returned."
    seen = []

    def step(*args: Any) -> None:
        with pytest.raises(EngineError) as caught:
            optimizer.step()
        seen.append(str(caught.value))

    for register in (model.blocks[0].register_forward_hook, model.blocks[0].register_full_backward_hook):
        hook = register(step)
        backward(model, optimizer)
        hook.remove()
        assert seen.pop() == expected
        assert not seen
    with optimizer.gathered(), pytest.raises(EngineError) as caught:
        optimizer.step()
    assert (
        str(caught.value) == "step() was called inside gathered(). Leave the block first: step changes what it shows."
    )
    with pytest.raises(ConfigError) as refused_closure:
        optimizer.step(torch.ones(()))
    assert str(refused_closure.value) == (
        "step(Tensor): give a function that runs zero_grad, forward and backward, or call backward first, then step()."
    )
    assert not optimizer.step().skipped
    optimizer.close()


def test_groups_are_of_the_model(model):
    optimizer = penstock.prepare(model, adamw(model))
    with pytest.raises(ConfigError) as caught:
        optimizer.add_param_group({"params": [stranger()]})
    assert str(caught.value) == (
        "add_param_group: a parameter of shape (3, 5) is not the model's. Put its module into the model first."
    )
    assert len(optimizer.param_groups) == 1
    optimizer.close()


def test_parameters_by_mistake(model):
    model.first.requires_grad_(False)
    optimizer = penstock.prepare(model, adamw(model))
    for call in (
        lambda: optimizer.full_param(stranger()),
        lambda: optimizer.set_full_param(stranger(), torch.zeros(3, 5)),
        lambda: optimizer.gathered([stranger()]).__enter__(),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == (
            "This is no parameter of the prepared model: Parameter (3, 5). Pass one of model.parameters()."
        )
    for call in (
        lambda: optimizer.full_grad(model.first.weight),
        lambda: optimizer.full_state(model.first.weight, "exp_avg"),
        lambda: optimizer.set_full_grad(model.first.weight, torch.zeros(16, 8)),
    ):
        with pytest.raises(
            ConfigError, match=r"^Parameter 'first.weight' is frozen: it has no gradient and no optimizer"
        ):
            call()
    with pytest.raises(ConfigError) as caught:
        optimizer.full_state(model.last.bias, "momentum_buffer")
    assert str(caught.value) == (
        "There is no optimizer state 'momentum_buffer'. This rule has 'exp_avg', 'exp_avg_sq', 'step'."
    )
    weight = model.last.weight
    before = {name: optimizer.full_state(weight, name) for name in ("exp_avg", "exp_avg_sq")}
    for call in (
        lambda: optimizer.set_full_param(weight, torch.zeros(16, 4)),
        lambda: optimizer.set_full_grad(weight, torch.zeros(16, 4)),
        lambda: optimizer.set_full_state(weight, "exp_avg", torch.zeros(16, 4)),
        lambda: optimizer.set_full_param(model.first.weight, torch.zeros(16, 4)),
    ):
        with pytest.raises(ConfigError, match=r"^The value for '\w+.weight' has shape \(16, 4\); the parameter has \("):
            call()
    assert not optimizer.full_grad(weight).any()
    assert all(torch.equal(optimizer.full_state(weight, name), value) for name, value in before.items())
    optimizer.close()


def test_a_parameter_unfrozen_after_prepare(model):
    model.blocks[0].requires_grad_(False)
    optimizer = penstock.prepare(model, adamw(model))
    backward(model, optimizer)
    model.blocks[0].up.bias.requires_grad_(True)
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "Parameter 'blocks.0.up.bias' was frozen when the model was prepared, so it has no optimizer state, and "
        "requires a gradient now. Have it trained with optimizer.add_param_group({'params': [...]}) before its "
        "forward. What is to be frozen for a while only is frozen after prepare(), which keeps its state."
    )
    model.blocks[0].up.bias.requires_grad_(False)
    assert not optimizer.step().skipped
    optimizer.close()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    optimizer = penstock.prepare(model, adamw(model), precision="fp32")
    with pytest.raises(EngineError) as caught:
        optimizer.backward(squared(model(torch.tensor([1, 2]))))
    assert str(caught.value) == "Parameter '0.weight' got a sparse gradient. Build its embedding with sparse=False."
    optimizer.close()


# Steps that change nothing


def everything(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    values = []
    for parameter in model.parameters():
        values.append(optimizer.full_param(parameter))
        values += [optimizer.full_state(parameter, name) for name in ("exp_avg", "exp_avg_sq", "step")]
    return values


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make_streams", [inline, simulated])
def test_steps_that_change_nothing(model, make_streams, precision):
    """Without a gradient; and with one that is not finite, in each of the ways that it can be."""
    optimizer = prepare_on(
        make_streams(),
        model,
        adamw(model),
        placement=Placement(params="cpu", optimizer="cpu"),
        precision=precision,
        max_grad_norm=1.0,
    )
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    before = everything(model, optimizer)

    result = optimizer.step()
    assert (result.grad_norm, result.skipped) == (0.0, False)
    assert all(map(torch.equal, everything(model, optimizer), before))

    for bad in (float("nan"), float("inf"), -float("inf")):
        backward(model, optimizer)
        gradient = optimizer.full_grad(model.blocks[1].up.weight)
        gradient[3, 3] = bad
        optimizer.set_full_grad(model.blocks[1].up.weight, gradient)
        result = optimizer.step()
        assert result.skipped
        assert result.grad_norm != result.grad_norm
        optimizer.zero_grad()
        assert all(map(torch.equal, everything(model, optimizer), before))
    optimizer.backward(squared(model(torch.full((2, 8), float("nan")))))
    assert optimizer.step().skipped
    optimizer.zero_grad()
    assert all(map(torch.equal, everything(model, optimizer), before))

    backward(model, optimizer)
    assert not optimizer.step().skipped
    assert not all(map(torch.equal, everything(model, optimizer), before))
    optimizer.close()


def test_a_norm_that_is_not_finite_can_raise(model):
    optimizer = penstock.prepare(model, adamw(model), precision="fp32", options=Options(on_nonfinite="raise"))
    before = everything(model, optimizer)
    optimizer.backward(squared(model(torch.full((2, 8), float("inf")))))
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "The norm of the gradient is not finite; nothing was updated. Not finite: of 'first.weight', 'first.bias', "
        "'last.weight', 'last.bias', 'blocks.0.norm.weight', 'blocks.0.norm.bias', 'blocks.0.up.weight', "
        "'blocks.0.up.bias' and 8 more. Look for an overflow in the loss or in the model "
        "(torch.autograd.detect_anomaly() finds the operation), and for a bad batch; or use "
        "Options(on_nonfinite='skip')."
    )
    optimizer.zero_grad()
    assert all(map(torch.equal, everything(model, optimizer), before))
    backward(model, optimizer)
    assert not optimizer.step().skipped
    optimizer.close()


def test_an_nvme_path_that_is_not_there_leaves_the_model_alone(tmp_path, nothing_allocated):
    model = Stack()
    there = Placement(optimizer="nvme", nvme_path=[tmp_path, tmp_path / "not there"])
    message = refused(lambda: penstock.prepare(model, adamw(model), placement=there), model, penstock.NvmeError)
    assert "not there' cannot be found" in message
    assert list(tmp_path.iterdir()) == []
