"""Gradient proxies: tensors without memory in `parameter.grad` after backward, which have a norm and can be scaled.

A gradient is sharded, on any tier, so there is no tensor to put into `.grad`. With `None` there, torch's
`clip_grad_norm_` and all other code that goes through gradients would do nothing, silently. A proxy supports:

    norm                  `torch.linalg.vector_norm` and `torch._foreach_norm`, which torch's clipping calls
    multiply, divide      by a number, which torch's clipping does then
    zero                  drops the gradient, as `optimizer.zero_grad(set_to_none=False)` does
    everything else       raises an error that names what to call instead

Torch dispatches operations to a proxy; nothing in torch is patched. `engine/policy.py` answers them. Proxies are set at
the end of a backward and removed at the beginning of the next one. If only the loss reads a parameter, autograd adds
its gradient to the proxy before that: the proxy stores it in `UnitParameter.arrived`.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from penstock.engine.step.context import EngineContext
from penstock.engine.step.owner_thread import in_backward
from penstock.engine.unit.parameter import UnitParameter
from penstock.errors import EngineError
from penstock.runtime.modes import engine_entry

aten = torch.ops.aten


class GradientSource(Protocol):
    """Answers the operations on gradient proxies."""

    def look(self) -> None:
        """Apply changes that the user made to `.grad`."""

    def norm(self, parameter: UnitParameter, norm_type: float) -> float:
        """Return the norm of a gradient over all ranks. Collective, unless norms are known."""

    def scale(self, parameter: UnitParameter, factor: float) -> None:
        """Note that a gradient is multiplied by a factor."""

    def drop(self, parameters: Sequence[UnitParameter]) -> None:
        """Drop gradients, which were zeroed."""


class GradientProxy(Tensor):
    """A stand-in for the gradient of one parameter."""

    _name: str
    _of: "weakref.ref[UnitParameter]"
    _answers: "weakref.ref[GradientSource]"

    # Operations are handled by `__torch_dispatch__`. `__torch_function__` would make their results proxies as well.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: UnitParameter, answers: "weakref.ref[GradientSource]") -> "GradientProxy":
        """Make a proxy of the parameter's shape, dtype and device."""
        tensor = parameter.tensor
        made: GradientProxy = torch.Tensor._make_wrapper_subclass(
            cls, parameter.whole_shape, dtype=tensor.dtype, device=tensor.device
        )
        made._name = parameter.name
        # Weak references: Python's garbage collector does not see what a parameter's `.grad` refers to.
        made._of = weakref.ref(parameter)
        made._answers = answers
        return made

    def resolve(self) -> "tuple[UnitParameter, GradientSource]":
        """Return the parameter, and the source that answers for its gradient.

        Raises:
            EngineError: the optimizer is closed.
        """
        parameter, answers = self._of(), self._answers()
        if parameter is None or parameter.proxy is None or answers is None:
            raise EngineError(
                f"This stood for the gradient of '{self._name}', whose optimizer is closed: the gradient is gone."
            )
        return parameter, answers

    def another(self) -> "GradientProxy":
        """Make another proxy of the same gradient, for `detach` and `.data`."""
        return GradientProxy(self.resolve()[0], self._answers)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or refuse it."""
        answer = _ANSWERS.get(func.overloadpacket)
        if answer is None:
            _refuse(str(func), (*args, *(kwargs or {}).values()))
        return answer(func, *args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe the proxy."""
        return (
            f"<gradient of '{self._name}' {tuple(self.shape)}, {self.dtype}, {self.device}: sharded; "
            "optimizer.full_grad(parameter) is its value>"
        )


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: GradientProxy, *_: Any, **__: Any) -> NoReturn:
        _refuse(name, (self,))

    return method


# Torch does not dispatch these. Without memory they give an address of 0, or an unrelated error. `untyped_storage` is
# left alone: compilers call it.
for _name in ("numpy", "__array__", "tolist", "item", "data_ptr", "storage", "share_memory_"):
    setattr(GradientProxy, _name, _refused(_name))
