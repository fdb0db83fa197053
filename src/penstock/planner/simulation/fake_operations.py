"""Forward and backward on fake tensors: every operation is seen, few run, what each costs is told.

Views run: they are of addresses. What is made of real tensors runs where it is small: masks and positions are what they
would be. All else does not run, and what it returns is fake.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ConfigError, one_line
from penstock.planner.simulation.expected_values import ExpectedValues
from penstock.planner.simulation.fake_collectives import NAMESPACES, fake_collective
from penstock.planner.simulation.fake_tensor import Memory, Shaped, is_fake, mark, rounded, space
from penstock.planner.simulation.operation_cost import (
    FREE,
    LIKE,
    Argument,
    NoShapesError,
    Oracle,
    Outcome,
    Recipe,
    cost,
    name_of,
    tensors_in,
)
from penstock.planner.simulation.program import Collective, Op

aten = torch.ops.aten

#: What is made of real values runs up to here, per operation.
SMALL_BYTES = 4 << 20

_PLAIN = (Tensor, torch.nn.Parameter)

_INSTEAD = "run `penstock plan --measure`, which takes two real steps instead"
_SPREAD = 0.02  # of random values: those that most models begin with

#: What reads values and is no operation of torch: into Python's lists, numpy's arrays, other libraries' memory.
_READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))

#: Returns what shares memory with its argument, and does not say so.
_SHARING = frozenset(("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "set_"))

#: Looks at shapes alone.
_ASKING = frozenset((aten._fused_sdp_choice, aten.is_same_size, torch.ops.prim.device, aten.is_pinned))

#: Arguments that are written, of operations that do not say so: running means and variances.
_UNSAID = {"native_batch_norm": (3, 4)}


class _Way(Enum):
    """How an operation is treated, whatever it is called with."""

    RUN = "run"  # views, questions about shapes
    COLLECTIVE = "collective"  # of ranks that are not there
    PARTS = "parts"  # torch has it as a composition of others, which are treated instead
    LIKE = "like"  # values of what it takes do not matter
    OTHER = "other"


class _Kind(NamedTuple):
    """What an overload's schema says.

    Attributes:
        name: without its overload; empty where it is not torch's own.
        way: how it is treated.
        written: which arguments it writes, by position or name.
    """

    name: str
    way: _Way
    written: Sequence[int | str]


class FakeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which operations on fake tensors are not run. It draws no random numbers for them.

    Arguments:
        sink: told of each operation that is not a view, in order.
        module: says which module is in flight, for errors; empty where none is.
        share: of ones in masks whose share is not known, between 0 and 1.
        memory: where tensors that are made inside are counted; one of its own where none is given.
        collectives: told of each collective of several ranks that the model itself issues; none is sent.
        runs: whether all operations run for real, and are told all the same: for models whose control flow depends on
            values.
        oracle: tells shapes; simulations that share one ask torch once.

    Attributes:
        memory: bytes of tensors that were made inside and are still there.
        recipes: for each kind of operation that the oracle was asked for one example.

    Raises:
        ConfigError: inside, where an operation needs values that there are none of, or torch knows no shapes for one.

    Example:
        >>> from penstock.planner.simulation.fake_tensor import fake_tensor
        >>> from penstock.planner.simulation.model_copy import copy_model
        >>> model = copy_model(torch.nn.Linear(1 << 20, 1 << 20, device="meta"))
        >>> with FakeOperations() as simulated:
        ...     model(fake_tensor((8, 1 << 20), torch.float32)).sum().backward()
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
        runs: bool = False,
        oracle: Oracle | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = Memory() if memory is None else memory
        self._sink = sink
        self._module = module
        self._runs = runs
        self._expected = ExpectedValues(self.make, self.refusal, share)
        self._oracle = oracle or Oracle()
        self.recipes = self._oracle.recipes
        self._kinds: dict[Any, _Kind] = {}
        self._collectives = collectives
        self._around = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch call the mode itself: nothing is compiled inside of it, and a guard at each call takes as long."""
        return False

    def __enter__(self) -> "FakeOperations":
        # What was compiled runs its own Python instead: kernels that were made for it would touch the memory. Torch
        # has not compiled anything where its compiler was never imported, which takes a second.
        if "torch._dynamo" in sys.modules:
            self._around.enter_context(torch.compiler.set_stance("force_eager"))
        if not self._runs:
            self._around.enter_context(_ValueReads(self.refusal))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, or return what it would return."""
        kwargs = {} if kwargs is None else kwargs
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # somebody else asks torch for shapes, as DTensor does before each operation
        if types and any(each not in _PLAIN for each in types):
            return NotImplemented  # a class of tensors with rules of its own: it comes back with what it consists of
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind.way is _Way.RUN:
            return func(*args, **kwargs)
        if kind.way is _Way.COLLECTIVE:
            try:
                return fake_collective(func, args, kwargs, self.make, self._collectives)
            except NotImplementedError as error:
                raise self.refusal(func, "is a collective that no simulation knows") from error
        if kind.way is _Way.PARTS and (out := self._in_parts(func, args, kwargs)) is not NotImplemented:
            return out
        signature: list[Any] = [func]
        empty = _sign(args, signature)
        if kwargs:
            empty = _sign(kwargs, signature) or empty
        if empty is None:
            return func(*args, **kwargs)  # of tensors on the meta device
        key = tuple(signature)
        outcome = self._oracle.outcomes.get(key) or self._ask(key, func, args, kwargs, real=self._runs or not empty)
        if self._runs or (outcome.nbytes <= SMALL_BYTES and (not empty or kind.way is _Way.LIKE)):
            return self._run(kind, outcome, func, args, kwargs)
        if outcome.op is None:
            if kind.name in ("index", "_unsafe_index"):
                args = (args[0], self._expected.indices(func, args[1]))
                return self.__torch_dispatch__(func, types, args, kwargs)
            out = self._expected.settle(func, args)
            if isinstance(out, Tensor):
                self._note(kind, cost(func, args, kwargs, out))
            return out
        self._note(kind, outcome.op)
        return self._simulated(kind, outcome, args, kwargs)

    def make(self, shaped: Shaped) -> Tensor:
        """Make a fake tensor, or zeros where operations run, and count its memory."""
        if self._runs:
            made = torch.zeros(shaped.shape, dtype=shaped.dtype, device="cpu")
            self.memory.follow(made)
            return made
        nbytes = rounded(shaped.nbytes)
        self.memory.add(nbytes)
        return shaped.fake(partial(self.memory.remove, nbytes))

    def refusal(self, func: Any, why: str) -> ConfigError:
        """Return the error of an operation that cannot be simulated."""
        module = self._module()
        where = f" in module {module!r}" if module else ""
        instead = "leave it out, or plan without --measure" if self._runs else _INSTEAD
        return ConfigError(f"simulation: {func}{where} {why}; {instead}")

    def _in_parts(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _ask(self, key: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, real: bool) -> Outcome:
        try:
            outcome = self._oracle.outcomes[key] = self._oracle.ask(func, args, kwargs)
        except NoShapesError as error:
            if not real:
                raise self.refusal(func, f"has no rule for shapes in torch ({one_line(str(error))})") from error
            return Outcome(None, 0, None, Recipe(func, (), {}))
        return outcome

    def _note(self, kind: _Kind, op: Op) -> None:
        if self._sink is not None and kind.name not in FREE:
            self._sink(op)

    def _run(self, kind: _Kind, outcome: Outcome, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of real tensors."""
        out = func(*args, **kwargs)
        op = outcome.op
        if op is None:
            op = cost(func, args, kwargs, out)
            self.recipes.setdefault(op, outcome.recipe)
        self._note(kind, op)
        given = set(map(id, tensors_in((args, kwargs))))
        for tensor in tensors_in(out):
            if id(tensor) not in given:
                self.memory.follow(tensor)
        return out

    def _simulated(self, kind: _Kind, outcome: Outcome, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation would, without running it. What it writes is unknown from here on."""
        written: list[Tensor] = []
        for which in kind.written:
            written += tensors_in(kwargs.get(which) if isinstance(which, str) else args[which : which + 1])
        for tensor in written:
            mark(tensor)
        given = [] if isinstance(outcome.results, Shaped) else list(tensors_in((args, kwargs)))
        out = self._result(outcome.results, given)
        self._expected.follow(kind.name, args, out, written)
        return out

    def _result(self, part: Any, given: Sequence[Tensor]) -> Any:
        """Make what is returned: a fake tensor, one of those that were given, or several."""
        if isinstance(part, Shaped):
            return self.make(part)
        if isinstance(part, list | tuple):
            return type(part)(self._result(each, given) for each in part)
        return given[part.number] if isinstance(part, Argument) else part


class _ValueReads(TorchFunctionMode):
    """A block in which values of fake tensors cannot be read past torch's operations: they would read as zeros.

    Arguments:
        refusal: makes the error, of what reads and of why not.
    """

    def __init__(self, refusal: Callable[[Any, str], Exception]) -> None:
        super().__init__()
        self._refusal = refusal

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or refuse it."""
        if func in _READS and args and is_fake(args[0]):
            raise self._refusal(f"Tensor.{func.__name__}", "reads a value, and a simulation has none")
        return func(*args, **(kwargs or {}))


def random_values(buffer: Tensor) -> None:
    """Fill a buffer with random values, as parameters have at the start."""
    if buffer.is_floating_point():
        buffer.normal_(0.0, _SPREAD)
    else:
        buffer.zero_()


def _kind_of(func: Any) -> _Kind:
    """Read an overload's schema."""
    written = [
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    name = name_of(func)
    return _Kind(name, _way_of(func, name), [*written, *_UNSAID.get(name, ())])


def _way_of(func: Any, name: str) -> _Way:
    if func.is_view or torch.Tag.inplace_view in func.tags or name in _SHARING or func._overloadpacket in _ASKING:
        return _Way.RUN
    if func.namespace in NAMESPACES:
        return _Way.COLLECTIVE
    if name in LIKE - FREE and torch.Tag.nondeterministic_seeded not in func.tags:
        return _Way.LIKE
    own, parts = (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CompositeImplicitAutograd")
    )
    return _Way.PARTS if parts and not own else _Way.OTHER


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
