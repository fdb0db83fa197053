"""Rules of other optimizers, traced from their own step."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from penstock._native import Pool
from penstock.errors import ConfigError, one_line
from penstock.rules.formats import StateFormat, read_master, read_state, write_param, write_state
from penstock.rules.rule import BLOCK_NUMEL, Rule, Scalars, StateSpec, StepScalars, UpdateSlice, check_options, fp32

# ----------------------------------------------------------------------------------------------------------------------
# A user's own optimizer class, run on tensors of its own.
# ----------------------------------------------------------------------------------------------------------------------


#: The state that a class keeps of a parameter, by name.
State = dict[str, Any]


#: The least learning rate and weight decay of a trial.
_LEAST_LR, _LEAST_DECAY = 1e-2, 0.1


@dataclass(frozen=True, eq=False)
class GenericScalars(StepScalars):
    """A group's options at one step, and the scalars of the parameters that share them.

    Arguments:
        group: the group's options, without its parameters.
        step: the number of the update, 1 at the first.
        scalars: the parameters' own scalars, as they are before the update.
    """

    group: Mapping[str, Any]
    step: int
    scalars: Scalars

    @property
    def keeps_zeros(self) -> bool:
        """False: the class may make anything of zeros."""
        return False

    def __eq__(self, other: object) -> bool:
        """Return True if the update is the same: `step()` asks it of updates that began in backward."""
        if not isinstance(other, GenericScalars):
            return NotImplemented
        return self.step == other.step and alike(self.group, other.group) and alike(self.scalars, other.scalars)

    def __hash__(self) -> int:
        return hash(self.step)


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if options are the same by value."""
    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal; values that cannot be compared are equal if they are one object."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and one.shape == other.shape and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # such as arrays, or lists of tensors
        return False


class TrialResult(NamedTuple):
    """Result of some steps of a class.

    Attributes:
        optimizer: the optimizer of the class that took them.
        values: the parameters afterwards.
        states: the state that the class keeps of each parameter.
        written: the entries of the group that the class has added or changed, by name.
    """

    optimizer: torch.optim.Optimizer
    values: list[Tensor]
    states: list[State]
    written: dict[str, Any]


