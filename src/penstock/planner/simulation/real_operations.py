"""Forward and backward for real, with every operation told: for models whose control flow depends on values.

What the engine does is noted and not done all the same. Parameters have random values wherever they are shown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ConfigError
from penstock.planner.simulation.fake_collectives import NAMESPACES, FakeCollectives
from penstock.planner.simulation.fake_operations import Recipe
from penstock.planner.simulation.memory import Memory
from penstock.planner.simulation.operation_cost import FREE, cost, tensors_in
from penstock.planner.simulation.program import Collective, Op
from penstock.planner.simulation.shapes import Shaped, asks_for_shapes, over

_SPREAD = 0.02  # of random values: those that most models begin with


class RealOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which operations run, and are told.

    Arguments:
        sink: told of each operation that is not a view, in order.
        memory: where tensors that are made inside are counted.
        collectives: told of each collective of several ranks that the model itself issues; none is sent.

    Attributes:
        recipes: for each kind of operation one example.
    """

    stays = True  # on our side of the border: operations of the engine are told as the user's are

    def __init__(
        self, sink: Callable[[Op], object], memory: Memory, collectives: Callable[[Collective], object] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipes: dict[Op, Recipe] = {}
        self._sink = sink
        self._memory = memory
        self._between = FakeCollectives(_made, _refusal, collectives)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and tell what it costs."""
        kwargs = {} if kwargs is None else kwargs
        if asks_for_shapes():
            return func(*args, **kwargs)
        if types and any(each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # a class of tensors with rules of its own: it comes back with what it consists of
        if func.namespace in NAMESPACES:
            return self._between.run(func, args, kwargs)
        out = func(*args, **kwargs)
        if func.is_view or func._overloadpacket in FREE:
            return out
        op = cost(func, args, kwargs, out)
        if op not in self.recipes:
            self.recipes[op] = Recipe(func, _without_values(args), _without_values(kwargs))
        self._sink(op)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((*args, *kwargs.values()))}
        for tensor in tensors_in(out):
            if tensor.untyped_storage().data_ptr() not in given:
                self._memory.follow(tensor)
        return out


def _made(shaped: Shaped) -> Tensor:
    return torch.zeros(shaped.shape, dtype=shaped.dtype, device="cpu")


def _refusal(func: object, why: str) -> ConfigError:
    return ConfigError(f"simulation: {func} {why}. Leave it out, or plan without --measure.")


def random_values(buffer: Tensor) -> None:
    """Fill a buffer with random values, as parameters have at the start."""
    if buffer.is_floating_point():
        buffer.normal_(0.0, _SPREAD)
    else:
        buffer.zero_()


def _without_values(value: Any) -> Any:
    return Shaped.of(value) if isinstance(value, Tensor) else over(value, _without_values)
