"""One parameter of a unit: gathered, released, read and written."""

from collections.abc import Callable, Sequence
from copy import copy
from types import new_class
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from penstock.engine.unit.dtensor import counts_once, give_elements, give_values, is_divided, own_elements, own_part
from penstock.errors import EngineError
from penstock.layout import FlatLayout, Slot
from penstock.rules.formats import as_param

# ----------------------------------------------------------------------------------------------------------------------
# A backward through a graph from before a write is an error, as in torch: versions of tensors are compared.
#
# Torch compares the version of a saved tensor with its version in backward. It does not see updates of parameters, so
# the engine increments their versions. Torch compares no tensor that passes saved-tensor hooks or is computed again, so
# the engine compares those.
# ----------------------------------------------------------------------------------------------------------------------


def check_version(tensor: Tensor, expected: int, what: str = "") -> None:
    """Refuse a tensor that was written after it had a version.

    Raises:
        EngineError: as torch's own error.
    """
    if not tensor.is_inference() and tensor._version != expected:
        raise EngineError(
            "one of the variables needed for gradient computation has been modified by an inplace operation, or by "
            f"step(): {what or f'[{tensor.type()} {list(tensor.shape)}]'} is at version {tensor._version}; expected "
            f"version {expected} instead. Run the forward again, or backward before what writes."
        )


class TensorVersion:
    """The current version of a tensor. Keeps the tensor's counter alive, and not its memory."""

    __slots__ = ("_counter", "_expected")

    def __init__(self, tensor: Tensor) -> None:
        self._expected = 0 if tensor.is_inference() else tensor._version
        self._counter = tensor.detach()  # shares the counter
        self._counter.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse the tensor if it was written since. Raises as `check_version`."""
        check_version(self._counter, self._expected)


class KeptSavedTensor:
    """A saved tensor that a hook leaves where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an output of the node that saves it would keep that node alive, and so itself. A leaf has no node,
        # and the values of a parameter may move.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = 0 if tensor.is_inference() else tensor._version

    def take(self) -> Tensor:
        """Return the tensor; refuse it if it was written since. Raises as `check_version`."""
        check_version(self._tensor, self._version)
        return self._tensor


# ----------------------------------------------------------------------------------------------------------------------
# Autograd hooks with weak references: the garbage collector does not see the references of a parameter's hook.
# ----------------------------------------------------------------------------------------------------------------------


def weakly(method: Callable[..., Any], owner: object, *values: int) -> Callable[..., None]:
    """Return a hook that calls a bound method with `owner`, the values and its arguments while both objects are alive.

    With strong references a parameter would keep its engine alive, and the engine that parameter, for ever.
    """
    of, reference = WeakMethod(method), ref(owner)

    def hook(*arguments: Any) -> None:
        # Strong references for the length of the call: collection may come between the check and the use.
        bound, first = of(), reference()
        if bound is not None and first is not None:
            bound(first, *values, *arguments)

    return hook


# ----------------------------------------------------------------------------------------------------------------------
# The class of a parameter while its unit is released: torch refuses operations on values that are not there.
#
# `parameter.__class__` is a subclass of its own class from `unset` to `point_to`, as in torch's lazy parameters. Torch
# calls `__torch_function__` of that subclass before it runs an operation:
#
#     shape, dtype, grad, hooks, ...   run: they need no values
#     `.data`                          returns an alias that is released too, with its shape and dtype
#     other operations                 inside a forward of the model: the unit is gathered, then the operation runs
#                                      elsewhere: an `EngineError` that names the parameter
#
# A gathered parameter has its own class, so operations of the model cost nothing more. The engine's own code runs with
# `__torch_function__` off (`runtime/modes.py`).
# ----------------------------------------------------------------------------------------------------------------------


#: The attribute of a prepared parameter until `close`: no other `prepare` takes it, whichever module has it.
OWNER = "_penstock_owner"

#: Attributes that are values, or views of them. All other attributes can be read.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__", None})

#: Functions and methods that need no values of their tensors.
_METADATA = frozenset(
    """
    size dim ndimension numel nelement stride is_contiguous dim_order element_size get_device __len__ __dir__
    is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size result_type
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_empty_strided new_zeros new_ones new_full new_tensor
    """.split()  # noqa: SIM905
)

#: Of these, the ones that answer as for a gathered parameter: contiguous, not one expanded element.
_STRIDES = frozenset({"stride", "is_contiguous", "dim_order"})


