"""Rules that look at a whole parameter: Muon, Adafactor, and those that a user registers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.errors import ConfigError, EngineError, PenstockError, one_line
from penstock.optim.matrix import MatrixRule, states_of
from penstock.optim.muon import MuonRule, sizes_of
from penstock.optim.muon import check_options as check_muon
from penstock.rules.formats import StateFormat, read_master, read_state, write_param, write_state
from penstock.rules.generic import (
    GenericScalars,
    OptimizerTrial,
    TrialResult,
    alike,
    options_of,
    random_rows,
    tried_group,
)
from penstock.rules.rule import (
    BLOCK_NUMEL,
    Rule,
    Scalars,
    StateSpec,
    StepScalars,
    UpdateSlice,
    check_options,
    fp32,
    unknown_options,
)
from penstock.rules.select import CombinedRule
from penstock.rules.standard import AdamRule

# ----------------------------------------------------------------------------------------------------------------------
# Rules that look at whole parameters: a `MatrixRule` on the memory of a tile that is one.
#
# The rule sees fp32 tensors in the parameter's shape. Where memory holds fp32 values, they are these: the parameter,
# its full master, states. Else they are decoded before and written back afterwards, in pieces, so that what decoding
# needs beside them stays small. States of the parameter's shape are stored in the format that was asked for; others,
# such as sums of rows, are fp32.
# ----------------------------------------------------------------------------------------------------------------------


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

#: Lengths of sides that no two sides share, to see which states have the parameter's shape.
_SIDES = (7, 5, 3, 2, 4, 6, 8, 9)
#: How many elements are decoded and written at once.
PIECE_NUMEL = 1 << 20
#: Bytes of that per element of a piece: random words, codes, logarithms, in int64 and fp32.
_BYTES_PER_ELEMENT_OF_A_PIECE = 96
#: Temporaries of a rule without `working_bytes`, in fp32 tensors of the parameter's shape.
_UNSTATED_TENSORS = 4


class WholeParameterRule(Rule):
    """The rule that is a `MatrixRule`.

    Arguments:
        name: the rule's name in reports and checkpoints.
        title: the class that it stands for, for messages.
        rule: the arithmetic.
        format_: how the states of the parameter's shape are stored.
        parameters: the shapes of the optimizer's parameters.
        group: options of a parameter group that it is for.
        check: refuses options of a parameter group by `ConfigError`.
        written: returns the entries that the class writes into a group in a step.

    Raises:
        ConfigError: the rule takes no parameter of some of the shapes.
    """

    whole = True
    states: tuple[StateSpec, ...] = ()

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
        stated: Callable[[Shape], int] | None = getattr(self._rule, "working_bytes", None)
        temporaries = stated(shape) if stated else 4 * _UNSTATED_TENSORS * numel
        return 4 * (2 * numel + decoded) + max(temporaries, _BYTES_PER_ELEMENT_OF_A_PIECE * min(numel, PIECE_NUMEL))

    def step_scalars(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> GenericScalars:  # noqa: B006
        """Read a parameter group; see `Rule.step_scalars`. Tensors in it are copied to the host."""
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
        return GenericScalars(read, step, {})

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the class writes into its group in a step; see `Rule.advance_group`."""
        return self._written(options_of(group)) if self._written else {}

    def update(
        self, update_slice: UpdateSlice, step_scalars: StepScalars, grad_scale: float, pool: Pool | None
    ) -> None:
        """Apply the rule to one whole parameter; see `Rule.update`. On the host torch uses its own threads.

        Raises:
            EngineError: the segment is no whole parameter, or the arithmetic of a user failed.
        """
        del pool
        assert isinstance(step_scalars, GenericScalars)
        shape = update_slice.shape
        if not shape and update_slice.param.numel() != 1:
            raise EngineError(f"{self._title} looks at whole parameters, and was given a piece of one.")
        # 1. The fp32 values: the very memory of parameter and states, where it holds them.
        value = _value_of(update_slice)
        grad = update_slice.grad.to(torch.float32, copy=True).mul_(fp32(grad_scale))
        states = {}
        shapes = self.shapes(shape)
        for k, spec in enumerate(self.states):
            if spec.name in shapes:
                stored = update_slice.states[k][: math.prod(shapes[spec.name])]  # without padding
                fp32_stored = stored.dtype == torch.float32
                states[spec.name] = stored if fp32_stored else _decoded(spec, stored, update_slice.scale(k))
        # 2. The arithmetic, in their shapes.
        try:
            shaped = {n: s.view(shapes[n]) for n, s in states.items()}
            with torch.no_grad():
                self._rule.update(value.view(shape), grad.view(shape), shaped, step_scalars.group, step_scalars.step)
        except (PenstockError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineError(f"{self._title} failed on a parameter of shape {shape}: {one_line(error)}") from error
        # 3. Back to where they rest, piece by piece.
        self._write(update_slice, value, states, step_scalars.step)

    def _write(self, update_slice: UpdateSlice, value: Tensor, states: Mapping[str, Tensor], step: int) -> None:
        """Write fp32 values back to where memory holds something else."""
        numel = update_slice.param.numel()
        encoded = [
            (k % 3, spec, update_slice.states[k], update_slice.scale(k), states[spec.name])
            for k, spec in enumerate(self.states)
            if spec.name in states and spec.dtype != torch.float32
        ]
        rest = update_slice.param.data_ptr() != value.data_ptr()
        for start in range(0, numel if rest or encoded else 0, PIECE_NUMEL):
            part = slice(start, min(start + PIECE_NUMEL, numel))
            blocks = slice(start // BLOCK_NUMEL, (start + PIECE_NUMEL) // BLOCK_NUMEL)
            rounding = self._format.rounding_at(step, update_slice.first + start, part.stop - start, value.device)
            for what, spec, stored, scale, state in encoded:
                scales = None if scale is None else scale[blocks]
                write_state(spec, stored[part], scales, state[part], rounding, what)
            if rest:
                master = None if update_slice.master is None else update_slice.master[part]
                write_param(update_slice.param[part], master, value[part], rounding)

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


def _value_of(update_slice: UpdateSlice) -> Tensor:
    """Return the fp32 values behind a parameter, flat: the very memory where it holds them, else a copy."""
    param, master = update_slice.param, update_slice.master
    values = param if master is None else master
    if values.dtype == torch.float32:
        return values
    copy = torch.empty(param.numel(), dtype=torch.float32, device=param.device)
    for part, target in _pieces(copy):
        target.copy_(read_master(param[part], None if master is None else master[part]))
    return copy


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


# ----------------------------------------------------------------------------------------------------------------------
# The rules of `torch.optim.Muon` and `penstock.optim.MuonAdamW`.
# ----------------------------------------------------------------------------------------------------------------------


#: Options of torch's class, all of which the arithmetic obeys, and those of `penstock.optim.MuonAdamW` besides.
_KNOWN = frozenset(("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"))
_OURS = frozenset(("split", "ns_dtype"))


def muon(optimizer: torch.optim.Optimizer, format_: StateFormat) -> WholeParameterRule:
    """Make the rule of `torch.optim.Muon`.

    Raises:
        ConfigError: a group has options that the rule does not know.
    """
    unknown = unknown_options(type(optimizer), optimizer.defaults, _KNOWN)
    return _muon("muon", optimizer.param_groups, format_, unknown)


def muon_adamw(optimizer: torch.optim.Optimizer, format_: StateFormat) -> CombinedRule:
    """Make the rule of `penstock.optim.MuonAdamW`, whose parts are Muon's and AdamW's.

    Raises:
        ConfigError: a group has options that its part does not know.
    """
    groups = {rule: [g for g in optimizer.param_groups if g.get("rule") == rule] for rule in ("muon", "adamw")}
    adamw = AdamRule("adamw", format_, amsgrad=any(group["amsgrad"] for group in groups["adamw"]))
    stock = torch.optim.AdamW
    return CombinedRule(
        "muon_adamw",
        {
            "muon": _muon("muon", groups["muon"], format_, {}, ours=True),
            "adamw": replace(adamw, unknown=unknown_options(stock, stock([torch.zeros(1)]).defaults, adamw.honoured)),
        },
        lambda group: group.get("rule"),
        "A parameter group of MuonAdamW says 'rule': 'muon' or 'adamw'.",
    )


def _muon(
    name: str,
    groups: Iterable[Mapping[str, Any]],
    format_: StateFormat,
    unknown: Mapping[str, Any],
    *,
    ours: bool = False,
) -> WholeParameterRule:
    """Make Muon's rule over some groups of torch's class or of ours, and refuse parameters that it cannot cut."""
    title = "penstock.optim.MuonAdamW" if ours else "torch.optim.Muon"

    def check(group: Mapping[str, Any]) -> None:
        """Refuse options that the arithmetic does not obey."""
        check_options(name, group, _KNOWN, unknown)
        for option in sorted(_OURS & group.keys() if not ours else ()):
            raise ConfigError(f"{option} is an option of penstock.optim.MuonAdamW, not of {title}.")
        check_muon(group)

    shapes = []
    for group in groups:
        check(group)
        for parameter in group["params"]:
            shapes.append(tuple(parameter.shape))
            sizes_of(shapes[-1], group.get("split"))
    # Without a parameter there are states all the same: a group that is added later may have some.
    return WholeParameterRule(name, title, MuonRule(), format_, shapes or [(1, 1)], check=check)


# ----------------------------------------------------------------------------------------------------------------------
# The rule of `torch.optim.Adafactor`: its arithmetic on one parameter, and its options.
# ----------------------------------------------------------------------------------------------------------------------


OPTIONS = frozenset(("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"))


class AdafactorRule:
    """Adafactor's arithmetic, a `MatrixRule`: second moments as an outer product of sums of rows and columns.

    The operations are those of `torch/optim/_adafactor.py`, one by one, after N. Shazeer and M. Stern, "Adafactor:
    Adaptive Learning Rates with Sublinear Memory Cost", 2018, https://arxiv.org/abs/1804.04235.
    """

    def states(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Name the factors of the last two dimensions: [..., rows, 1] and [..., 1, columns]; of a vector, all of it."""
        del group
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def update(
        self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
    ) -> None:
        """Update a parameter; see `MatrixRule.update`."""
        lr, (eps1, eps2) = group["lr"], group["eps"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        eps1 = torch.finfo(matrix.dtype).eps if eps1 is None else eps1
        grad = -grad if group["maximize"] else grad
        weight = float(step) ** group["beta2_decay"]  # 1 - beta2 of this step
        size = max(eps2, matrix.norm(2).item() / matrix.numel() ** 0.5)
        if group["weight_decay"] != 0:
            matrix.mul_(1 - lr * group["weight_decay"])
        if grad.dim() > 1:
            rows, columns = states["row_var"], states["col_var"]
            rows.lerp_(_mean_square(grad, -1), weight)
            columns.lerp_(_mean_square(grad, -2), weight)
            update = (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            update = states["variance"].lerp_(grad * grad, weight).clone()
        update = update.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        clip = max(1.0, update.norm(2).item() / (update.numel() ** 0.5 * group["d"]))
        matrix.add_(update, alpha=-size * min(lr, 1 / step**0.5) / clip)

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of three fp32 tensors of the shape."""
        return 12 * torch.Size(shape).numel()


def _mean_square(grad: Tensor, dim: int) -> Tensor:
    """Return the mean of the squares along a dimension, which is kept, without a tensor of all squares."""
    norm: Tensor = torch.norm(grad, dim=dim, keepdim=True)
    return norm.square_().div_(grad.size(dim))


def adafactor(optimizer: torch.optim.Optimizer, format_: StateFormat) -> WholeParameterRule:
    """Make the rule of `torch.optim.Adafactor`.

    Raises:
        ConfigError: 8-bit states, or an option of a newer version that is on.
    """
    if format_.dtype == "int8":
        raise ConfigError(
            "Options(state_dtype='int8') is not for Adafactor, whose states are small already. Use 'fp32' or 'bf16'."
        )

    unknown = unknown_options(type(optimizer), optimizer.defaults, OPTIONS)
    check = partial(check_options, "adafactor", honoured=OPTIONS, unknown=unknown)
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    return WholeParameterRule("adafactor", "torch.optim.Adafactor", AdafactorRule(), format_, shapes, check=check)


# ----------------------------------------------------------------------------------------------------------------------
# Rules that a user registers for an optimizer class: tried out beside the class before they are used.
# ----------------------------------------------------------------------------------------------------------------------


_TRIED_SIDES = (6, 4, 3, 2, 5, 7)
_STEPS = 3
_RTOL, _ATOL = 1e-4, 1e-6


def believed(optimizer: torch.optim.Optimizer, rule: MatrixRule, format_: StateFormat) -> Rule:
    """Make the rule of a class that one was registered for.

    Arguments:
        optimizer: an optimizer of the class; the options of its groups are tried out.
        rule: the registered one.
        format_: how states of the parameter's shape are stored.

    Raises:
        ConfigError: the rule ends elsewhere than the class; by how much.
    """
    running, name, title = OptimizerTrial(optimizer), type(optimizer).__name__.lower(), type(optimizer).__qualname__
    shapes = dict.fromkeys(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])

    def signature(group: Mapping[str, Any]) -> str:
        """Name the states of each shape; a shape that the rule refuses under these options has none."""
        named = []
        for shape in shapes:
            try:
                named.append((shape, sorted(states_of(rule, shape, group).items())))
            except Exception:  # `WholeParameterRule` refuses such a parameter
                continue
        return str(named)

    own: dict[str, list[Shape]] = {}
    options: dict[str, dict[str, Any]] = {}
    writes: list[Shape] = []
    for group in optimizer.param_groups:
        given = options_of(group)
        dims = sorted({p.dim() for p in group["params"] if p.dim() <= len(_TRIED_SIDES)})
        # Two of each: a class that looks at several parameters at once ends elsewhere than its rule.
        if _try_out(running, rule, tried_group(group), [_TRIED_SIDES[:dim] for dim in dims for _ in range(2)]):
            writes.append(_TRIED_SIDES[: dims[0]])
        options.setdefault(key := signature(given), given)
        own.setdefault(key, []).extend(tuple(p.shape) for p in group["params"])
    written = (lambda group: running.written(group, writes[0])) if writes else None
    parts = {
        key: WholeParameterRule(name, title, rule, format_, own[key], options[key], written=written) for key in own
    }
    if len(parts) == 1:
        return next(iter(parts.values()))
    refusal = (
        f"The rule of {name} names other states for the options of a parameter group than for those of all groups that "
        "were prepared. Prepare again with them."
    )
    return CombinedRule(name, parts, lambda group: signature(options_of(group)), refusal)


def _try_out(running: OptimizerTrial, rule: MatrixRule, group: dict[str, Any], shapes: Sequence[Shape]) -> bool:
    """Take the same steps by the class, on all shapes together, and by the rule; refuse a difference.

    Returns:
        True if the class writes into its group.
    """
    if not shapes:
        return False
    title = running.cls.__qualname__
    values, *grads = random_rows(shapes, 1 + _STEPS)
    ran = running.trial(group, [value.clone() for value in values], [[g.clone() for g in row] for row in grads])
    running.check_written(group, ran, _STEPS, shapes[0])
    for k, shape in enumerate(shapes):
        try:
            states = _by_rule(running, rule, group, values[k], [row[k] for row in grads])
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The rule that was registered for {title} failed beside it on a parameter of shape {shape}: "
                f"{one_line(error)}"
            ) from error
        _compare(title, ran, k, values[k], states)
    return bool(ran.written)


def _by_rule(
    running: OptimizerTrial, rule: MatrixRule, group: Mapping[str, Any], value: Tensor, grads: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Update a parameter in place by the rule, and return its states.

    Raises:
        ConfigError: the rule changes the gradient or the group.
    """
    title, options = running.cls.__qualname__, dict(group)
    named = states_of(rule, tuple(value.shape), options)
    states = {name: torch.zeros(tuple(form), device="cpu") for name, form in named.items()}
    for step, grad in enumerate(grads, 1):
        seen, given = grad.clone(), {**options}
        with torch.no_grad():
            rule.update(value, seen, states, given, step)
        if not torch.equal(grad, seen):
            raise ConfigError(f"The rule that was registered for {title} changes the gradient: let it copy it.")
        if not alike(given, options):
            raise ConfigError(f"The rule that was registered for {title} changes the group, which is all ranks'.")
        options |= running.written(options, tuple(value.shape))
    return states


def _compare(title: str, ran: TrialResult, k: int, value: Tensor, states: Mapping[str, Tensor]) -> None:
    """Refuse a rule whose parameter, or a state that the class keeps in the same form, differs from the class's."""
    kept = ran.states[k]
    pairs = {"the parameter": (ran.values[k], value)}
    for name, state in states.items():
        if isinstance(theirs := kept.get(name), Tensor) and theirs.shape == state.shape:
            pairs[repr(name)] = theirs, state
    for what, (theirs, mine) in pairs.items():
        if not torch.allclose(theirs, mine, rtol=_RTOL, atol=_ATOL, equal_nan=True):
            most = (theirs - mine).abs().max().item()
            raise ConfigError(
                f"The rule that was registered for {title} computes something else than the class: after {_STEPS} "
                f"updates of a parameter of shape {tuple(value.shape)}, {what} differs by up to {most:.3g}."
            )
