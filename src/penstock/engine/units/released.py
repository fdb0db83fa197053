"""The class of a parameter while its unit is released: its values are not there, and torch cannot use them by mistake.

`parameter.__class__` is a subclass of its own class from `hide` to `expose`, as torch's lazy parameters do it. Torch
asks `__torch_function__` of that subclass before it runs an operation:

    shape, dtype, grad, hooks, ...   answered: they need no values
    `.data`                          answered by an alias that is released too, for its shape and dtype
    all else                         inside a forward of the model: the unit is gathered, then the operation runs
                                     anywhere else: an `EngineError` that names the parameter

A parameter that is there has its own class, so an operation of the model costs nothing more. Code of ours runs with
`__torch_function__` off (`machine/border.py`).
"""

from collections.abc import Callable
from types import new_class
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from penstock.engine.units.dtensors import is_divided
from penstock.errors import EngineError

#: What a prepared parameter has until `close`: so that no other optimizer takes it, under whatever module it stands.
OWNER = "_penstock_owner"

#: Attributes that are values, or views of them. All other attributes are answered.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__", None})

#: Functions and methods that need no values of their arguments.
_METADATA = frozenset(
    """
    size dim ndimension numel nelement stride is_contiguous dim_order element_size get_device __len__ __dir__
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size result_type
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_empty_strided new_zeros new_ones new_full new_tensor
    """.split()  # noqa: SIM905
)

#: Of these, what is answered as of a parameter that is there: contiguous, and not one element that stands for all.
_STRIDES = frozenset({"stride", "is_contiguous", "dim_order"})


class Reader(Protocol):
    """Whoever may gather a released parameter."""

    def read(self, parameter: nn.Parameter) -> None:
        """Gather the parameter if a forward of the model is under way in this thread."""


class Owner:
    """The owner of a parameter, without keeping it alive. Pickled with a parameter, it comes back as `None`.

    Arguments:
        owner: gathers the parameter for a read.
        name: the parameter's name in the model.
    """

    def __init__(self, owner: Reader | None = None, name: str = "") -> None:
        self._of = None if owner is None else ref(owner)
        self.name = name

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave the engine in this process, and nothing of ours in the file."""
        return type(None), ()

    def is_alive(self) -> bool:
        """Return True if the owner is there still."""
        return self._of is not None and self._of() is not None

    def read(self, parameter: nn.Parameter) -> None:
        """Have the owner gather the parameter, if it may."""
        owner = None if self._of is None else self._of()
        if owner is not None:
            owner.read(parameter)


class Released(Tensor):
    """A tensor that never has values, or not now: the `.data` of a released parameter, or the parameter itself."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values; gather for the rest, or refuse it."""
        kwargs = kwargs or {}
        if _needs_no_values(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                if getattr(func, "__name__", "") in _STRIDES:
                    args = torch.empty(args[0].shape, device="meta"), *args[1:]
                return func(*args, **kwargs)
        released: list[Any] = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Released)]
        for tensor in released:
            if isinstance(tensor, nn.Parameter):
                _owner_of(tensor).read(tensor)
        left = [tensor for tensor in released if isinstance(tensor, Released)]
        if not left:
            return func(*args, **kwargs)
        if _attribute(func) == "data" and func.__name__ == "__get__" and not is_divided(args[0]):
            with torch._C.DisableTorchFunctionSubclass():
                return released_alias(args[0].data, _owner_of(args[0]).name)
        what = resolve_name(func) or getattr(func, "__name__", func)
        raise EngineError(
            f"{what} of parameter {_described(left[0])}, which is released: its values are not there. To read it, call "
            "optimizer.full_param() or enter optimizer.gathered(), on every rank; to write it, call "
            "optimizer.set_full_param() or enter optimizer.gathered(modify=True). An average of parameters is "
            "penstock.EMA, an L2 term weight_decay."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Name the parameter. Printing is no use of it."""
        return f"<released parameter {_described(self)}; optimizer.full_param(parameter) is its value>"

    def __format__(self, spec: str) -> str:
        """Format as text."""
        return format(repr(self), spec)


class ReleasedParameter(Released, nn.Parameter):
    """A plain parameter while its unit is released."""


def released_class(kind: type[Any]) -> type[Any]:
    """Return the class of a tensor while it is released; make it if the tensor's own class is no plain one."""
    if issubclass(kind, Released):
        return kind
    if kind is nn.Parameter:
        return ReleasedParameter
    return new_class(f"Released{kind.__name__}", (Released, kind))


def released_alias(tensor: Tensor, name: str) -> Tensor:
    """Make a tensor of placeholders refuse reads and writes in the name of its parameter, for good."""
    tensor.__class__ = Released
    vars(tensor)[OWNER] = Owner(name=name)
    return tensor


def _attribute(func: Any) -> str | None:
    """Return which attribute a function gets, sets or deletes."""
    return getattr(getattr(func, "__self__", None), "__name__", None)


def _needs_no_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func) not in _VALUES
    # Backward reads what was saved and gathered, not these: they are those of which gradients are asked for.
    return name in _METADATA or func is torch.autograd.grad or (name == "type" and len(args) == 1 and not kwargs)


def _owner_of(tensor: Any) -> Owner:
    owner: Owner = vars(tensor).get(OWNER) or Owner()
    return owner


def _described(tensor: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"'{_owner_of(tensor).name}' {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