class ParameterOwner:
    """A weak reference to the owner of a parameter. Pickled with a parameter, it becomes `None`.

    Arguments:
        read: a bound method of the owner, which gathers the parameter if a forward of the model runs in this thread;
            `None` for a parameter without an owner.
        name: the parameter's name in the model.
    """

    def __init__(self, read: Callable[[nn.Parameter], None] | None = None, name: str = "") -> None:
        self._read = (lambda: None) if read is None else WeakMethod(read)
        self.name = name

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as `None`: the engine stays in this process."""
        return type(None), ()

    def is_alive(self) -> bool:
        """Return True if the owner is alive."""
        return self._read() is not None

    def read(self, parameter: nn.Parameter) -> None:
        """Have the owner gather the parameter, if a forward runs."""
        read = self._read()
        if read is not None:
            read(parameter)


class ReleasedTensor(Tensor):
    """A tensor without values: the `.data` of a released parameter for good, the parameter until its next gather."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation that needs no values; gather for the others, or refuse them."""
        kwargs = kwargs or {}
        if _needs_no_values(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                if getattr(func, "__name__", "") in _STRIDES:
                    args = torch.empty(args[0].shape, device="meta"), *args[1:]
                return func(*args, **kwargs)
        released: list[Any] = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, ReleasedTensor)]
        for tensor in released:
            if isinstance(tensor, nn.Parameter):
                _owner_of(tensor).read(tensor)
        left = [tensor for tensor in released if isinstance(tensor, ReleasedTensor)]
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
        """Name the parameter. Printing reads no values."""
        return f"<released parameter {_described(self)}; optimizer.full_param(parameter) is its value>"

    def __format__(self, spec: str) -> str:
        """Format as text."""
        return format(repr(self), spec)


class ReleasedParameter(ReleasedTensor, nn.Parameter):
    """A plain parameter while its unit is released."""


def released_class(kind: type[Any]) -> type[Any]:
    """Return the class of a tensor of a class while it is released."""
    if issubclass(kind, ReleasedTensor):
        return kind
    if kind is nn.Parameter:
        return ReleasedParameter
    return new_class(f"Released{kind.__name__}", (ReleasedTensor, kind))


def released_alias(tensor: Tensor, name: str) -> Tensor:
    """Make a placeholder refuse reads and writes for good, in the name of its parameter."""
    tensor.__class__ = ReleasedTensor
    vars(tensor)[OWNER] = ParameterOwner(name=name)
    return tensor


def _attribute(func: Any) -> str | None:
    """Return the name of the attribute that a function gets, sets or deletes."""
    return getattr(getattr(func, "__self__", None), "__name__", None)


def _needs_no_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func) not in _VALUES
    # `autograd.grad` takes parameters as the inputs of which it returns gradients. Backward reads saved values.
    return name in _METADATA or func is torch.autograd.grad or (name == "type" and len(args) == 1 and not kwargs)


def _owner_of(tensor: Any) -> ParameterOwner:
    owner: ParameterOwner = vars(tensor).get(OWNER) or ParameterOwner()
    return owner