class OptimizerTrial:
    """An optimizer class, run without its constructor, whose arguments are not known.

    Arguments:
        optimizer: an optimizer of that class; what the constructor has set on it is copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.cls = type(optimizer)
        # LR schedulers replace `step` on the object; the class's own is wanted here.
        hidden = ("state", "param_groups", "step")
        self._attributes = {name: value for name, value in vars(optimizer).items() if name not in hidden}
        # Hooks of the user's optimizer are for whole steps: they would run for every piece.
        self._attributes |= {name: OrderedDict() for name in self._attributes if name.endswith("_hooks")}

    def steps(
        self,
        group: Mapping[str, Any],
        values: Sequence[Tensor],
        grads: Sequence[Sequence[Tensor]],
        state: State | None = None,
    ) -> TrialResult:
        """Run the class on parameters of one group.

        Arguments:
            group: the group's options. They do not change.
            values: the parameters before; changed in place.
            grads: for each step the gradients, one for each parameter; the class may change them in place.
            state: what the class keeps of each parameter before; nothing at the first update.
        """
        optimizer: torch.optim.Optimizer = object.__new__(self.cls)
        vars(optimizer).update(self._attributes)
        parameters = [nn.Parameter(value) for value in values]
        optimizer.param_groups = [{**{n: _copied(v, deepcopy) for n, v in group.items()}, "params": parameters}]
        optimizer.state = defaultdict(dict)
        if state:
            optimizer.state |= {parameter: dict(state) for parameter in parameters}
        with torch.no_grad():
            for row in grads:
                for parameter, grad in zip(parameters, row, strict=True):
                    parameter.grad = grad
                optimizer.step()
        after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        written = {name: v for name, v in after.items() if name not in group or not same(group[name], v)}
        states = [dict(optimizer.state[p]) for p in parameters]
        return TrialResult(optimizer, [p.detach() for p in parameters], states, written)

    def trial(
        self, group: Mapping[str, Any], values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
    ) -> TrialResult:
        """Run the class as `steps` does, and refuse a class that keeps values where the next piece cannot find them.

        Raises:
            ConfigError: the class fails; it keeps values on the optimizer itself or in a state of no parameter; or it
                writes something into its group that is no number, string or None.
        """
        title = self.cls.__qualname__
        before = {name: _copied(value, copy) for name, value in self._attributes.items()}
        try:
            ran = self.steps(group, values, grads)
        except Exception as error:
            raise ConfigError(f"{title} failed on small parameters: {one_line(error)}") from error
        for name, value in vars(ran.optimizer).items():
            if name not in ("state", "param_groups") and not (name in before and same(before[name], value)):
                raise ConfigError(
                    f"{title} keeps {name!r} on the optimizer itself, where Penstock, which runs the class on one "
                    "piece after the other, would lose it. Keep it in the parameter group."
                )
        for key in ran.optimizer.state:
            if key not in {*ran.optimizer.param_groups[0]["params"]}:
                raise ConfigError(
                    f"{title} keeps {key!r} in its state, which is of no parameter. Keep it in the parameter group."
                )
        for name, value in ran.written.items():
            if not isinstance(value, bool | int | float | str | None):
                raise ConfigError(
                    f"{title} writes {name!r} into its parameter group, a {type(value).__name__}: Penstock can carry "
                    "numbers, strings and None there."
                )
        return ran

    def written(self, group: Mapping[str, Any], shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
        """Return what one step writes into its group, as a step on a parameter of zeros of that shape does."""
        zero = torch.zeros(shape, dtype=torch.float32, device="cpu")
        try:
            return self.steps(group, [zero], [[zero.clone()]]).written
        except Exception as error:
            raise ConfigError(
                f"{self.cls.__qualname__} failed on a parameter of zeros, on which Penstock learns what a step writes "
                f"into the parameter group: {one_line(error)}"
            ) from error

    def check_written(
        self, group: Mapping[str, Any], ran: TrialResult, steps: int, shape: tuple[int, ...] = (1,)
    ) -> None:
        """Refuse values in the group that some steps on data left otherwise than as many steps on zeros.

        Raises:
            ConfigError: names the entry.
        """
        options = dict(group)
        for _ in range(steps):
            options |= self.written(options, shape)
        after = {**group, **ran.written}
        for name in {**options, **after}:
            if name not in options or name not in after or not same(options[name], after[name]):
                raise ConfigError(
                    f"{self.cls.__qualname__} writes {name!r} into its parameter group, and the value depends on more "
                    "than the number of the step: pieces of a parameter and ranks would have different ones. Keep it "
                    "in the state of each parameter."
                )


def _copied(value: Any, how: Callable[[Any], Any]) -> Any:
    """Copy a value that a class might change in place; `copy` for what may hold a whole model."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() == 1 else value
    return how(value) if isinstance(value, list | dict | set) else value


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters; refuse options that change how a class runs, not what it computes.

    Raises:
        ConfigError: it names the first such option.
    """
    check_options("rule", group)
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def tried_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options to try a class out with; raises what `options_of` does.

    A learning rate or a weight decay that moves next to nothing, as at the begin of a warm-up, would hide what the
    class computes: it is raised.
    """
    options = options_of(group)
    lr, decay = options.get("lr"), options.get("weight_decay")
    if isinstance(lr, int | float | Tensor) and not abs(float(lr)) >= _LEAST_LR:
        options["lr"] = torch.full_like(lr, _LEAST_LR) if isinstance(lr, Tensor) else _LEAST_LR
    if isinstance(decay, int | float) and 0 < decay < _LEAST_DECAY:
        options["weight_decay"] = _LEAST_DECAY
    return options


def number(value: Any) -> Any:
    """Return a scalar as a Python number."""
    return value.item() if isinstance(value, Tensor) else value


