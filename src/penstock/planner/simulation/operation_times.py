"""What operations take on the device that is here: each kind runs for real, once it is known from a simulation."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.testing import make_tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.benchmark import Timer

from penstock.planner.simulation.fake_tensor import Shaped
from penstock.planner.simulation.operation_cost import Recipe, tensors_in
from penstock.planner.simulation.program import Op

_LEAST_SECONDS = 3e-3  # of all timings of an operation: a clock and a queue are not to be what is timed


def time_ops(
    recipes: Mapping[Op, Recipe],
    roofline: Callable[[Op], float],
    *,
    device: torch.device | str = "cpu",
    most_seconds: float = 30.0,
    most_bytes: int = 1 << 30,
) -> dict[Op, float]:
    """Measure each kind of operation on random values, the costliest ones first.

    What is larger than `most_bytes`, what is left after `most_seconds`, and what cannot run alone is not timed. It gets
    its roofline, times the median of what was timed over its roofline: of operations of its name where there are any.

    Arguments:
        recipes: for each kind an example: `FakeOperations.recipes`.
        roofline: seconds that a kind would take by FLOPs and bytes alone; 0 where nothing runs.
        device: where they run.
        most_seconds: how long all of it may take; the operation that runs is finished.
        most_bytes: of arguments and results of one operation.

    Returns:
        Seconds of each kind.
    """
    device = torch.device(device)
    until = time.perf_counter() + most_seconds
    timed: dict[Op, float] = {}
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        for op in sorted(recipes, key=roofline, reverse=True):
            if time.perf_counter() > until or roofline(op) <= 0:
                break
            if _nbytes(recipes[op], op) <= most_bytes and (seconds := _timed(recipes[op], device)) is not None:
                timed[op] = seconds
    over_roofline: defaultdict[str, list[float]] = defaultdict(list)
    for op, seconds in timed.items():
        over_roofline[op.name].append(seconds / roofline(op))
    ratios = {name: median(each) for name, each in over_roofline.items()}
    overall = median(ratios.values()) if ratios else 1.0
    return {op: timed[op] if op in timed else roofline(op) * ratios.get(op.name, overall) for op in recipes}


def _nbytes(recipe: Recipe, op: Op) -> int:
    """Estimate what an operation needs: its arguments, or what it reads and writes where that is more."""
    return max(sum(shaped.nbytes for shaped in _shapes_in(recipe)), op.nbytes)


def _shapes_in(recipe: Recipe) -> list[Shaped]:
    return [part for part in tree_leaves((recipe.args, recipe.kwargs)) if isinstance(part, Shaped)]


def _timed(recipe: Recipe, device: torch.device) -> float | None:
    """Return the seconds of one call; `None` where it cannot be called on values of no meaning."""
    try:
        timer = Timer("call()", globals={"call": call_of(recipe, device)}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=_LEAST_SECONDS).median)
    except Exception:  # a library's kernel on values that its caller would not have given it
        return None


def call_of(recipe: Recipe, device: torch.device) -> Callable[[], object]:
    """Make an operation's arguments, of random values, and return what calls it.

    Arguments:
        recipe: an example of the operation. Kernels of a cpu have another name elsewhere.
        device: where it is to run.
    """
    args, kwargs = _filled(recipe, device)
    made = None if device.type == "cpu" else _ELSEWHERE.get(recipe.func._overloadpacket)
    return partial(recipe.func, *args, **kwargs) if made is None else made(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, **given: Any
) -> Callable[[], Tensor]:
    gqa = query.shape[1] != key.shape[1]
    return partial(
        torch.nn.functional.scaled_dot_product_attention,
        *(query, key, value, given.get("attn_mask"), dropout, causal),
        scale=given.get("scale"),
        enable_gqa=gqa,
    )


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *how: Any, **given: Any
) -> Callable[[], object]:
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    with torch.enable_grad():
        result = _attention(query, key, value, *how, **given)()
    return lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True)


#: What does the work of an operation of a cpu on other devices, where that is not of the same name.
_ELSEWHERE: dict[Any, Callable[..., Callable[[], object]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _filled(recipe: Recipe, device: torch.device) -> tuple[Any, Any]:
    """Make the arguments of a call: integers may be indices of any dimension, or ends of groups of rows."""
    below = max(min((size for shaped in _shapes_in(recipe) for size in shaped.shape), default=1), 1)

    def fill(part: Any) -> Any:
        if isinstance(part, Shaped):
            return _values(part, below, device)
        return device if isinstance(part, torch.device) else part

    args, kwargs = tree_map(fill, (recipe.args, recipe.kwargs))
    for tensor in tensors_in((args, kwargs)):
        if tensor.dtype == torch.int32:
            tensor.copy_(tensor.sort().values)
    return args, kwargs


def _values(shaped: Shaped, below: int, device: torch.device) -> Tensor:
    dtype = shaped.dtype
    tensor = torch.empty_strided(shaped.shape, shaped.strides, dtype=dtype, device=device)
    if 0 in shaped.strides:  # an expanded tensor takes no values of its own
        tensor.as_strided((shaped.nbytes // dtype.itemsize,), (1,)).zero_()
        return tensor
    is_index = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    low, high = (0, below) if is_index else (-1, 2)
    return tensor.copy_(make_tensor(shaped.shape, dtype=dtype, device=device, low=low, high=high))
