"""A family on Penstock and in plain torch: the same steps, and what they left behind."""

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import assert_same_state, prepare_on
from tests.models.family import Batch, Family

STEPS = 3
#: Units whose backward was recorded stay gathered until a backward that is not.
RECORDED = {"trained_forces", "gradient_penalty"}
ON_DEVICE = penstock.Placement()
ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
# A large eps: where gradients cancel, Adam would blow their last bit up to a whole step.
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Trace:
    """What each step returned, and by parameter: the gradients before the first update, and the final fp32 values."""

    observed: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def build(family: Family, precision: str) -> nn.Module:
    """The model with the same values every time, its parameters in the compute dtype."""
    torch.manual_seed(0)
    model = family.build()
    if precision == "bf16":
        to_bf16(model)
    return model


def to_fp32(model: nn.Module) -> None:
    """Convert parameters in place, as Penstock does."""
    for module in model.modules():
        for parameter in _numbers(module):
            parameter.data = parameter.data.float()


def to_bf16(model: nn.Module) -> None:
    """Convert parameters in place; buffers and batch norms keep their dtype, as they do under Penstock."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is None:
            for parameter in _numbers(module):
                parameter.data = parameter.data.bfloat16()


def _numbers(module: nn.Module) -> list[nn.Parameter]:
    """A module's own parameters, but for quantised ones and what is frozen beside them."""
    own = list(module.parameters(recurse=False))
    is_code = [not p.is_floating_point() or p.element_size() == 1 for p in own]
    return [p for p, code in zip(own, is_code, strict=True) if not code and (p.requires_grad or not any(is_code))]


def cast_inputs(model: nn.Module) -> None:
    """What a prepared model does where fp32 buffers take part: blocks and layers of torch get their inputs in bf16."""

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = next(module.parameters(recurse=False), None)
        if own is not None and own.dtype != torch.bfloat16:  # made fp32 for its use
            return None
        return tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs))

    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    blocks = {block for blocks in lists for block in blocks}
    for module in model.modules():
        if module in blocks or type(module) in (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d):
            module.register_forward_pre_hook(cast, with_kwargs=True)


