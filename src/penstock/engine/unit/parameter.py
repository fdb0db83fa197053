"""A parameter of a unit: gathered, released, read and written."""

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
# A backward through a graph from before a change is an error, as in torch: the versions of tensors say so.
#
# torch compares the version of what it saved with the one that it has in backward. Updates write parameters where torch
# does not see it, so they are counted here. What passes saved-tensor hooks, or is computed again, torch does not
# compare.
# ----------------------------------------------------------------------------------------------------------------------


def check_version(tensor: Tensor, expected: int, what: str = "") -> None:
    """Refuse to compute with a tensor that was written since it had a version.

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
    """The version that a tensor has now. The tensor's counter is kept, and not its memory."""

    __slots__ = ("_counter", "_expected")

    def __init__(self, tensor: Tensor) -> None:
        self._expected = 0 if tensor.is_inference() else tensor._version
        self._counter = tensor.detach()  # it has the same counter
        self._counter.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse to compute with the tensor if it was written since. Raises what `check_version` does."""
        check_version(self._counter, self._expected)


class KeptSavedTensor:
    """A tensor that a saved-tensor hook leaves where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An output of the node that saves it would keep that node, and with it itself. A parameter has no node, and its
        # values may move.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = 0 if tensor.is_inference() else tensor._version

    def take(self) -> Tensor:
        """Give the tensor back; refuse if it was written since. Raises what `check_version` does."""
        check_version(self._tensor, self._version)
        return self._tensor


# ----------------------------------------------------------------------------------------------------------------------
# Hooks of autograd that keep nothing alive: torch does not show collection what a parameter's hook refers to.
# ----------------------------------------------------------------------------------------------------------------------


def weakly(method: Callable[..., Any], owner: object, *values: int) -> Callable[..., None]:
    """Call a bound method with `owner`, the values and what else comes, as long as its object and `owner` are there.

    A parameter would else keep its engine, and the engine that parameter, for ever.
    """
    of, reference = WeakMethod(method), ref(owner)

    def hook(*arguments: Any) -> None:
        # Both held for the length of the call: collection may come between the question and the use.
        bound, first = of(), reference()
        if bound is not None and first is not None:
            bound(first, *values, *arguments)

    return hook


# ----------------------------------------------------------------------------------------------------------------------
# The class of a parameter while its unit is released: its values are not there, and torch cannot use them by mistake.
#
# `parameter.__class__` is a subclass of its own class from `hide` to `expose`, as torch's lazy parameters do it. Torch
# asks `__torch_function__` of that subclass before it runs an operation:
#
#     shape, dtype, grad, hooks, ...   answered: they need no values
#     `.data`                          answered by an alias that is released too, for its shape and dtype
#     all else                         inside a forward of the model: the unit is gathered, then the operation runs
#                                      anywhere else: an `EngineError` that names the parameter
#
# A parameter that is there has its own class, so an operation of the model costs nothing more. Code of ours runs with
# `__torch_function__` off (`runtime/modes.py`).
# ----------------------------------------------------------------------------------------------------------------------


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


class ParameterOwner:
    """The owner of a parameter, without keeping it alive. Pickled with a parameter, it comes back as `None`.

    Arguments:
        read: a bound method of the owner, which gathers the parameter if a forward of the model is under way in this
            thread; `None` where nobody may gather it.
        name: the parameter's name in the model.
    """

    def __init__(self, read: Callable[[nn.Parameter], None] | None = None, name: str = "") -> None:
        self._read = (lambda: None) if read is None else WeakMethod(read)
        self.name = name

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave the engine in this process, and nothing of ours in the file."""
        return type(None), ()

    def is_alive(self) -> bool:
        """Return True if the owner is there still."""
        return self._read() is not None

    def read(self, parameter: nn.Parameter) -> None:
        """Have the owner gather the parameter, if it may."""
        read = self._read()
        if read is not None:
            read(parameter)


class ReleasedTensor(Tensor):
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
        """Name the parameter. Printing is no use of it."""
        return f"<released parameter {_described(self)}; optimizer.full_param(parameter) is its value>"

    def __format__(self, spec: str) -> str:
        """Format as text."""
        return format(repr(self), spec)


class ReleasedParameter(ReleasedTensor, nn.Parameter):
    """A plain parameter while its unit is released."""


def released_class(kind: type[Any]) -> type[Any]:
    """Return the class of a tensor while it is released; make it if the tensor's own class is no plain one."""
    if issubclass(kind, ReleasedTensor):
        return kind
    if kind is nn.Parameter:
        return ReleasedParameter
    return new_class(f"Released{kind.__name__}", (ReleasedTensor, kind))