GradientProxy.__reduce_ex__ = _refused("pickle, torch.save or copy")  # type: ignore[method-assign]
GradientProxy.__deepcopy__ = _refused("copy.deepcopy")  # type: ignore[method-assign]


def _refuse(what: str, args: Iterable[Any]) -> NoReturn:
    """Refuse an operation, and name what to call instead."""
    names = [proxy._name for proxy in _handles_in(args)]
    which = f"'{names[0]}'" + (f" and {len(names) - 1} others" if len(names) > 1 else "")
    cause = next((cause for part, cause in _CAUSES.items() if part in what), "")
    raise EngineError(
        f"{what} on the .grad of {which}: it stands for a gradient that is sharded, and knows its norm and its scale "
        f"alone. {cause}Read the gradient with optimizer.full_grad(parameter), set it with "
        "optimizer.set_full_grad(parameter, value) or parameter.grad = value."
    )


#: Likely causes of operations, by a part of their name.
_CAUSES = {
    "_amp_": "A torch.amp.GradScaler was given this optimizer: bf16 and fp32 need none, and fp16 has a loss scale of "
    "its own (prepare(precision='fp16'), optimizer.backward(loss)); GradScaler(enabled=False) may stay. ",
    "c10d": "It is reduced over ranks already: leave that out. ",
    "clamp": "clip_grad_value_ is not supported; clip the norm. ",
    "addcmul": "Another optimizer was given these parameters; theirs is the one that prepare() returned. ",
    "lerp": "Another optimizer was given these parameters; theirs is the one that prepare() returned. ",
}


def _handles_in(values: Iterable[Any]) -> list[GradientProxy]:
    return [value for value in tree_leaves(list(values)) if isinstance(value, GradientProxy)]


# Supported operations


def _alias(func: Any, proxy: GradientProxy) -> GradientProxy:
    return proxy.another()


def _norm(
    func: Any, proxy: GradientProxy, norm_type: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if dim not in (None, [], ()) or keepdim:
        _refuse(f"{func} of some dimensions", (proxy,))
    return _norms([proxy], norm_type, dtype)[0]


def _foreach_norm(func: Any, tensors: Sequence[Tensor], norm_type: float = 2, dtype: Any = None) -> list[Tensor]:
    """Return the norms of a list of gradients, which may include plain tensors."""
    ours = iter(_norms([t for t in tensors if isinstance(t, GradientProxy)], norm_type, dtype))
    plain = [t for t in tensors if not isinstance(t, GradientProxy)]
    others = iter(torch._foreach_norm(plain, norm_type, dtype=dtype) if plain else ())
    return [next(ours if isinstance(t, GradientProxy) else others) for t in tensors]


def _norms(proxies: Sequence[GradientProxy], norm_type: float, dtype: torch.dtype | None) -> list[Tensor]:
    if not proxies:
        return []
    # One by one: a list may include gradients of several engines.
    values = [source.norm(parameter, float(norm_type)) for parameter, source in (h.resolve() for h in proxies)]
    # In fp32: a norm in bf16 would have 8 significant bits. One copy to the device for all.
    made = torch.tensor(values, dtype=dtype or torch.float32, device=proxies[0].device)
    return [made[0]] if len(values) == 1 else list(made.unbind())


def _change(func: Any, tensors: Any, factor: Any = None) -> Any:
    """Multiply, divide or zero a gradient, or a list of gradients, which may include plain tensors."""
    found = [tensors] if isinstance(tensors, Tensor) else tensors
    proxies = [tensor for tensor in found if isinstance(tensor, GradientProxy)]
    number = None if factor is None else _number(func, proxies, factor)
    for proxy in proxies:
        parameter, source = proxy.resolve()
        if number is None:
            source.drop([parameter])
        else:
            source.scale(parameter, number)
    plain = [tensor for tensor in found if not isinstance(tensor, GradientProxy)]
    if plain:
        func(plain, *([] if factor is None else [factor]))
    return tensors if isinstance(tensors, Tensor) else None


def _number(func: Any, proxies: Sequence[GradientProxy], factor: Any) -> float:
    """Return the factor of a multiplication or division."""
    is_number = isinstance(factor, int | float) or (
        isinstance(factor, Tensor) and not isinstance(factor, GradientProxy) and factor.numel() == 1
    )
    if not is_number:
        _refuse(f"{func} by other than a number", (*proxies, factor))
    number = float(factor)
    if func.overloadpacket not in (aten.div_, aten._foreach_div_):
        return number
    if number == 0:
        _refuse(f"{func} by 0", proxies)
    return 1 / number


def _add(func: Any, proxy: Any, grad: Any, *, alpha: Any = 1) -> Tensor:
    """Store a gradient that autograd accumulates; refuse every other addition."""
    accumulates = in_backward() and type(torch._C._current_autograd_node()).__name__ == "AccumulateGrad"
    if not (accumulates and isinstance(proxy, GradientProxy) and alpha == 1):
        _refuse(str(func), (proxy, grad))
    parameter, _ = proxy.resolve()
    if parameter.proxy is not proxy:
        _refuse(str(func), (proxy, grad))
    parameter.arrived = grad
    return proxy if func.overloadpacket is aten.add_ else proxy.another()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.detach: _alias,
    aten.alias: _alias,
    aten.linalg_vector_norm: _norm,
    aten._foreach_norm: _foreach_norm,
    **dict.fromkeys((aten.mul_, aten.div_, aten.zero_), _change),
    **dict.fromkeys((aten._foreach_mul_, aten._foreach_div_, aten._foreach_zero_), _change),
    aten.add_: _add,
    aten.add: _add,
}