# ----------------------------------------------------------------------------------------------------------------------
# Any element-wise optimizer: the user's own class, run on pieces of flat memory.
#
# The class sees fp32 tensors of its own, one piece after the other: a copy of the values behind the parameters, their
# gradients, and its state. Pieces begin where a block of 256 elements begins and are filled up with zeros to whole
# blocks, and torch's threads share a piece in whole blocks or not at all. So an element goes through the same
# instructions in every partition: in the same place of a vector.
#
# State tensors of the parameter's shape are per-element states; 0-dim tensors and numbers are the parameter's own
# scalars, which advance once per step, on a piece of one element. Numbers and strings that the class writes into its
# group stay there: they are what a step on zeros writes, the same for every piece and rank. Anything else is refused by
# name.
#
# Element-wise means that what happens to an element depends on it, its gradient, its state and the group alone. Torch's
# own classes are known; of another class its author says so with `elementwise`, and it is tried out before it is
# believed.
# ----------------------------------------------------------------------------------------------------------------------


#: torch shares an operation on up to 32,768 elements with no other thread.
_ALONE_NUMEL = 1 << 14
#: It cuts a longer one into equal parts, one for each thread: this long, if the piece is as many times as long.
_THREAD_NUMEL = 1 << 16
_MARK = "__penstock_elementwise__"
#: Small parameters of two blocks: halves of them go through the same instructions as the whole.
_TRIAL_SHAPES = ((512,), (16, 32), (8, 4, 4, 4), (16, 32))
_STEPS = 3
_GROUP_STEPS = 12

C = TypeVar("C", bound=type[torch.optim.Optimizer])


def elementwise(cls: C) -> C:
    """Declare that an optimizer class updates every element by itself, so that `prepare` may run it on pieces.

    What the class does to an element may depend on the element, its gradient, its state of the parameter's shape, the
    parameter's 0-dim state and the parameter group; not on other elements, on the parameter's shape, or on closures.
    A subclass has to be declared itself.

    Arguments:
        cls: a class of `torch.optim.Optimizer`.

    Returns:
        The same class.

    Raises:
        ConfigError: this is no such class.

    Example:
        >>> @elementwise
        ... class SignSGD(torch.optim.SGD):
        ...     pass
    """
    given: object = cls
    if not (inspect.isclass(given) and issubclass(given, torch.optim.Optimizer)):
        raise ConfigError(f"elementwise({cls!r}): give a class of torch.optim.Optimizer.")
    setattr(cls, _MARK, True)
    return cls


def is_declared(cls: type) -> bool:
    """Return True if `elementwise` declared the class itself."""
    return bool(vars(cls).get(_MARK))