def released_alias(tensor: Tensor, name: str) -> Tensor:
    """Make a tensor of placeholders refuse reads and writes in the name of its parameter, for good."""
    tensor.__class__ = ReleasedTensor
    vars(tensor)[OWNER] = ParameterOwner(name=name)
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


def _owner_of(tensor: Any) -> ParameterOwner:
    owner: ParameterOwner = vars(tensor).get(OWNER) or ParameterOwner()
    return owner


def _described(tensor: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"'{_owner_of(tensor).name}' {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


# ----------------------------------------------------------------------------------------------------------------------
# Look-ups of released parameters: their unit is gathered before the module hands one out.
#
# Attention reads its output projection's weight, a parent its child's, a block runs by its `forward` method alone: no
# hook of a module tells. What every such read passes is the dict that `Module.__getattr__` looks into. So while
# parameters are released, the modules that own them have one that tells; a module whose parameters are there has the
# dict it always had, which compilers know. The class of a released parameter comes too late for some of these reads:
# `nn.TransformerEncoder` takes another path for it, scripted functions and extensions in C++ do not ask it.
# ----------------------------------------------------------------------------------------------------------------------


Named = dict[str, Any]


class ReadWatch:
    """Watches the parameters of one module, while any of them is released, for reads.

    Arguments:
        module: the module that owns the parameters.
        read: called with a released parameter that is looked up, before it is handed out.
    """

    def __init__(self, module: nn.Module, read: Callable[[Any], None]) -> None:
        self._module = module
        self._plain: Named = module._parameters
        self._watched: Named = _WatchedParameters(read)

    def update(self) -> None:
        """Watch from now on, or no longer: parameters were released or gathered."""
        old: Named = self._module._parameters
        new = self._plain
        for parameter in old.values():
            if isinstance(parameter, ReleasedTensor):
                new = self._watched
                break
        if old is not new:  # else it would be cleared, and be empty
            new.clear()
            new.update(old)  # with what was registered or deleted since
            self._module.__dict__["_parameters"] = new  # Module.__setattr__ looks for modules and buffers first

    def end(self) -> None:
        """Leave the module as it was found."""
        self._watched = self._plain
        self.update()


class _WatchedParameters(Named):
    """Parameters by name, telling of each released one that is looked up."""

    def __init__(self, read: Callable[[Any], None]) -> None:
        super().__init__()
        self._read = read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if isinstance(parameter, ReleasedTensor):
            # Before the look-up returns: the caller gets the same object, and would compute with NaN.
            self._read(parameter)
        return parameter


# ----------------------------------------------------------------------------------------------------------------------
# One parameter of a unit: its place in the full buffer, what it shows now, and what it was before `prepare`.
#
#     shown     a view of its slot in a buffer of the unit
#     hidden    a placeholder: its real shape, one element of memory, and a class that refuses reads and writes
#     left      the values that the engine leaves it with, or none
#
# Its `.grad` is empty, or a handle of ours that stands for the gradient (`engine/gradients/proxy.py`), or a tensor that
# somebody has set. Only this module and `dtensors.py` write `parameter.data`. These methods run
# for every parameter in every forward.
# ----------------------------------------------------------------------------------------------------------------------


class UnitParameter:
    """One parameter of a unit.

    Arguments:
        tensor: the user's own parameter, which still has memory of its own.
        index: the number of its slot.
        slot: where its elements are in the unit's flat buffer.

    Attributes:
        name: its name in the model.
        required_grad: whether it was trained, and not frozen, when it was prepared.
        handle: what stands for its gradient in `.grad`, once one was made.
        left: what the engine has left in `.grad`: the handle, or nothing.
        arrived: the gradient that autograd has added to the handle, until it is taken.
        counts: whether this rank's elements count in a norm: of those that `tp` ranks have alike, the first one's do.
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
        "handle",
        "index",
        "left",
        "name",
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
        self.handle: Tensor | None = None
        self.left: Tensor | None = None
        self.arrived: Tensor | None = None
        self.counts = counts
        self._kind = type(tensor)
        self._released = released_class(self._kind)
        self._dtype = tensor.dtype
        self._device = tensor.device
        # Torch counts every write but those through `.data`, which are ours: another number tells that people wrote.
        self._version = tensor._version

    def placed(self, slot: Slot, index: int) -> "UnitParameter":
        """Note the same parameter in another place. What it was before `prepare` stays noted."""
        other = copy(self)
        other.slot, other.index, other.name = slot, index, slot.name
        other.handle = other.left = other.arrived = None
        return other

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Its shape; of one that ranks divide, that of the whole."""
        region = self.slot.region
        return self.slot.shape if region is None else region.shape

    @property
    def memory(self) -> Tensor:
        """The tensor whose memory it shows: of one that ranks divide, that of this rank's elements."""
        return own_elements(self.tensor)

    def view_in(self, buffer: Tensor) -> Tensor:
        """View its elements in the unit's full buffer, or in another one like it, in its shape."""
        slot = self.slot
        return buffer[slot.start : slot.stop].view(slot.shape)

    def expose(self, buffer: Tensor) -> None:
        """Make it a view of its slot in a buffer of the unit."""
        tensor, slot = self.tensor, self.slot
        tensor.__class__ = self._kind
        address = tensor.data_ptr()  # 0 says nothing: what has no elements has no address
        is_view_already = (  # as a resident one is after each step
            address == buffer.data_ptr() + slot.start * buffer.itemsize
            and address != 0
            and tensor.dtype is buffer.dtype
            and tensor.shape == slot.shape
            and tensor.is_contiguous()
        )
        if not is_view_already:
            tensor.data = self.view_in(buffer)

    def hide(self, placeholder: Tensor) -> None:
        """Make it a placeholder: one element that stands for all of them."""
        self.tensor.__class__ = self._kind
        self.tensor.data = placeholder.expand(self.slot.shape)
        self.tensor.__class__ = self._released

    @property
    def is_hidden(self) -> bool:
        """Return True if it is a placeholder now."""
        return type(self.tensor) is self._released

    def take_in(self, full: Tensor) -> None:
        """Put values that were given to it with other memory (`parameter.data = ...`) into the full buffer.

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
        """Leave it to the user: with a value that is `as_before`, or without elements."""
        self.hide_gradient()
        self.handle = None
        self.tensor.__class__ = self._kind
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        give_values(self.tensor, empty if value is None else value)

    def as_before(self, value: Tensor) -> Tensor:
        """Bring a value to the dtype and to the device that the parameter had before `prepare`."""
        return as_param(value, self._dtype).to(self._device)

    def note_version(self) -> None:
        """Take what it shows for what its home and its master say: only writes after this are refused."""
        self._version = self.tensor._version

    def check_written(self) -> None:
        """Refuse values that somebody wrote where no update starts from: in a gathered copy, or half its master.

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
        # Now, not after the step: gradients of all units would be on the device at once, in memory that no tier counts.
        self.tensor.grad = None
        self.left = None
        if grad.is_sparse:
            raise EngineError(f"Parameter '{self.name}' got a sparse gradient. Build its embedding with sparse=False.")
        return grad

    def drop_gradient(self) -> None:
        """Forget a `.grad` that autograd has left, or somebody has set, or that stands for ours."""
        self.tensor.grad = None
        self.left = None

    def show_gradient(self) -> None:
        """Put the handle into `.grad`."""
        self.tensor.grad = self.left = self.handle

    def hide_gradient(self) -> None:
        """Take the handle out of `.grad`; what somebody has set stays."""
        if self.handle is not None and type(self.tensor.grad) is type(self.handle):
            self.tensor.grad = None
        self.left = None


# ----------------------------------------------------------------------------------------------------------------------
# One parameter of a unit that is a DTensor: the seam of `parameter.py`, to this rank's elements of it.
# ----------------------------------------------------------------------------------------------------------------------


class DividedParameter(UnitParameter):
    """A parameter whose slot holds this rank's elements of it."""

    __slots__ = ()

    def expose(self, buffer: Tensor) -> None:
        """Make its elements a view of its slot in a buffer of the unit."""
        self.tensor.__class__ = self._kind
        give_elements(self.tensor, self.view_in(buffer))

    def hide(self, placeholder: Tensor) -> None:
        """Make its elements a placeholder."""
        self.tensor.__class__ = self._kind
        # `to_local()` and `full_tensor()` do not ask the class of the parameter, but that of its elements.
        give_elements(self.tensor, released_alias(placeholder.expand(self.slot.shape), self.name))
        self.tensor.__class__ = self._released

    def take_gradient(self) -> Tensor:
        """Take the gradient that autograd has left, and give this rank's elements of it. Collective over `tp` ranks.

        Raises:
            EngineError: it is sparse.
        """
        grad = super().take_gradient()
        return own_part(grad, self.tensor) if is_divided(grad) else grad


def make_parameters(
    tensors: tuple[nn.Parameter, ...], layout: FlatLayout, lines: Sequence[Sequence[int]] = (), rank: int = 0
) -> tuple[UnitParameter, ...]:
    """Note what the parameters of a unit are, before they give up their own memory.

    Arguments:
        tensors: the parameters.
        layout: their places.
        lines: the ranks of each dimension of the mesh over which parameters are divided, this one among them.
        rank: this one.
    """
    return tuple(
        (DividedParameter if is_divided(tensor) else UnitParameter)(
            tensor, index, slot, counts=counts_once(tensor, lines, rank)
        )
        for index, (tensor, slot) in enumerate(zip(tensors, layout.slots, strict=True))
    )
