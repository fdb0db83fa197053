"""Forward and backward on fake tensors: every operation is seen, few run, what each costs is told.

Views run: they are of addresses. What is made of real tensors runs where it is small: masks and positions are what they
would be. All else does not run, and what it returns is fake.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ConfigError, one_line
from penstock.planner.simulation.expected_values import ExpectedValues
from penstock.planner.simulation.fake_collectives import NAMESPACES, FakeCollectives
from penstock.planner.simulation.fake_tensor import fake_tensor, is_fake, mark, space
from penstock.planner.simulation.memory import Memory, rounded
from penstock.planner.simulation.operation_cost import FREE, LIKE, cost, tensors_in
from penstock.planner.simulation.program import Collective, Op
from penstock.planner.simulation.shapes import UNTOLD, NoShapesError, Oracle, Outcome, Shaped, asks_for_shapes, over
from penstock.planner.simulation.value_reads import ValueReads

aten = torch.ops.aten

#: What is made of real values runs up to here, per operation.
SMALL_BYTES = 4 << 20

_PLAIN = (Tensor, torch.nn.Parameter)

_INSTEAD = "run `penstock plan --measure`, which takes two real steps instead"

#: Returns what shares memory with its argument, and does not say so.
_SHARING = frozenset((aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk, aten.set_))

#: Looks at shapes alone.
_ASKING = frozenset((aten._fused_sdp_choice, aten.is_same_size, torch.ops.prim.device, aten.is_pinned))

#: Arguments that are written, of operations that do not say so: running means and variances.
_UNSAID = {aten.native_batch_norm: (3, 4), aten.cudnn_batch_norm: (3, 4), aten.miopen_batch_norm: (3, 4)}


class _Way(Enum):
    """How an operation is treated, whatever it is called with."""

    RUN = "run"  # views, questions about shapes
    BETWEEN = "between"  # collectives, of ranks that are not there
    PARTS = "parts"  # torch has it as a composition of others, which are treated instead
    LIKE = "like"  # values of what it takes do not matter
    RESIZE = "resize"
    OTHER = "other"


class _Kind(NamedTuple):
    """What an overload's schema says.

    Attributes:
        way: how it is treated.
        written: which arguments it writes, by position or name.
        returned: for each result, which argument it is; `None` where it is a new tensor.
        free: whether it computes nothing.
    """

    way: _Way
    written: tuple[int | str, ...]
    returned: tuple[int | str | None, ...]
    free: bool


class Recipe(NamedTuple):
    """How to run an operation like one that was simulated.

    Attributes:
        func: the overload.
        args: its arguments, a `Shaped` in place of each tensor.
        kwargs: likewise.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class FakeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which operations on fake tensors are not run. It draws no random numbers for them.

    Arguments:
        sink: told of each operation that is not a view, in order.
        module: says which module is in flight, for errors; empty where none is.
        share: of ones in masks whose share is not known, between 0 and 1.
        memory: where tensors that are made inside are counted; one of its own where none is given.
        collectives: told of each collective of several ranks that the model itself issues.

    Attributes:
        memory: bytes of tensors that were made inside and are still there.
        recipes: for each kind of operation one example.

    Raises:
        ConfigError: inside, where an operation needs values that there are none of, or torch knows no shapes for one.

    Example:
        >>> from penstock.planner.simulation.fake_tensor import adopt, fake
        >>> model = torch.nn.Linear(1 << 20, 1 << 20, device="meta")
        >>> adopt(model)
        >>> with Simulated() as simulated:
        ...     model(fake((8, 1 << 20), torch.float32)).sum().backward()
        >>> model.weight.grad.shape
        torch.Size([1048576, 1048576])
    """

    stays = True  # on our side of the border: operations of the engine are simulated as the user's are

    def __init__(
        self,
        sink: Callable[[Op], object] | None = None,
        *,
        module: Callable[[], str] = lambda: "",
        share: float | None = None,
        memory: Memory | None = None,
        collectives: Callable[[Collective], object] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = Memory() if memory is None else memory
        self.recipes: dict[Op, Recipe] = {}
        self._sink = sink
        self._module = module
        self._expected = ExpectedValues(share)
        self._oracle = Oracle()
        self._kinds: dict[Any, _Kind] = {}
        self._outcomes: dict[Any, Outcome] = {}
        self._stances: list[Any] = []
        self._reading = ValueReads(self.refusal)
        self._between = FakeCollectives(self.make, self.refusal, collectives)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch call the mode itself: nothing is compiled inside of it, and a guard at each call takes as long."""
        return False

    def __enter__(self) -> "FakeOperations":
        # What was compiled runs its own Python instead: kernels that were made for it would touch the memory. Torch
        # has not compiled anything where its compiler was never imported, which takes a second.
        self._stances.append(torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None)
        super().__enter__()  # type: ignore[no-untyped-call]
        if len(self._stances) == 1:  # parts of operations are simulated in a block inside of it
            self._reading.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        if len(self._stances) == 1:
            self._reading.__exit__(*raised)  # type: ignore[no-untyped-call]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        stance = self._stances.pop()
        if stance is not None:
            stance.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or return what it would return."""
        if asks_for_shapes():
            return func(*args, **({} if kwargs is None else kwargs))
        if types and any(each not in _PLAIN for each in types):
            return NotImplemented  # a class of tensors with rules of its own: it comes back with what it consists of
        kwargs = {} if kwargs is None else kwargs
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.way is _Way.RUN:
            return func(*args, **kwargs)
        if kind.way is _Way.BETWEEN:
            return self._between.run(func, args, kwargs)
        if kind.way is not _Way.OTHER and (settled := self._settled(kind, func, args, kwargs)) is not None:
            return settled[0]
        signature: list[Any] = [func]
        empty = _sign(args, signature)
        if kwargs:
            empty = _sign(kwargs, signature) or empty
        if empty is None:
            return func(*args, **kwargs)  # of tensors on the meta device
        key = tuple(signature)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._outcomes[key] = self._ask(func, args, kwargs, real=not empty)
        if outcome.nbytes <= SMALL_BYTES and (not empty or kind.way is _Way.LIKE):
            return self._run(kind, outcome, func, args, kwargs)
        if outcome.dependent:
            out, op = self._expected.settle(self, func, args, kwargs)
            if op is not None:
                self._note(kind, op)
            return out
        self._note(kind, outcome.op)
        return self._hollow(kind, outcome, func, args, kwargs)

    def make(self, shaped: Shaped) -> Tensor:
        """Make a fake tensor and count its memory."""
        nbytes = rounded(shaped.nbytes)
        if not nbytes:
            return fake_tensor(shaped.shape, shaped.dtype, shaped.strides)
        tensor = fake_tensor(shaped.shape, shaped.dtype, shaped.strides, freed=partial(self.memory.remove, nbytes))
        self.memory.add(nbytes)
        return tensor

    def refusal(self, func: Any, why: str) -> ConfigError:
        """Return the error of an operation that cannot be simulated."""
        module = self._module()
        where = f" in module {module!r}" if module else ""
        return ConfigError(f"simulation: {func}{where} {why}; {_INSTEAD}")

    def _settled(self, kind: _Kind, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any] | None:
        """Return the result of an operation that is not treated by its shapes; `None` where it is one that is."""
        if kind.way is _Way.PARTS:
            with self:
                out = func.decompose(*args, **kwargs)
            return None if out is NotImplemented else (out,)
        if kind.way is _Way.RESIZE and is_fake(args[0]):
            tensor, shape = args[0], tuple(args[1])
            larger = self.make(Shaped.of(torch.empty(shape, dtype=tensor.dtype, device="meta")))
            return (tensor.set_(larger.untyped_storage(), 0, larger.shape, larger.stride()),)
        return None

    def _ask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, real: bool) -> Outcome:
        try:
            outcome = self._oracle.ask(func, args, kwargs)
        except NoShapesError as error:
            if not real:
                raise self.refusal(func, f"has no rule for shapes in torch ({one_line(str(error))})") from error
            return UNTOLD
        if not outcome.dependent and outcome.op not in self.recipes:
            self.recipes[outcome.op] = Recipe(func, _without_values(args), _without_values(kwargs))
        return outcome

    def _note(self, kind: _Kind, op: Op) -> None:
        if self._sink is not None and not kind.free:
            self._sink(op)

    def _run(self, kind: _Kind, outcome: Outcome, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of real tensors."""
        out = func(*args, **kwargs)
        self._note(kind, cost(func, args, kwargs, out) if outcome.dependent else outcome.op)
        if None in kind.returned:
            for position, part in enumerate(out if len(kind.returned) > 1 else (out,)):
                if kind.returned[position] is None:
                    for tensor in tensors_in(part):
                        self.memory.follow(tensor)
        return out

    def _hollow(self, kind: _Kind, outcome: Outcome, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation would, without running it. What it writes is unknown from here on."""
        for which in kind.written:
            for tensor in tensors_in(_argument(which, args, kwargs)):
                mark(tensor)
        results, returned = outcome.results, kind.returned
        if len(returned) == 1:
            out = self._result(results, returned[0], args, kwargs)
        else:  # nothing, or several
            whole = zip(results, returned, strict=True) if returned else ()
            out = tuple(self._result(shaped, which, args, kwargs) for shaped, which in whole) or None
        self._expected.follow(func, args, kwargs, out, kind.written)
        return out

    def _result(self, shaped: Any, which: int | str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if which is not None:
            return _argument(which, args, kwargs)
        return self.make(shaped) if isinstance(shaped, Shaped) else over(shaped, self._each)

    def _each(self, shaped: Any) -> Any:
        return self._result(shaped, None, (), {})


def _argument(which: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(which, str):
        return kwargs.get(which)
    return args[which] if which < len(args) else None


def _without_values(value: Any) -> Any:
    return Shaped.of(value) if isinstance(value, Tensor) else over(value, _without_values)


def _kind_of(func: Any) -> _Kind:
    """Read an overload's schema."""
    packet, schema = func._overloadpacket, func._schema
    free = packet in FREE
    places: dict[str, int | str] = {}
    written = [*_UNSAID.get(packet, ())]
    for position, argument in enumerate(schema.arguments):
        place = argument.name if argument.kwarg_only else position
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(place)
            places.update(dict.fromkeys(argument.alias_info.before_set, place))
    returned = tuple(_which(result, places) for result in schema.returns)
    return _Kind(_way_of(func, packet), tuple(written), returned, free)


def _which(result: Any, places: Mapping[str, int | str]) -> int | str | None:
    names = () if result.alias_info is None else result.alias_info.before_set
    return next((places[name] for name in names if name in places), None)


def _way_of(func: Any, packet: Any) -> _Way:
    if packet is aten.resize_:
        return _Way.RESIZE
    if func.is_view or torch.Tag.inplace_view in func.tags or packet in _SHARING or packet in _ASKING:
        return _Way.RUN
    if func.namespace in NAMESPACES:
        return _Way.BETWEEN
    if packet in LIKE and packet not in FREE and torch.Tag.nondeterministic_seeded not in func.tags:
        return _Way.LIKE
    own, parts = (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CompositeImplicitAutograd")
    )
    if parts and not own:
        return _Way.PARTS
    return _Way.OTHER


def _sign(values: Any, signature: list[Any]) -> bool | None:
    """Append what an operation's outcome depends on, as far as its arguments go.

    Returns:
        Whether a tensor among them is fake; `None` where one is on the meta device.
    """
    known = space()
    start, end, marked = known.start, known.end, known.marked
    empty = False
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            if value.is_meta:
                return None
            if value.layout is not torch.strided:
                signature.append((value.shape, value.layout, value.dtype))
                continue
            signature.append((value.shape, value.stride(), value.dtype))
            empty = empty or start <= value.data_ptr() < end or (len(marked) > 0 and bool(marked.get(value)))
        elif isinstance(value, (list, tuple)):
            signature.append(len(value))
            inside = _sign(value, signature)
            if inside is None:
                return None
            empty = empty or inside
        else:
            signature.append(type(value))
            signature.append(value)
    if isinstance(values, dict):
        signature.append(tuple(values))
    return empty
