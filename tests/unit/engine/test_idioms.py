"""What people do with any model, done with a prepared one: it works, or an error names what to call instead."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import penstock
from tests.lib.engines import ON_CPU, prepared
from tests.lib.models import seeded
from tests.lib.streams import inline, separate
from tests.models.modules_rows import Stack, squared

STREAMS = {"read in place": inline, "gathered": separate}


def stack(streams: Callable[[], Any], precision: str = "bf16", **how: Any) -> tuple[Stack, penstock.Optimizer]:
    return prepared(seeded(Stack), streams, precision=precision, **ON_CPU, **how)


def step(model: nn.Module, optimizer: penstock.Optimizer) -> float:
    loss = squared(model(torch.linspace(-1, 1, 32).reshape(4, 8)))
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


@pytest.mark.parametrize(("name", "streams"), zip(STRANGERS, (inline, separate) * 3, strict=True), ids=STRANGERS)
def test_a_parameter_that_was_put_into_the_model_is_named_at_the_next_forward(name: str, streams: Any) -> None:
    model, optimizer = stack(streams)
    step(model, optimizer)
    with optimizer.gathered():  # a parametrization reads what it is put on
        STRANGERS[name](model)
    for _ in range(2):
        with pytest.raises(penstock.EngineError, match=rf"'[\w.]*{name}'.*after prepare\(\).*set_full_param"):
            model(torch.rand(4, 8))
    optimizer.close()


def test_a_parameter_that_was_replaced_after_backward_is_named_by_step() -> None:
    model, optimizer = stack(inline)
    optimizer.backward(squared(model(torch.rand(4, 8))))
    STRANGERS["last.weight"](model)
    with pytest.raises(penstock.EngineError, match=r"'last.weight'"):
        optimizer.step()
    optimizer.close()


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
    optimizer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_of_the_callers_choice_for_one_call_are_no_replacements(precision: str) -> None:
    model, optimizer = stack(inline, precision)
    x, dtype = torch.rand(4, 8), torch.bfloat16 if precision == "bf16" else torch.float32
    others = {n: nn.Parameter(torch.zeros_like(p)) for n, p in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, others, (x,)), torch.zeros(4, 4, dtype=dtype))
    step(model, optimizer)
    optimizer.close()


def give_other_memory(model: Stack) -> None:
    weight(model).data = torch.zeros(32, 16)  # refused of a released one
    model(torch.rand(4, 8))


def test_values_under_a_parameter_are_taken_or_refused() -> None:
    for streams, precision in ((separate, "fp32"), (separate, "bf16"), (inline, "bf16")):
        model, optimizer = stack(streams, precision)
        step(model, optimizer)
        with pytest.raises(penstock.EngineError, match=r"'blocks.0.up.weight' \(32, 16\).*set_full_param"):
            give_other_memory(model)
        optimizer.close()
    model, optimizer = stack(inline, "fp32")  # where what was given is all there is
    step(model, optimizer)
    weight(model).data = torch.zeros(32, 16)
    step(model, optimizer)
    assert weight(model).abs().max() < 0.1
    assert torch.equal(optimizer.full_param(weight(model)), weight(model))
    weight(model).data = torch.zeros(2, 2)
    with pytest.raises(penstock.EngineError, match=r"'blocks.0.up.weight' \(32, 16\).*\(2, 2\)"):
        model(torch.rand(4, 8))
    optimizer.close()


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
        optimizer.close()
    model, optimizer = stack(inline, "fp32")
    model.load_state_dict(state)
    assert torch.equal(optimizer.full_param(weight(model)), state["blocks.0.up.weight"])
    step(model, optimizer)
    optimizer.close()


def test_a_model_whose_modules_convert_themselves_trains() -> None:
    """Routers do: their weights are fp32 for the time of a forward."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choose = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            self.choose = self.choose.float()
            return self.choose(x.float()).to(x.dtype)

    def losses(streams: Any) -> list[float]:
        model = seeded(lambda: Stack([Wide(), Wide()]))
        _, optimizer = prepared(model, streams, precision="bf16", **ON_CPU)
        found = [step(model, optimizer) for _ in range(3)]
        for _ in range(2):  # two forwards without a step in between
            optimizer.backward(squared(model(torch.ones(4, 8))))
        optimizer.step()
        found.append(float(optimizer.full_param(model.blocks[0].choose.weight).sum()))
        optimizer.close()
        return found

    first, second = (losses(streams) for streams in STREAMS.values())
    assert first == second
    assert first[2] < first[0]