class Products(TorchFunctionMode):
    """The same for what modules multiply by themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and len({t.dtype for t in args}) == 2:
            args = tuple(t.bfloat16() for t in args)
        return func(*args, **(kwargs or {}))


def prepared(
    family: Family, model: nn.Module, streams: Streams, placement: penstock.Placement, stage: int, precision: str
) -> penstock.Optimizer:
    owned = family.owned(model)
    optimizer = torch.optim.AdamW(owned, foreach=False, **HYPER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = prepare_on(
            streams, model, optimizer, placement=placement, stage=stage, precision=precision, **family.prepare
        )
    ours = [str(w.message) for w in caught if "optimizer does not own" in str(w.message)]
    assert len(ours) == (family.warns is not None), ours
    assert family.warns is None or family.warns in ours[0]
    return result


def penstock_run(
    family: Family,
    streams: Streams,
    placement: penstock.Placement,
    stage: int,
    precision: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    look: bool = True,
) -> Trace:
    """Train on Penstock. `look`: read the first gradients, which waits for them; else nothing waits but the engine."""
    model = build(family, precision)
    optimizer = prepared(family, model, streams, placement, stage, precision)
    trace = Trace()
    for step in range(STEPS):
        batch = Batch(step, rank)  # fp32: the engine casts
        torch.manual_seed(step)
        trace.observed.append([t.float() for t in family.work(model, batch, optimizer.backward)])
        if not streams.reads_in_place and family.name not in RECORDED:
            assert optimizer._engine.gatherer.live_bytes == 0
        if step == 0 and look:
            trained = {id(p) for p in family.owned(model) if p.requires_grad}
            trace.gradients = {n: optimizer.full_grad(p) for n, p in model.named_parameters() if id(p) in trained}
        assert not optimizer.step().skipped
        assert not any(type(p.grad) is Tensor for p in model.parameters())  # a handle has no memory
        optimizer.zero_grad()
    if precision == "fp32" and world_size > 1:  # a gather for each unit, in place of broadcasts for each parameter
        with optimizer.gathered():
            trace.parameters = {n: p.detach().clone().float() for n, p in model.named_parameters()}
    else:
        trace.parameters = {n: optimizer.full_param(p) for n, p in model.named_parameters()}
    optimizer.close()
    return trace


def plain_run(family: Family, precision: str, world_size: int = 1) -> Trace:
    """The same in plain torch: ranks one after the other, their gradients averaged; bf16 with fp32 masters."""
    dtype = DTYPES[precision]
    model = build(family, precision)
    if precision == "fp32":
        to_fp32(model)
    elif family.buffers_mix:
        cast_inputs(model)
    named = dict(model.named_parameters())
    owned = {id(p) for p in family.owned(model) if p.requires_grad}
    trained = {n: p for n, p in named.items() if id(p) in owned}
    masters = (
        trained if precision == "fp32" else {n: p.detach().to(torch.float32, copy=True) for n, p in trained.items()}
    )
    optimizer = torch.optim.AdamW(masters.values(), foreach=False, **HYPER)
    trace = Trace()
    for step in range(STEPS):
        gradients: dict[str, Tensor] = {}
        for rank in range(world_size):
            model.zero_grad()
            batch = Batch(step, rank, dtype)
            torch.manual_seed(step)
            with Products() if precision == "bf16" and family.buffers_mix else nullcontext():
                observed = family.work(model, batch, lambda loss, **kwargs: loss.backward(**kwargs))
            if rank == 0:
                trace.observed.append([t.float() for t in observed])
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    share = parameter.grad.to(dtype).float() / world_size  # batch norms' too are reduced in it
                    gradients[name] = gradients[name] + share if name in gradients else share.clone()
        if step == 0:
            trace.gradients = {n: gradients.get(n, torch.zeros(p.shape)) for n, p in trained.items()}
        for name, master in masters.items():
            master.grad = gradients.get(name)
        optimizer.step()
        if masters is not trained:
            with torch.no_grad():
                for name, master in masters.items():
                    trained[name].copy_(master)
    trace.parameters = {n: masters.get(n, p) for n, p in named.items()}
    trace.parameters = {n: copy.deepcopy(p.detach()).float() for n, p in trace.parameters.items()}
    return trace


def assert_equal(ours: Trace, theirs: Trace) -> None:
    """Two runs of Penstock: bit for bit."""
    assert_same(ours.observed, theirs.observed)
    assert_same_state(ours.gradients, theirs.gradients)
    assert_same_state(ours.parameters, theirs.parameters)


def assert_same(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> None:
    """The same values step by step, bit for bit."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), (step, index, x, y)


def assert_gradients(ours: Trace, plain: Trace, *, exact: bool, relative: float) -> None:
    """First gradients: bit for bit, or within `relative` of themselves and of their tensor's largest."""
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        if exact:
            assert torch.equal(ours.gradients[name], gradient), name
        else:
            _close(f"gradient of {name}", ours.gradients[name], gradient, relative)


def assert_close(ours: Trace, plain: Trace, *, relative: float) -> None:
    """What was observed and the final parameters, within `relative` of themselves and of their tensor's largest."""
    for step, (a, b) in enumerate(zip(ours.observed, plain.observed, strict=True)):
        for x, y in zip(a, b, strict=True):
            _close(f"step {step}", x, y, relative)
    assert ours.parameters.keys() == plain.parameters.keys()
    for name, value in plain.parameters.items():
        _close(name, ours.parameters[name], value, relative)


def _close(what: str, ours: Tensor, plain: Tensor, relative: float) -> None:
    assert ours.shape == plain.shape, what
    if plain.numel():
        # The constant: a bias before a softmax has no gradient but what rounding makes of one.
        allowed = plain.abs() * relative + plain.abs().max() * relative + 1e-7
        beyond = (ours - plain).abs() - allowed
        worst = int(beyond.nan_to_num(nan=float("inf")).argmax())
        message = (
            f"{what}: element {worst} is {ours.flatten()[worst].item()!r}, plain {plain.flatten()[worst].item()!r}"
        )
        assert bool((beyond <= 0).all()), message  # False for NaN
