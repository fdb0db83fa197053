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

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules.elementwise import Elementwise
from penstock.rules.exact import fp32
from penstock.rules.master import read_master
from penstock.rules.rule import BLOCK_NUMEL, Hyper, Scalars, Segment
from penstock.rules.running import GenericHyper, Running, number, options_of
from penstock.rules.storage import StateFormat, read_state, rounding_of, write_param, write_state

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
    """Whether `elementwise` was said of the class itself."""
    return bool(vars(cls).get(_MARK))


class Generic(Elementwise):
    """The rule that is the user's own class.

    Arguments:
        optimizer: an optimizer of that class; the options of its groups are tried out.
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
        self._running = Running(optimizer)
        names: dict[str, None] = {}
        self._scalars: dict[str, Any] = {}  # how each scalar is made of a number
        for group in optimizer.param_groups:
            states, scalars = self._try_out(options_of(group))
            names |= dict.fromkeys(states)
            self._scalars |= scalars
        self.states = tuple(format_.spec(name, signed=True, begins_with_update=True) for name in names)
        self.scalar_names = tuple(self._scalars)

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> GenericHyper:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`."""
        options = options_of(group)
        scalars = {name: value for name, value in scalars.items() if name in self._scalars}
        if step > 1 and "step" in self._scalars:  # which is not kept twice
            scalars.setdefault("step", step - 1)
        return GenericHyper(options, step, scalars)

    def advance(self, hyper: Hyper) -> Scalars:
        """Return the parameters' own scalars after an update, as one on a single zero leaves them."""
        assert isinstance(hyper, GenericHyper)
        if not self._scalars:
            return {}

        def zero() -> Tensor:
            return torch.zeros(1, dtype=torch.float32, device="cpu")

        _, state = self._run(hyper, zero(), zero(), {spec.name: zero() for spec in self.states})
        return {name: number(state[name]) for name in self._scalars if state.get(name) is not None}

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Run the class on a segment, piece by piece; see `Rule.update`. With a pool torch uses its own threads."""
        assert isinstance(hyper, GenericHyper)
        for piece in _pieces(segment, pool):
            numel = piece.param.numel()
            value = _padded(read_master(piece.param, piece.master))
            grad = _padded(piece.grad.float() * fp32(grad_scale))
            states = {
                spec.name: _padded(read_state(spec, values, None))
                for spec, values in zip(self.states, piece.states, strict=True)
            }
            # 1. The class's own step, on tensors that nobody else has.
            value, after = self._run(hyper, value, grad, states)
            # 2. Refuse what it has begun to keep since it was tried out: dropped, the next step would be another one.
            unknown = [name for name, v in after.items() if v is not None and name not in (*states, *self._scalars)]
            if unknown:
                raise ConfigError(
                    f"{self._class.__qualname__} began to keep {unknown[0]!r} after prepare(), which made no memory "
                    "for it. Prepare again with the options that call for it."
                )
            # 3. Write back, without the zeros that filled the piece up.
            rounding = rounding_of(piece, self._format, hyper.step)
            for k, spec in enumerate(self.states):
                if after.get(spec.name) is not None:
                    write_state(spec, piece.states[k], None, after[spec.name][:numel], rounding, k % 3)
            write_param(piece.param, piece.master, value[:numel], rounding)

    def update_many(self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None) -> None:
        """Run the class on segments; see `Rule.update_many`."""
        for segment, hyper in segments:
            self.update(segment, hyper, grad_scale, pool)

    def _run(
        self, hyper: GenericHyper, value: Tensor, grad: Tensor, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run one step of the class on fp32 tensors of its own, [n] each. Return the value and the state afterwards."""
        if hyper.step == 1:  # the class makes its state itself
            return self._steps(hyper.group, value, [grad], {})
        made = {name: self._scalars[name](number) for name, number in hyper.scalars.items()}
        return self._steps(hyper.group, value, [grad], {**made, **states})

    def _steps(
        self, group: Mapping[str, Any], value: Tensor, grads: Iterable[Tensor], state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the class on one parameter, a step for each gradient. Return the value and the state afterwards.

        Arguments:
            group: the group's options.
            value: the parameter before; changed in place.
            grads: the gradients; the class may change them in place.
            state: what the class keeps of the parameter before; empty at the first update.
        """
        values, states = self._running.steps(group, [value], [[grad] for grad in grads], state)
        return values[0], states[0]

    def _try_out(self, group: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Take two steps on a small parameter, whole and in flat halves, and refuse a class for which they differ.

        Arguments:
            group: the options of a parameter group.

        Returns:
            The names of the per-element states; and the scalars by name, each with how to make one of a number.

        Raises:
            ConfigError: the class is not element-wise, or keeps state of another form.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        value, *grads = (
            torch.randn(_TRIAL_SHAPE, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)
        )
        # 1. On the whole parameter: what state there is, and of which form.
        whole_value, whole = self._steps(group, value.clone(), [grad.clone() for grad in grads], {})
        states = tuple(n for n, v in whole.items() if isinstance(v, Tensor) and v.shape == value.shape)
        scalars: dict[str, Any] = {}
        for name, kept in whole.items():
            if name in states or kept is None:
                continue
            if isinstance(kept, Tensor) and kept.dim() == 0:
                scalars[name] = partial(torch.tensor, dtype=kept.dtype, device="cpu")
            elif isinstance(kept, bool | int | float):
                scalars[name] = type(kept)
            else:
                form = f"a tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
                raise ConfigError(
                    f"{self._class.__qualname__} keeps {name!r}, {form}, for a parameter of shape {_TRIAL_SHAPE}. "
                    "Penstock can carry state of the parameter's shape, and 0-dim state."
                )
        # 2. On flat halves, which have another shape: a class that looks at neighbours or at the shape ends elsewhere.
        half = value.numel() // 2
        for part in (slice(0, half), slice(half, None)):
            part_grads = [grad.flatten()[part].clone() for grad in grads]
            part_value, state = self._steps(group, value.flatten()[part].clone(), part_grads, {})
            pairs = [(whole_value, part_value), *((whole[name], state.get(name)) for name in states)]
            alike = all(
                b is not None and torch.allclose(a.flatten()[part], b, rtol=1e-4, atol=1e-7, equal_nan=True)
                for a, b in pairs
            )
            if not alike or any(number(state[name]) != number(whole[name]) for name in scalars):
                raise ConfigError(
                    f"{self._class.__qualname__} is not element-wise: on a part of a parameter it computes something "
                    "else than on the whole. Penstock cuts parameters into flat parts."
                )
        return states, scalars


def _pieces(segment: Segment, pool: Pool | None) -> Iterator[Segment]:
    """Cut a segment so that torch takes each piece with one thread, or shares it among all of them in whole blocks.

    Elsewhere a thread's part could begin in the middle of a vector, where other instructions compute the element, and
    its last bit would depend on the partition.
    """
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


def _padded(value: Tensor) -> Tensor:
    """Fill a flat tensor up with zeros to whole blocks."""
    return torch.nn.functional.pad(value, (0, -value.numel() % BLOCK_NUMEL))
