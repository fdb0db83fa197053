"""Any element-wise optimizer: the user's own class, run on pieces of flat memory.

The class sees fp32 tensors of its own, one piece after the other: a copy of the values behind the parameters, their
gradients, and its state. Pieces begin where a block of 256 elements begins and are filled up with zeros to whole
blocks, and torch's threads share a piece in whole blocks or not at all. So an element goes through the same
instructions in every partition: in the same place of a vector.

State tensors of the parameter's shape are per-element states; 0-dim tensors and numbers are the parameter's own
scalars, which advance once per step, on a piece of one element. Anything else is refused by name.

Element-wise means that what happens to an element depends on it, its gradient, its state and the group alone. Torch's
own classes are known; of another class its author says so with `elementwise`, and it is tried out before it is
believed.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules.exact import fp32
from penstock.rules.master import read_master
from penstock.rules.rule import BLOCK_NUMEL, Hyper, Scalars, Segment
from penstock.rules.storage import Rounding, StateFormat, read_state, write_param, write_state

#: torch shares an operation on up to 32,768 elements with no other thread.
_ALONE_NUMEL = 1 << 14
#: It cuts a longer one into equal parts, one for each thread: this long, if the piece is as many times as long.
_THREAD_NUMEL = 1 << 16
_MARK = "__penstock_elementwise__"
_TRIAL_SHAPE = (8, 6)

C = TypeVar("C", bound=type[torch.optim.Optimizer])


def elementwise(cls: C) -> C:
    """Declare that an optimizer class updates every element by itself, so that `prepare` may run it on pieces.

    What the class does to an element may depend on the element, its gradient, its state of the parameter's shape, the
    parameter's 0-dim state and the parameter group; not on other elements, on the parameter's shape, or on closures.
    A subclass has to be declared itself.

    Arguments:
        cls: a `torch.optim.Optimizer` class.

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
    """Whether `elementwise` was said of the class itself."""
    return bool(vars(cls).get(_MARK))


@dataclass(frozen=True, eq=False)
class GenericHyper(Hyper):
    """A group's options at one step, and the scalars of the parameters that share them.

    Args:
        group: the options, without parameters.
        step: 1 at the first update.
        scalars: before the update.
        names: the states that this group's options call for.
    """

    group: Mapping[str, Any]
    step: int
    scalars: Scalars
    names: tuple[str, ...]

    @property
    def keeps_zeros(self) -> bool:
        """Nothing is known of what the class makes of zeros."""
        return False


@dataclass(frozen=True)
class _Found:
    """What a class keeps of one parameter: per-element states by name, and scalars with how to make one of a number."""

    states: tuple[str, ...]
    scalars: Mapping[str, Any]