class GradientProxies:
    """Sets and removes the gradient proxies of an engine.

    Arguments:
        context: shared by all components of the engine.

    Attributes:
        answers: answers operations on proxies; `None` until the engine is complete.
    """

    def __init__(self, context: EngineContext) -> None:
        self._units = context.trained
        self._has_peers = context.ranks.data_size > 1
        self.answers: GradientSource | None = None

    def put_on(self) -> None:
        """Set the proxies of all parameters with a gradient, at the end of a backward."""
        for unit, trained in self._units:
            gradient = trained.gradient
            # A gradient that only another rank has is reduced here too, and every rank has to clip it.
            there = gradient.held if self._has_peers else gradient.present
            own = gradient.present | gradient.arrived.keys()
            for parameter in unit.parameters:
                index = parameter.index
                if index in own or (index in there and parameter.tensor.requires_grad):
                    self.show(parameter)

    def show(self, parameter: UnitParameter) -> None:
        """Set the proxy of a parameter with a gradient. Each parameter has one, which is reused."""
        proxy = parameter.proxy
        # A module that converts itself in its forward, as routers do, leaves its parameters in another dtype.
        if proxy is None or proxy.dtype != parameter.tensor.dtype:
            assert self.answers is not None
            parameter.proxy = GradientProxy(parameter, weakref.ref(self.answers))
        parameter.show_gradient()

    def show_to_hooks(self, parameter: UnitParameter) -> None:
        """Set a proxy for the user's hooks, which autograd calls after ours: with no `.grad` they would do nothing."""
        self.show(parameter)
        assert isinstance(parameter.proxy, GradientProxy)
        # Not the parameter's own proxy: an addition to it is not autograd's.
        parameter.tensor.grad = parameter.proxy.another()

    def take_off(self) -> None:
        """Remove all proxies, at the beginning of a backward: autograd would add to them."""
        for unit, _ in self._units:
            for parameter in unit.parameters:
                parameter.hide_gradient()

    def drop(self) -> None:
        """Remove all proxies, and forget them: those of another engine replace them."""
        self.take_off()
        for unit, _ in self._units:
            for parameter in unit.parameters:
                parameter.proxy = None

    @engine_entry
    def look(self) -> None:
        """Apply changes that the user made to `.grad`."""
        assert self.answers is not None
        self.answers.look()


def is_proxy_of(grad: Tensor, parameter: UnitParameter) -> bool:
    """Return True if a `.grad` is a proxy of the parameter's own gradient, such as its `detach()`."""
    return isinstance(grad, GradientProxy) and grad._of() is parameter
