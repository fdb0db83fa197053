"""Rules that look at whole parameters: a `MatrixRule` on the memory of a tile that is one.

The rule sees fp32 tensors in the parameter's shape. Where memory holds fp32 values, they are these: the parameter, its
full master, states. Else they are decoded before and written back afterwards, in pieces, so that what decoding needs
beside them stays small. States of the parameter's shape are stored in the format that was asked for; others, such as
sums of rows, are fp32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.errors import ConfigError, EngineError, PenstockError, one_line
from penstock.optim.matrix import MatrixRule, states_of
from penstock.rules.dither import step_key
from penstock.rules.exact import fp32
from penstock.rules.master import read_master
from penstock.rules.rule import BLOCK_NUMEL, Hyper, Rule, Scalars, Segment, StateSpec
from penstock.rules.running import GenericHyper, options_of
from penstock.rules.storage import Rounding, StateFormat, read_state, write_param, write_state

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

#: Lengths of sides that no two sides share, to see which states have the parameter's shape.
_SIDES = (7, 5, 3, 2, 4, 6, 8, 9)
#: How many elements are decoded and written at once.
PIECE_NUMEL = 1 << 20
#: What that holds per element of a piece: random words, codes, logarithms, in int64 and fp32.
_BYTES_PER_ELEMENT_OF_A_PIECE = 96
#: Temporaries of a rule that does not say what it needs, in fp32 tensors of the parameter's shape.
_UNSTATED_TENSORS = 4


class Whole:
    """The rule that is a `MatrixRule`.

    Arguments:
        name: the rule's name in reports and checkpoints.
        title: the class that it stands for, for messages.
        rule: the arithmetic.
        format_: how the states of the parameter's shape are stored.
        parameters: the shapes of the optimizer's parameters.
        group: options of a parameter group that it is for.
        check: refuses options of a parameter group by `ConfigError`.
        written: returns what the class writes into a group in a step.

    Raises:
        ConfigError: the rule takes no parameter of some of the shapes.
    """

    scalar_names: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        title: str,
        rule: MatrixRule,
        format_: StateFormat,
        parameters: Iterable[Shape],
        group: Mapping[str, Any] = {},
        *,
        check: Callable[[Mapping[str, Any]], None] | None = None,
        written: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self._title = title
        self._rule = rule
        self._format = format_
        self._group = group
        self._check = check
        self._written = written
        self._known = {shape: self.shapes(shape) for shape in dict.fromkeys(parameters)}
        self.states = tuple(_specs_of({**self._general(self._known), **self._known}, format_))

    @property
    def whole(self) -> bool:
        """Yes: a tile is one whole parameter."""
        return True

    def part(self, group: Mapping[str, Any]) -> Rule:
        """Return this rule, which is every group's."""
        del group
        return self

    def shapes(self, shape: Shape, group: Mapping[str, Any] | None = None) -> Shapes:
        """Return the shapes of the states of a parameter of that shape, by name.

        Raises:
            ConfigError: the rule takes no such parameter.
        """
        try:
            named = states_of(self._rule, shape, self._group if group is None else group)
            return {name: tuple(map(int, state)) for name, state in named.items()}
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The rule of {self._title} fails to name the states of {shape}: {one_line(error)}"
            ) from error

    def state_shape(self, name: str, shape: Shape) -> Shape | None:
        """Return the shape of a state; see `Rule.state_shape`."""
        return self.shapes(shape).get(name)

    def working_bytes(self, shape: Shape) -> int:
        """Return the most bytes that an update of a parameter of that shape holds beside its segment.

        They are fp32 values of the parameter and of its gradient, of each state that is stored otherwise, what the
        arithmetic itself needs, and what decoding a piece does. Where memory holds fp32 values an update takes less.
        """
        numel, shapes = math.prod(shape), self.shapes(shape)
        decoded = sum(math.prod(shapes.get(spec.name, (0,))) for spec in self.states if spec.dtype != torch.float32)
        values = 4 * (2 * numel + decoded)
        return values + max(self._temporaries(shape), _BYTES_PER_ELEMENT_OF_A_PIECE * min(numel, PIECE_NUMEL))

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> GenericHyper:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`. Tensors in it are copied to the host."""
        del scalars
        if self._check:
            self._check(group)
        options = options_of(group)
        for shape, states in self._known.items():
            if self.shapes(shape, options) != states:
                raise ConfigError(
                    f"The rule of {self._title} names other states for a parameter of shape {shape} since the options "
                    "of its group were changed. Prepare again with them."
                )
        read = {n: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for n, v in options.items()}
        return GenericHyper(read, step, {})

    def advance(self, hyper: Hyper) -> Scalars:
        """Return the parameter's own scalars after the update: none."""
        del hyper
        return {}

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the class writes into its group in a step; see `Rule.advance_group`."""
        return self._written(options_of(group)) if self._written else {}

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to one whole parameter; see `Rule.update`. On the host torch uses its own threads.

        Raises:
            EngineError: the segment is no whole parameter, or the arithmetic of a user failed.
        """
        del pool
        assert isinstance(hyper, GenericHyper)
        shape = segment.shape
        if not shape and segment.param.numel() != 1:
            raise EngineError(f"{self._title} looks at whole parameters, and was given a piece of one.")
        # 1. The fp32 values: the very memory, where it holds them.
        value = _value_of(segment)
        grad = _scaled(segment.grad, fp32(grad_scale))
        states = {}
        shapes = self.shapes(shape)
        for spec, stored, scale in self._stored(segment, shapes):
            states[spec.name] = stored if stored.dtype == torch.float32 else _decoded(spec, stored, scale)
        # 2. The arithmetic, in their shapes.
        try:
            shaped = {n: s.view(shapes[n]) for n, s in states.items()}
            with torch.no_grad():
                self._rule.update(value.view(shape), grad.view(shape), shaped, hyper.group, hyper.step)
        except (PenstockError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineError(f"{self._title} failed on a parameter of shape {shape}: {one_line(error)}") from error
        # 3. Back to where they rest, piece by piece.
        self._write(segment, value, states, hyper.step)

    def update_many(self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None) -> None:
        """Apply the rule to whole parameters; see `Rule.update_many`."""
        for segment, hyper in segments:
            self.update(segment, hyper, grad_scale, pool)

    def _stored(self, segment: Segment, shapes: Shapes) -> Iterator[tuple[StateSpec, Tensor, Tensor | None]]:
        """Give the states that the parameter has, each as it is stored, without padding."""
        for k, spec in enumerate(self.states):
            if spec.name in shapes:
                yield spec, segment.states[k][: math.prod(shapes[spec.name])], segment.scale(k)

    def _write(self, segment: Segment, value: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        """Write fp32 values back to where memory holds something else."""
        numel = segment.param.numel()
        encoded = [
            (k % 3, spec, segment.states[k], segment.scale(k), states[spec.name])
            for k, spec in enumerate(self.states)
            if spec.name in states and spec.dtype != torch.float32
        ]
        rest = segment.param.data_ptr() != value.data_ptr()
        for start in range(0, numel if rest or encoded else 0, PIECE_NUMEL):
            part = slice(start, min(start + PIECE_NUMEL, numel))
            blocks = slice(start // BLOCK_NUMEL, (start + PIECE_NUMEL) // BLOCK_NUMEL)
            rounding = None
            if self._format.stochastic:
                key = step_key(self._format.seed, step)
                rounding = Rounding(key, segment.first + start, part.stop - start, value.device)
            for what, spec, stored, scale, state in encoded:
                scales = None if scale is None else scale[blocks]
                write_state(spec, stored[part], scales, state[part], rounding, what)
            if rest:
                master = None if segment.master is None else segment.master[part]
                write_param(segment.param[part], master, value[part], rounding)

    def _temporaries(self, shape: Shape) -> int:
        """Return the bytes that the rule says an update holds beside what it is given, or four tensors of the shape."""
        stated: Callable[[Shape], int] | None = getattr(self._rule, "working_bytes", None)
        return stated(shape) if stated else 4 * _UNSTATED_TENSORS * math.prod(shape)

    def _general(self, known: Iterable[Shape]) -> dict[Shape, Shapes]:
        """Return the states of shapes whose sides all differ, of those numbers of dimensions that the rule takes."""
        general = {}
        for shape in dict.fromkeys(_SIDES[: len(shape)] for shape in known):
            try:
                general[shape] = self.shapes(shape)
            except ConfigError:  # a rule may mind sizes that no parameter has
                continue
        return general


def _specs_of(known: Mapping[Shape, Shapes], format_: StateFormat) -> Iterator[StateSpec]:
    """Describe the states: in the format where they have the parameter's shape, of whatever shape; else in fp32.

    Arguments:
        known: the shapes of the states by name, for shapes of parameters.
        format_: how states are stored.
    """
    for name in dict.fromkeys(name for shapes in known.values() for name in shapes):
        alike = all(shapes.get(name, shape) == shape for shape, shapes in known.items())
        yield (format_ if alike else StateFormat()).spec(name, signed=True)


def _value_of(segment: Segment) -> Tensor:
    """Return the fp32 values behind a parameter, flat: the very memory where it holds them, else a copy."""
    param, master = segment.param, segment.master
    values = param if master is None else master
    if values.dtype == torch.float32:
        return values
    copy = torch.empty(param.numel(), dtype=torch.float32, device=param.device)
    for part, target in _pieces(copy):
        target.copy_(read_master(param[part], None if master is None else master[part]))
    return copy


def _scaled(grad: Tensor, factor: float) -> Tensor:
    """Return a gradient in fp32, times the factor: the very memory where that is what it holds."""
    if grad.dtype != torch.float32:
        grad = grad.float()
        return grad if factor == 1 else grad.mul_(factor)
    return grad if factor == 1 else grad * factor


def _decoded(spec: StateSpec, stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of a state in fp32, flat."""
    value = torch.empty(stored.numel(), dtype=torch.float32, device=stored.device)
    for part, target in _pieces(value):
        blocks = slice(part.start // BLOCK_NUMEL, -(-part.stop // BLOCK_NUMEL))
        target.copy_(read_state(spec, stored[part], None if scale is None else scale[blocks]))
    return value


def _pieces(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut a flat tensor into views of at most `PIECE_NUMEL` elements, and say which elements each has."""
    for start in range(0, tensor.numel(), PIECE_NUMEL):
        part = slice(start, min(start + PIECE_NUMEL, tensor.numel()))
        yield part, tensor[part]