class GenericRule(Rule):
    """The rule that is the user's own class.

    Arguments:
        optimizer: an optimizer of that class; the options of its groups are tried out.
        format_: how the states are stored: fp32 or bf16.

    Raises:
        ConfigError: the class keeps state of another form, needs 8-bit states, or turns out not to be element-wise.
    """

    states: tuple[StateSpec, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, format_: StateFormat) -> None:
        self.name = type(optimizer).__name__.lower()
        self._class = type(optimizer)
        self._format = format_
        if format_.dtype == "int8":
            raise ConfigError(
                f"Options(state_dtype='int8') is not for {self.name}, whose states may have any range. Use 'fp32' or "
                "'bf16', or one of AdamW, Adam, SGD, Adagrad, Lion."
            )
        self._running = OptimizerTrial(optimizer)
        self._scalars: dict[str, Any] = {}  # how each scalar is made of a number
        self._written: set[str] = set()  # what the class writes into its groups
        groups = [tried_group(group) for group in optimizer.param_groups]
        trials = [self._try_out(group) for group in groups]
        names = dict.fromkeys(name for _, states in trials for name in states)
        # On values as they are computed: how they are stored is no matter of the class.
        self.states, self._format = tuple(StateSpec(name) for name in names), StateFormat()
        for group, (ran, _) in zip(groups, trials, strict=True):
            self._compare(group, ran)
        self.states = tuple(format_.spec(name, signed=True, begins_with_update=True) for name in names)
        self._format = format_
        self.scalar_names = tuple(self._scalars)

    def step_scalars(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> GenericScalars:  # noqa: B006
        """Read a parameter group; see `Rule.step_scalars`."""
        options = options_of(group)
        scalars = {name: value for name, value in scalars.items() if name in self._scalars}
        if step > 1 and "step" in self._scalars:  # which is not kept twice
            scalars.setdefault("step", step - 1)
        return GenericScalars(options, step, scalars)

    def advance(self, step_scalars: StepScalars) -> Scalars:
        """Return the parameters' own scalars after an update, as one on a single zero leaves them."""
        assert isinstance(step_scalars, GenericScalars)
        if not self._scalars:
            return {}

        def zero() -> Tensor:
            return torch.zeros(1, dtype=torch.float32, device="cpu")

        (state,) = self._run(step_scalars, zero(), zero(), {spec.name: zero() for spec in self.states}).states
        return {name: number(state[name]) for name in self._scalars if state.get(name) is not None}

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the class writes into its group in a step; see `Rule.advance_group`."""
        written = self._running.written(options_of(group))
        self._check_written(written)
        return written

    def update(
        self, update_slice: UpdateSlice, step_scalars: StepScalars, grad_scale: float, pool: Pool | None
    ) -> None:
        """Run the class on a segment, piece by piece; see `Rule.update`. With a pool torch uses its own threads."""
        assert isinstance(step_scalars, GenericScalars)
        for piece in _pieces(update_slice, pool):
            numel = piece.param.numel()
            value = _padded(read_master(piece.param, piece.master))
            grad = _padded(piece.grad.float() * fp32(grad_scale))
            states = {
                spec.name: _padded(read_state(spec, values, None))
                for spec, values in zip(self.states, piece.states, strict=True)
            }
            # 1. The class's own step, on tensors of its own.
            ran = self._run(step_scalars, value, grad, states)
            (value,), (after,) = ran.values, ran.states
            # 2. Refuse what it has begun to keep since it was tried out: dropped, the next step would be another one.
            unknown = [name for name, v in after.items() if v is not None and name not in (*states, *self._scalars)]
            if unknown:
                raise ConfigError(
                    f"{self._class.__qualname__} began to keep {unknown[0]!r} after prepare(), which made no memory "
                    "for it. Prepare again with the options that call for it."
                )
            self._check_written(ran.written)
            # 3. Write back, without the zeros that filled the piece up.
            rounding = self._format.rounding_at(step_scalars.step, piece.first, numel, piece.param.device)
            for k, spec in enumerate(self.states):
                if after.get(spec.name) is not None:
                    write_state(spec, piece.states[k], None, after[spec.name][:numel], rounding, k % 3)
            write_param(piece.param, piece.master, value[:numel], rounding)

    def _run(
        self, step_scalars: GenericScalars, value: Tensor, grad: Tensor, states: Mapping[str, Tensor]
    ) -> TrialResult:
        """Run one step of the class on fp32 tensors of its own, [n] each."""
        if step_scalars.step == 1:  # the class makes its state itself
            return self._running.steps(step_scalars.group, [value], [[grad]])
        made = {name: self._scalars[name](number) for name, number in step_scalars.scalars.items()}
        return self._running.steps(step_scalars.group, [value], [[grad]], {**made, **states})

    def _check_written(self, written: Mapping[str, Any]) -> None:
        """Refuse entries of a group that the class did not write when it was tried out.

        Raises:
            ConfigError: names the first one.
        """
        for name in written.keys() - self._written:
            raise ConfigError(
                f"{self._class.__qualname__} began to write {name!r} into its parameter group after prepare(), which "
                "has not seen that its values depend on the step alone. Prepare again with the options that call for "
                "it."
            )

    def _try_out(self, group: Mapping[str, Any]) -> tuple[TrialResult, tuple[str, ...]]:
        """Take three steps of the class on small parameters together, and note the state that it keeps.

        Arguments:
            group: the options of a parameter group.

        Returns:
            The result of the steps, and the names of the per-element states.

        Raises:
            ConfigError: the class fails, or keeps values of a form that Penstock cannot carry.
        """
        values, *grads = _trial_data()
        ran = self._running.trial(group, values, grads)
        names: dict[str, None] = {}
        for shape, state in zip(_TRIAL_SHAPES, ran.states, strict=True):
            for name, kept in state.items():
                if kept is None:
                    continue
                if isinstance(kept, Tensor) and kept.shape == shape:
                    names[name] = None
                elif isinstance(kept, Tensor) and kept.dim() == 0:
                    self._scalars[name] = partial(torch.tensor, dtype=kept.dtype, device="cpu")
                elif isinstance(kept, bool | int | float):
                    self._scalars[name] = type(kept)
                else:
                    form = f"a tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
                    raise ConfigError(
                        f"{self._class.__qualname__} keeps {name!r}, {form}, for a parameter of shape {shape}. "
                        "Penstock can carry state of the parameter's shape, and 0-dim state."
                    )
        self._written |= ran.written.keys()
        # Longer, as far as the group goes: a class with a warm-up may begin to write there later.
        tiny, *later = torch.randn((1 + _GROUP_STEPS, 2), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        longer = self._running.trial(group, [tiny], [[grad] for grad in later])
        self._running.check_written(group, longer, _GROUP_STEPS)
        self._written |= longer.written.keys()
        return ran, tuple(names)

    def _compare(self, group: Mapping[str, Any], ran: TrialResult) -> None:
        """Update flat halves of the same parameters as a step does, and refuse a class for which a bit differs.

        Arguments:
            group: the options of the parameter group.
            ran: the result of the class itself.

        Raises:
            ConfigError: names what the class writes into its group that is not a matter of the step alone, or says that
                it is not element-wise.
        """
        values, *grads = _trial_data()
        self._running.check_written(group, ran, len(grads))
        for k, (value, whole, kept) in enumerate(zip(values, ran.values, ran.states, strict=True)):
            for part in (slice(0, BLOCK_NUMEL), slice(BLOCK_NUMEL, None)):
                param, options = value.flatten()[part].clone(), {**group}
                scalars: Scalars = {}
                made = tuple(torch.zeros_like(param) for _ in self.states)
                for step, row in enumerate(grads, 1):
                    step_scalars = self.step_scalars(options, step, scalars)
                    self.update(UpdateSlice(param, row[k].flatten()[part], None, made), step_scalars, 1.0, None)
                    scalars = self.advance(step_scalars)
                    options |= self.advance_group(options)
                named = dict(zip((spec.name for spec in self.states), made, strict=True))
                pairs = [(whole, param), *((kept[n], value) for n, value in named.items() if kept.get(n) is not None)]
                alike = all(torch.equal(a.flatten()[part].nan_to_num(), b.nan_to_num()) for a, b in pairs)
                if not alike or any(number(kept[name]) != scalars.get(name) for name in self._scalars if name in kept):
                    raise ConfigError(
                        f"{self._class.__qualname__} is not element-wise: on a part of a parameter it computes "
                        f"something else than on the whole. It was one of shape {tuple(value.shape)}; Penstock cuts "
                        "parameters into flat parts."
                    )


def _trial_data() -> list[list[Tensor]]:
    """Return values of small parameters, and gradients of three steps: the same at each call.

    The last parameter has gradients at right angles to it, as those of a layer before a norm are, for which some
    classes compute something else.
    """
    data = random_rows(_TRIAL_SHAPES, 1 + _STEPS)
    for k, row in enumerate(data):
        row[-1][:, k > 0 :: 2] = 0
    return data


def random_rows(shapes: Sequence[tuple[int, ...]], count: int) -> list[list[Tensor]]:
    """Return rows of fp32 tensors of the shapes, with numbers that are the same at each call."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
        for _ in range(count)
    ]


def _pieces(update_slice: UpdateSlice, pool: Pool | None) -> Iterator[UpdateSlice]:
    """Cut a segment so that torch takes each piece with one thread, or shares it among all of them in whole blocks.

    Elsewhere a thread's part could begin in the middle of a vector, where other instructions compute the element, and
    its last bit would depend on the partition.
    """
    if update_slice.param.device.type != "cpu":
        yield from update_slice.pieces()
        return
    threads = 1 if pool is None or pool.threads == 1 else torch.get_num_threads()
    shared_numel = threads * _THREAD_NUMEL
    for piece in update_slice.pieces(shared_numel):
        if threads > 1 and piece.param.numel() == shared_numel:
            yield piece
        else:
            yield from piece.pieces(_ALONE_NUMEL)


def _padded(value: Tensor) -> Tensor:
    """Fill a flat tensor up with zeros to whole blocks."""
    return torch.nn.functional.pad(value, (0, -value.numel() % BLOCK_NUMEL))