class Generic:
    """The rule that is the user's own class.

    Args:
        optimizer: of that class; its options are tried out.
        format_: how the states are stored: fp32 or bf16.

    Raises:
        ConfigError: the class keeps state of another form, needs 8-bit states, or turns out not to be element-wise.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, format_: StateFormat) -> None:
        self.name = type(optimizer).__name__.lower()
        self._class = type(optimizer)
        self._format = format_
        if format_.dtype == "int8":
            raise ConfigError(
                f"Options(state_dtype='int8') is not for {self.name}, whose states may have any range. Use 'fp32' or "
                "'bf16', or one of AdamW, Adam, SGD, Adagrad, Lion."
            )
        hidden = ("state", "param_groups", "step")
        self._attributes = {name: value for name, value in vars(optimizer).items() if name not in hidden}
        # Hooks of the user's optimizer are for whole steps.
        self._attributes |= {name: OrderedDict() for name in self._attributes if name.endswith("_hooks")}
        found = [self._try_out(_options(group)) for group in optimizer.param_groups]
        self._scalars: dict[str, Any] = {}
        for each in found:
            self._scalars |= each.scalars
        names = dict.fromkeys(name for each in found for name in each.states)
        self.states = tuple(format_.spec(name, signed=True, begins_with_update=True) for name in names)
        self.scalar_names = tuple(self._scalars)

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> GenericHyper:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`."""
        options = _options(group)
        scalars = {name: value for name, value in scalars.items() if name in self._scalars}
        if step > 1 and "step" in self._scalars:
            scalars.setdefault("step", step - 1)
        return GenericHyper(options, step, scalars, tuple(spec.name for spec in self.states))

    def advance(self, hyper: Hyper) -> Scalars:
        """Return the scalars after the update: of one element that is zero."""
        assert isinstance(hyper, GenericHyper)
        if not self._scalars:
            return {}

        def zero() -> Tensor:
            return torch.zeros(1, dtype=torch.float32, device="cpu")

        _, state = self._run(hyper, zero(), zero(), {name: zero() for name in hyper.names})
        return {name: _number(state[name]) for name in self._scalars if state.get(name) is not None}

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Run the class on a segment, piece by piece; see `Rule.update`. A pool stands for torch's own threads."""
        assert isinstance(hyper, GenericHyper)
        for piece in _pieces(segment, pool):
            numel = piece.param.numel()
            value = _padded(read_master(piece.param, piece.master))
            grad = _padded(piece.grad.float() * fp32(grad_scale))
            states = {
                spec.name: _padded(read_state(spec, values, None))
                for spec, values in zip(self.states, piece.states, strict=True)
            }
            value, after = self._run(hyper, value, grad, states)
            unknown = [name for name, v in after.items() if v is not None and name not in (*states, *self._scalars)]
            if unknown:
                raise ConfigError(
                    f"{self._class.__qualname__} began to keep {unknown[0]!r} after prepare(), which made no memory "
                    "for it. Prepare again with the options that call for it."
                )
            rounding = Rounding(piece, self._format, hyper.step)
            for k, spec in enumerate(self.states):
                if after.get(spec.name) is not None:
                    write_state(spec, piece.states[k], None, after[spec.name][:numel], rounding, k % 3)
            write_param(piece, value[:numel], rounding)

    def update_many(self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None) -> None:
        """Run the class on segments; see `Rule.update_many`."""
        for segment, hyper in segments:
            self.update(segment, hyper, grad_scale, pool)

    def _run(
        self, hyper: GenericHyper, value: Tensor, grad: Tensor, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        """One step of the class on fp32 tensors of its own. Returns the value and the state afterwards."""
        parameter = nn.Parameter(value)
        parameter.grad = grad
        optimizer: torch.optim.Optimizer = object.__new__(self._class)
        vars(optimizer).update(self._attributes)
        optimizer.param_groups = [{**hyper.group, "params": [parameter]}]
        optimizer.state = defaultdict(dict)
        if hyper.step > 1:
            made = {name: self._scalars[name](number) for name, number in hyper.scalars.items()}
            optimizer.state[parameter] = {**made, **states}
        with torch.no_grad():
            optimizer.step()
        return parameter.detach(), dict(optimizer.state[parameter])

    def _try_out(self, group: Mapping[str, Any]) -> _Found:
        """Two steps on a small parameter, whole and in flat halves, which must agree. Returns what state there is."""
        generator = torch.Generator("cpu").manual_seed(0)
        value, *grads = (
            torch.randn(_TRIAL_SHAPE, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)
        )
        whole_value, whole = self._steps(group, value, grads)
        states = tuple(n for n, v in whole.items() if isinstance(v, Tensor) and v.shape == value.shape)
        scalars: dict[str, Any] = {}
        for name, kept in whole.items():
            if name in states or kept is None:
                continue
            if isinstance(kept, Tensor) and kept.dim() == 0:
                scalars[name] = _Maker(kept.dtype)
            elif isinstance(kept, bool | int | float):
                scalars[name] = type(kept)
            else:
                form = f"a tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
                raise ConfigError(
                    f"{self._class.__qualname__} keeps {name!r}, {form}, for a parameter of shape {_TRIAL_SHAPE}. "
                    "Penstock can carry state of the parameter's shape, and 0-dim state."
                )
        half = value.numel() // 2
        for part in (slice(0, half), slice(half, None)):
            part_value, state = self._steps(group, value.flatten()[part], [g.flatten()[part] for g in grads])
            pairs = [(whole_value, part_value), *((whole[name], state.get(name)) for name in states)]
            alike = all(
                b is not None and torch.allclose(a.flatten()[part], b, rtol=1e-4, atol=1e-7, equal_nan=True)
                for a, b in pairs
            )
            if not alike or any(_number(state[name]) != _number(whole[name]) for name in scalars):
                raise ConfigError(
                    f"{self._class.__qualname__} is not element-wise: on a part of a parameter it computes something "
                    "else than on the whole. Penstock cuts parameters into flat parts."
                )
        return _Found(states, scalars)

    def _steps(self, group: Mapping[str, Any], value: Tensor, grads: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        optimizer: torch.optim.Optimizer = object.__new__(self._class)
        vars(optimizer).update(self._attributes)
        parameter = nn.Parameter(value.clone())
        optimizer.param_groups = [{**group, "params": [parameter]}]
        optimizer.state = defaultdict(dict)
        for grad in grads:
            parameter.grad = grad.clone()
            with torch.no_grad():
                optimizer.step()
        return parameter.detach(), dict(optimizer.state[parameter])


@dataclass(frozen=True)
class _Maker:
    """Makes the 0-dim tensor of a number."""

    dtype: torch.dtype

    def __call__(self, number: float) -> Tensor:
        return torch.tensor(number, dtype=self.dtype, device="cpu")


def _pieces(segment: Segment, pool: Pool | None) -> Iterator[Segment]:
    if segment.param.device.type != "cpu":
        yield from segment.pieces()
        return
    threads = 1 if pool is None or pool.threads == 1 else torch.get_num_threads()
    shared_numel = threads * _THREAD_NUMEL
    for piece in segment.pieces(shared_numel):
        if threads > 1 and piece.param.numel() == shared_numel:
            yield piece
        else:
            yield from piece.pieces(_ALONE_NUMEL)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group without its parameters. Refuses what changes how the class runs, not what it computes."""
    for option in ("capturable", "differentiable"):
        if group.get(option):
            raise ConfigError(f"{option}=True is not supported. Set {option}=False in every parameter group.")
    return {name: value for name, value in group.items() if name != "params"}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _padded(value: Tensor) -> Tensor:
    return torch.nn.functional.pad(value, (0, -value.numel() % BLOCK_NUMEL))