def _described(tensor: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"'{_owner_of(tensor).name}' {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


# ----------------------------------------------------------------------------------------------------------------------
# Look-ups of released parameters: their unit is gathered before the module returns one.
#
# Attention reads its output projection's weight, a parent its child's, a block runs by its `forward` method alone: no
# module hook runs. Every such read passes the dict that `Module.__getattr__` looks into. So while parameters are
# released, the modules that own them have a dict that reports look-ups; a module whose parameters are gathered has its
# own dict, which compilers know. The class of a released parameter comes too late for some of these reads:
# `nn.TransformerEncoder` takes another path for it, scripted functions and C++ extensions do not call it.
# ----------------------------------------------------------------------------------------------------------------------


Named = dict[str, Any]


class ReadWatch:
    """Watch the parameters of one module for look-ups while any of them is released.

    Arguments:
        module: the module that owns the parameters.
        read: called with a released parameter that is looked up, before it is returned.
    """

    def __init__(self, module: nn.Module, read: Callable[[Any], None]) -> None:
        self._module = module
        self._plain: Named = module._parameters
        self._watched: Named = _WatchedParameters(read)

    def update(self) -> None:
        """Start or stop to watch: parameters were released or gathered."""
        old: Named = self._module._parameters
        new = self._plain
        for parameter in old.values():
            if isinstance(parameter, ReleasedTensor):
                new = self._watched
                break
        if old is not new:  # the same dict would be cleared
            new.clear()
            new.update(old)  # with parameters that were registered or deleted since
            self._module.__dict__["_parameters"] = new  # past Module.__setattr__

    def end(self) -> None:
        """Restore the module."""
        self._watched = self._plain
        self.update()


class _WatchedParameters(Named):
    """Parameters by name. Reports each released one that is looked up."""

    def __init__(self, read: Callable[[Any], None]) -> None:
        super().__init__()
        self._read = read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if isinstance(parameter, ReleasedTensor):
            # Before it is returned: the caller would compute with NaN.
            self._read(parameter)
        return parameter


# ----------------------------------------------------------------------------------------------------------------------
# One parameter of a unit: its slot in the gathered buffer, its current values, and its state before `prepare`.
#
#     exposed   a view of its slot in a buffer of the unit
#     hidden    unset: a placeholder of its shape, with one element of memory and a class that refuses reads and writes
#     left      the values that `close` gives it, or none
#
# Its `.grad` is empty, a gradient proxy (`engine/gradients/proxy.py`), or a tensor that the user has set. Only this
# module and `dtensor.py` write `parameter.data`. These methods run for every parameter in every forward.
# ----------------------------------------------------------------------------------------------------------------------


class UnitParameter:
    """One parameter of a unit.

    Arguments:
        tensor: the user's parameter, which still has memory of its own.
        index: the index of its slot.
        slot: where its elements are in the unit's flat buffer.

    Attributes:
        name: its name in the model.
        required_grad: True if it was trained, and not frozen, when it was prepared.
        proxy: its gradient proxy, once one was made.
        left: the value that the engine has left in `.grad`: the gradient proxy, or `None`.
        arrived: the gradient that autograd has added to the gradient proxy, until it is taken.
        counts: True if this rank's elements count in a norm: of those that `tp` ranks have alike, the first rank's do.
    """

    __slots__ = (
        "__weakref__",
        "_device",
        "_dtype",
        "_kind",
        "_released",
        "_version",
        "arrived",
        "counts",
        "index",
        "left",
        "name",
        "proxy",
        "required_grad",
        "slot",
        "tensor",
    )

    def __init__(self, tensor: nn.Parameter, index: int, slot: Slot, *, counts: bool) -> None:
        self.tensor = tensor
        self.index = index
        self.slot = slot
        self.name = slot.name
        self.required_grad = tensor.requires_grad
        self.proxy: Tensor | None = None
        self.left: Tensor | None = None
        self.arrived: Tensor | None = None
        self.counts = counts
        self._kind = type(tensor)
        self._released = released_class(self._kind)
        self._dtype = tensor.dtype
        self._device = tensor.device
        # Torch counts every write but those through `.data`, which are the engine's: another version is a user's write.
        self._version = tensor._version

    def placed(self, slot: Slot, index: int) -> "UnitParameter":
        """Return the same parameter with another slot, and with its state before `prepare`."""
        other = copy(self)
        other.slot, other.index, other.name = slot, index, slot.name
        other.proxy = other.left = other.arrived = None
        return other

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Its shape; of a DTensor that of the whole parameter."""
        region = self.slot.region
        return self.slot.shape if region is None else region.shape

    @property
    def memory(self) -> Tensor:
        """The tensor that has its memory: of a DTensor that of this rank's elements."""
        return own_elements(self.tensor)

    def view_in(self, buffer: Tensor) -> Tensor:
        """Return a view of its elements in the gathered buffer, or in another one like it, in its shape."""
        slot = self.slot
        return buffer[slot.start : slot.stop].view(slot.shape)

    def point_to(self, buffer: Tensor) -> None:
        """Make it point at its values: its slot in a buffer of the unit."""
        tensor, slot = self.tensor, self.slot
        tensor.__class__ = self._kind
        address = tensor.data_ptr()  # 0 for a tensor without elements
        is_view_already = (  # as a resident one is after each step
            address == buffer.data_ptr() + slot.start * buffer.itemsize
            and address != 0
            and tensor.dtype is buffer.dtype
            and tensor.shape == slot.shape
            and tensor.is_contiguous()
        )
        if not is_view_already:
            tensor.data = self.view_in(buffer)

    def unset(self, placeholder: Tensor) -> None:
        """Replace its values by a placeholder, of which one element stands for all."""
        self.tensor.__class__ = self._kind
        self.tensor.data = placeholder.expand(self.slot.shape)
        self.tensor.__class__ = self._released

    @property
    def is_hidden(self) -> bool:
        """Return True if it is a placeholder now."""
        return type(self.tensor) is self._released

    def take_in(self, full: Tensor) -> None:
        """Copy values that it was given with other memory (`parameter.data = ...`) into the gathered buffer.

        Raises:
            EngineError: they have another shape.
        """
        own, given = self.view_in(full), self.memory
        if given.shape != own.shape:
            raise EngineError(
                f"Parameter '{self.name}' was given values of shape {tuple(given.shape)}; it has {self.slot.shape}."
            )
        if given.data_ptr() != own.data_ptr():
            own.copy_(as_param(given.detach(), own.dtype))
            give_values(self.tensor, own)

    def leave(self, value: Tensor | None) -> None:
        """Return it to the user: with a value from `as_before`, or without elements."""
        self.hide_gradient()
        self.proxy = None
        self.tensor.__class__ = self._kind
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        give_values(self.tensor, empty if value is None else value)

    def as_before(self, value: Tensor) -> Tensor:
        """Return a value in the dtype and on the device that the parameter had before `prepare`."""
        return as_param(value, self._dtype).to(self._device)

    def note_version(self) -> None:
        """Accept its current values as those of storage and master: only writes after this are refused."""
        self._version = self.tensor._version

    def check_written(self) -> None:
        """Refuse values that the user wrote where no update starts from: a gathered copy, or one without its master.

        Raises:
            EngineError: torch has counted a write since `note_version`.
        """
        if self.tensor._version != self._version:
            raise EngineError(
                f"Parameter '{self.name}' was written outside gathered(modify=True), and its master weights were not. "
                "Set it again with set_full_param(), or write it inside."
            )

    def check_frozen(self) -> None:
        """Refuse a parameter that was unfrozen after `prepare`: it has no optimizer state.

        Raises:
            EngineError: it requires a gradient now.
        """
        if self.tensor.requires_grad and not self.required_grad:
            raise EngineError(
                f"Parameter '{self.name}' was frozen when the model was prepared, so it has no optimizer state, "
                "and requires a gradient now. Have it trained with optimizer.add_param_group({'params': [...]}) before "
                "its forward. What is to be frozen for a while only is frozen after prepare(), which keeps its state."
            )

    def take_gradient(self) -> Tensor:
        """Take the gradient that autograd has just left in `.grad`, which is empty afterwards.

        Raises:
            EngineError: it is sparse.
        """
        grad, self.arrived = self.tensor.grad if self.arrived is None else self.arrived, None
        assert grad is not None
        # Now, and not after the step: else the gradients of all units would be on the device at once, uncounted.
        self.tensor.grad = None
        self.left = None
        if grad.is_sparse:
            raise EngineError(f"Parameter '{self.name}' got a sparse gradient. Build its embedding with sparse=False.")
        return grad

    def drop_gradient(self) -> None:
        """Clear `.grad`, whatever it is."""
        self.tensor.grad = None
        self.left = None

    def show_gradient(self) -> None:
        """Set `.grad` to the gradient proxy."""
        self.tensor.grad = self.left = self.proxy

    def hide_gradient(self) -> None:
        """Clear `.grad` if it is a gradient proxy; a tensor that the user has set stays."""
        if self.proxy is not None and type(self.tensor.grad) is type(self.proxy):
            self.tensor.grad = None
        self.left = None


# ----------------------------------------------------------------------------------------------------------------------
# One parameter of a unit that is a DTensor.
# ----------------------------------------------------------------------------------------------------------------------


class DividedParameter(UnitParameter):
    """A DTensor parameter, whose slot holds this rank's elements."""

    __slots__ = ()

    def point_to(self, buffer: Tensor) -> None:
        """Make its elements point at its slot in a buffer of the unit."""
        self.tensor.__class__ = self._kind
        give_elements(self.tensor, self.view_in(buffer))

    def unset(self, placeholder: Tensor) -> None:
        """Replace its elements by a placeholder."""
        self.tensor.__class__ = self._kind
        # `to_local()` and `full_tensor()` look at the class of the elements, not at that of the parameter.
        give_elements(self.tensor, released_alias(placeholder.expand(self.slot.shape), self.name))
        self.tensor.__class__ = self._released

    def take_gradient(self) -> Tensor:
        """Take the gradient that autograd has left, and return this rank's elements. Collective over `tp` ranks.

        Raises:
            EngineError: it is sparse.
        """
        grad = super().take_gradient()
        return own_part(grad, self.tensor) if is_divided(grad) else grad


def make_parameters(
    tensors: tuple[nn.Parameter, ...], layout: FlatLayout, lines: Sequence[Sequence[int]] = (), rank: int = 0
) -> tuple[UnitParameter, ...]:
    """Make the parameters of a unit, before their own memory is freed.

    Arguments:
        tensors: the parameters.
        layout: their slots.
        lines: the ranks of each dimension of the mesh over which parameters are divided, this one among them.
        rank: this one.
    """
    return tuple(
        (DividedParameter if is_divided(tensor) else UnitParameter)(
            tensor, index, slot, counts=counts_once(tensor, lines, rank)
        )
        for index, (tensor, slot) in enumerate(zip(tensors, layout.slots, strict=True))
    )
