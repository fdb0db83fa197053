"""What people do with any model, done with a prepared one: it works, or an error names what to call instead."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.optim.swa_utils import AveragedModel

import penstock
from penstock.errors import ConfigError, EngineError
from tests.lib.engines import ON_CPU, adamw, assert_same_state, prepared, state
from tests.lib.models import seeded
from tests.lib.streams import inline, separate
from tests.models.modules_rows import Stack, squared

STREAMS = {"read in place": inline, "gathered": separate}


def stack(streams: Callable[[], Any], precision: str = "bf16", **how: Any) -> tuple[Stack, penstock.Optimizer]:
    return prepared(seeded(Stack), streams, precision=precision, **ON_CPU, **how)


def loss_of(model: nn.Module) -> Tensor:
    return squared(model(torch.linspace(-1, 1, 32).reshape(4, 8)))


def step(model: nn.Module, optimizer: penstock.Optimizer) -> float:
    loss = loss_of(model)
    optimizer.backward(loss)
    assert not optimizer.step().skipped
    optimizer.zero_grad()
    return loss.item()


def weight(model: Stack) -> nn.Parameter:
    return model.blocks[0].up.weight


STRANGERS: dict[str, Callable[[Stack], Any]] = {
    "blocks.0.up.weight": lambda m: setattr(m.blocks[0].up, "weight", nn.Parameter(torch.zeros(32, 16))),
    "last.weight": lambda m: setattr(m, "last", nn.Linear(16, 4)),
    "extra.weight": lambda m: m.add_module("extra", nn.Linear(2, 2)),
    "blocks.2.norm.weight": lambda m: m.blocks.append(copy.deepcopy(Stack().blocks[0])),
    "scale": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "parametrizations.weight.original0": lambda m: parametrizations.weight_norm(m.last),
}


@pytest.mark.parametrize(("name", "streams"), list(zip(STRANGERS, (inline, separate) * 3, strict=True)), ids=STRANGERS)
def test_a_parameter_that_was_put_into_the_model_is_named_at_the_next_forward(name: str, streams: Any) -> None:
    model, optimizer = stack(streams)
    step(model, optimizer)
    with optimizer.gathered():  # a parametrization reads what it is put on
        STRANGERS[name](model)
    for _ in range(2):
        with pytest.raises(penstock.EngineError, match=rf"'[\w.]*{name}'.*after prepare\(\).*set_full_param"):
            model(torch.rand(4, 8))


def test_a_parameter_that_was_replaced_after_backward_is_named_by_step() -> None:
    model, optimizer = stack(inline)
    optimizer.backward(squared(model(torch.rand(4, 8))))
    STRANGERS["last.weight"](model)
    with pytest.raises(penstock.EngineError, match=r"'last.weight'"):
        optimizer.step()


def test_modules_may_be_wrapped_moved_and_removed() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1  # a buffer that is replaced
            return self.inner(x)

    model, optimizer = stack(separate)
    model.blocks[0] = Wrapped(model.blocks[0])
    step(model, optimizer)
    model.blocks = nn.ModuleList([model.blocks[1], model.blocks[0]])
    step(model, optimizer)
    del model.blocks[0]
    step(model, optimizer)
    weight_of_last = model.last
    model.last = nn.Identity()
    step(model, optimizer)
    model.last = weight_of_last
    step(model, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_of_the_callers_choice_for_one_call_are_no_replacements(precision: str) -> None:
    model, optimizer = stack(inline, precision)
    x, dtype = torch.rand(4, 8), torch.bfloat16 if precision == "bf16" else torch.float32
    others = {n: nn.Parameter(torch.zeros_like(p)) for n, p in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, others, (x,)), torch.zeros(4, 4, dtype=dtype))
    step(model, optimizer)


def give_other_memory(model: Stack) -> None:
    weight(model).data = torch.zeros(32, 16)  # refused of a released one
    model(torch.rand(4, 8))


def test_values_under_a_parameter_are_taken_or_refused() -> None:
    for streams, precision in ((separate, "fp32"), (separate, "bf16"), (inline, "bf16")):
        model, optimizer = stack(streams, precision)
        step(model, optimizer)
        with pytest.raises(penstock.EngineError, match=r"'blocks.0.up.weight' \(32, 16\).*set_full_param"):
            give_other_memory(model)
    model, optimizer = stack(inline, "fp32")  # where what was given is all there is
    step(model, optimizer)
    weight(model).data = torch.zeros(32, 16)
    step(model, optimizer)
    assert weight(model).abs().max() < 0.1
    assert torch.equal(optimizer.full_param(weight(model)), weight(model))
    weight(model).data = torch.zeros(2, 2)
    with pytest.raises(penstock.EngineError, match=r"'blocks.0.up.weight' \(32, 16\).*\(2, 2\)"):
        model(torch.rand(4, 8))


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to(dtype)": lambda m: m.to(torch.float16),
    "to(meta)": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize(("name", "streams"), [(name, (inline, separate)[n % 2]) for n, name in enumerate(MOVES)])
def test_a_prepared_model_keeps_dtype_and_device(name: str, streams: Any) -> None:
    model, optimizer = stack(streams)
    model.register_buffer("offset", torch.ones(2))
    with pytest.raises(penstock.EngineError, match=r"torch.bfloat16 on cpu until close\(\).*precision="):
        MOVES[name](model)
    with pytest.raises(penstock.EngineError, match=r"torch.bfloat16 on cpu until close\(\)"):
        MOVES[name](nn.ModuleList([model]))
    with pytest.raises(penstock.EngineError, match=r"torch.bfloat16 on cpu until close\(\)"):
        MOVES[name](model.blocks[0])
    assert model.offset.dtype == torch.float32
    assert model.to("cpu") is model, "nothing to do"
    assert model.to("cpu:0") is model, "a copy for torch, and the same device"
    model.bfloat16()
    assert model.offset.dtype == torch.bfloat16, "buffers are the model's own"
    step(model, optimizer)
    optimizer.close()
    assert model.half().last.weight.dtype == torch.float16


def test_a_state_dict_is_loaded_into_what_is_there_or_refused() -> None:
    state = {name: torch.full_like(value, 0.5) for name, value in Stack().state_dict().items()}
    for streams, precision in ((separate, "fp32"), (separate, "bf16"), (inline, "bf16")):
        model, optimizer = stack(streams, precision)
        before = optimizer.full_param(weight(model))
        with pytest.raises(penstock.EngineError, match=r"load_state_dict\(\): parameter '.*gathered\(modify=True\)"):
            model.load_state_dict(state)
        for way in (model.load_state_dict, model.last.load_state_dict):
            with pytest.raises(penstock.EngineError, match=r"load_state_dict\(assign=True\).*gathered\(modify=True\)"):
                way(state | {"weight": state["last.weight"], "bias": state["last.bias"]}, strict=False, assign=True)
        assert torch.equal(optimizer.full_param(weight(model)), before)
        model.load_state_dict({"unknown": torch.ones(1)}, strict=False)
        with optimizer.gathered(modify=True):
            model.load_state_dict(state)
        assert torch.equal(optimizer.full_param(weight(model)), state["blocks.0.up.weight"])
        step(model, optimizer)
    model, optimizer = stack(inline, "fp32")
    model.load_state_dict(state)
    assert torch.equal(optimizer.full_param(weight(model)), state["blocks.0.up.weight"])
    step(model, optimizer)


# Stock idioms of training loops around a prepared model

METHODS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: o.step(),
    "zero_grad": lambda o: o.zero_grad(),
    "add_param_group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "state_dict": lambda o: o.state_dict(),
    "load_state_dict": lambda o: o.load_state_dict({"state": {}, "param_groups": []}),
    "register_step_pre_hook": lambda o: o.register_step_pre_hook(print),
    "register_step_post_hook": lambda o: o.register_step_post_hook(print),
}


def given_and_prepared(
    streams: Callable[[], Any] = separate, precision: str = "fp32"
) -> tuple[Stack, torch.optim.Optimizer, penstock.Optimizer]:
    """The model, the optimizer that was given, and the one that `prepare` returned."""
    model = seeded(Stack)
    given = adamw(model.parameters())
    return model, given, prepared(model, streams, stock=lambda _: given, precision=precision, **ON_CPU)[1]


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# The optimizer that was given


def test_the_given_optimizer_refuses_until_close() -> None:
    model, given, optimizer = given_and_prepared()
    loss_of(model).backward()
    for name, call in METHODS.items():
        text = rf"{name}\(\) of the AdamW that was given to prepare\(\).*prepare\(\) returned"
        with pytest.raises(EngineError, match=text):
            call(given)
    assert not optimizer.step().skipped
    optimizer.close()
    assert not vars(given).keys() & METHODS.keys()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    given.step()
    given.zero_grad()
    given.load_state_dict(given.state_dict())


# Wrappers


def test_distributed_data_parallel_around_a_prepared_model_or_a_part(group: None) -> None:
    for streams in (inline, separate):
        model, _, optimizer = given_and_prepared(streams)
        for part in (model, model.blocks[0]):
            with pytest.raises(EngineError, match=r"DistributedDataParallel was put around a prepared \w+.*as it is"):
                nn.parallel.DistributedDataParallel(part)
        step(model, optimizer)
        optimizer.close()
        nn.parallel.DistributedDataParallel(model)


def test_data_parallel_around_a_prepared_model() -> None:
    model, _, optimizer = given_and_prepared()
    with pytest.raises(EngineError, match=r"DataParallel was put around a prepared Stack"):
        model._replicate_for_data_parallel()  # which it calls where it has several devices
    step(nn.DataParallel(model), optimizer)  # on one, it is nothing
    optimizer.close()
    model._replicate_for_data_parallel()


def test_a_wrapped_model_is_not_prepared(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    wrapped = [nn.DataParallel(Stack()), nn.parallel.DistributedDataParallel(Stack()), fully_shard(Stack())]
    for model in [*wrapped, nn.Sequential(wrapped[1])]:
        kind = "FSDPModule" if model is wrapped[2] else "DataParallel"
        with pytest.raises(ConfigError, match=rf"is a \w*{kind}.*(model\.module|before it is sharded)"):
            penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Loss scaling by people


@pytest.mark.parametrize(("precision", "unscales"), [("fp32", False), ("bf16", True), ("fp16", False)])
def test_a_grad_scaler_is_named(precision: str, unscales: bool) -> None:
    model, _, optimizer = given_and_prepared(precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(EngineError, match="GradScaler"):  # noqa: PT012 - fp16 at backward, else where it is unscaled
        scaler.scale(loss_of(model)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    optimizer.zero_grad()
    step(model, optimizer)


def test_a_disabled_grad_scaler_passes_through() -> None:
    model, _, optimizer = given_and_prepared(precision="bf16")
    reference, _, other = given_and_prepared(precision="bf16")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step(reference, other)
    assert_same_state(state(model, optimizer), state(reference, other))


# Saving a model that is not there


def through_dcp(model: nn.Module, folder: Path) -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model)


def through_safetensors(model: nn.Module, folder: Path) -> Any:
    from safetensors.torch import save_model

    return save_model(model, str(folder / "model.safetensors"))


#: What needs the values of a whole model.
SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "model.state_dict()": lambda model, _: model.state_dict(),
    "submodule.state_dict()": lambda model, _: model.blocks[1].state_dict(),
    "state_dict(keep_vars=True)": lambda model, _: model.state_dict(keep_vars=True),
    "torch.save(model)": lambda model, folder: torch.save(model, folder / "model.pt"),
    "torch.save(model.state_dict())": lambda model, folder: torch.save(model.state_dict(), folder / "model.pt"),
    "torch.save(parameters)": lambda model, folder: torch.save(list(model.parameters()), folder / "model.pt"),
    "get_model_state_dict": through_dcp,
    "safetensors.save_model": through_safetensors,
}


@pytest.mark.parametrize("name", SAVES)
def test_a_model_is_not_saved_while_it_is_released(name: str, tmp_path: Path, group: None) -> None:
    model, _, optimizer = given_and_prepared()
    step(model, optimizer)
    with pytest.raises(EngineError, match=r"(inside|enter) optimizer\.gathered\(\).*(optimizer\.save|full_param)\(\)"):
        SAVES[name](model, tmp_path)
    if name != "safetensors.save_model":  # which wants each tensor in memory of its own
        with optimizer.gathered():
            SAVES[name](model, tmp_path)
    step(model, optimizer)


# Loops


def test_hooks_of_gradients_see_them_or_are_refused() -> None:
    model, _, optimizer = given_and_prepared()
    seen = []
    model.last.bias.register_hook(lambda grad: seen.append(grad.norm()))
    loss_of(model).backward()
    torch.testing.assert_close(model.last.bias.grad.norm(), seen[0])
    optimizer.step()
    for use in (lambda p: torch.optim.SGD([p], lr=0.1).step(), lambda p: p.grad.add_(1), lambda p: p.grad.add_(p.grad)):
        optimizer.zero_grad()
        handle = model.last.bias.register_post_accumulate_grad_hook(use)
        with pytest.raises(EngineError, match=r"on the \.grad of 'last.bias'.*full_grad"):
            optimizer.backward(loss_of(model))
        handle.remove()
    optimizer.zero_grad()
    handle = model.last.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    step(model, optimizer)
    assert seen.pop() is not None, "those that only look on are let"
    handle.remove()
    step(model, optimizer)


# Copies of a prepared model and of its parts


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("name", [*COPIES, "AveragedModel"])
def test_released_parameters_are_not_copied(name: str) -> None:
    model, optimizer = stack(separate)
    step(model, optimizer)
    for part in (model, model.blocks, model.last):
        with pytest.raises(
            penstock.EngineError, match=r"cannot be copied or pickled.*before prepare\(\).*gathered\(\).*penstock\.EMA"
        ):
            (COPIES | {"AveragedModel": AveragedModel})[name](part)
    with optimizer.gathered(model.last.parameters()):
        assert torch.isfinite(copy.deepcopy(model.last).weight).all()
        with pytest.raises(penstock.EngineError, match="would read as NaN"):
            copy.deepcopy(model)
    step(model, optimizer)


@pytest.mark.parametrize("streams", [inline, separate])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_a_plain_model(name: str, streams: Any) -> None:
    model, optimizer = stack(streams, "fp32")
    step(model, optimizer)
    with optimizer.gathered():
        whole, part = COPIES[name](model), COPIES[name](model.blocks[0])
        expected = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, expected[key])
        assert name != "deepcopy" or value.untyped_storage().nbytes() == value.nbytes, "memory of its own"
    for module in [*whole.modules(), *part.modules()]:
        fresh = type(module).__new__(type(module))
        nn.Module.__init__(fresh)
        assert vars(module).keys() >= vars(fresh).keys()
        ours = {"_apply", "zero_grad", "forward", "__reduce_ex__", "_ddp_params_and_buffers_to_ignore"}
        assert not ours & vars(module).keys()
        hooks = [value for key, value in vars(module).items() if "hooks" in key and value]
        assert not hooks
        assert type(module._parameters) is dict
    assert {value for p in whole.parameters() for value in vars(p).values()} <= {None}
    with torch.no_grad():
        assert torch.equal(whole(x), model(x))
    other = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole(x).square().sum().backward()
    other.step()
    other.zero_grad()
    whole.half().float()
    step(model, optimizer)
    prepared(whole, streams)[1].close()
    optimizer.close()
    assert torch.isfinite(COPIES[name](model)(x)).all()


def test_hooks_and_attributes_of_people_are_copied() -> None:
    model = Stack()
    model.last.register_forward_hook(double)
    model.last.weight.tag = "mine"
    _, optimizer = prepared(model)
    with optimizer.gathered():
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert list(copied.last._forward_hooks.values()) == [double]
        assert pickle.loads(pickle.dumps(model)).last.weight.tag == "mine"


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("name", COPIES)
def test_a_parameter_is_copied_where_it_is_there(name: str) -> None:
    model, optimizer = stack(separate)
    step(model, optimizer)
    with pytest.raises(penstock.EngineError, match="which is released"):
        COPIES[name]([model.last.weight])
    with optimizer.gathered():
        copied = COPIES[name](model.last.weight)
        expected = model.last.weight.detach().clone()
    assert torch.equal(copied, expected)
    assert {*vars(copied).values()} <= {None}
    other = nn.Linear(16, 4)
    other.weight = copied
    prepared(other, inline)[1].close()
    optimizer.close()
    assert not vars(model.last.weight)
