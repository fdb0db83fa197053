"""Classes that update each parameter by itself: the user's own class, run on one whole parameter after the other.

What the class keeps of a parameter is found out beforehand, on small parameters of two shapes for each number of
dimensions. Each side of a state is one of the parameter's, or the same for both. 0-dim tensors and numbers that do not
depend on the data are the parameter's own scalars; those that do are states of one value.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, one_line
from penstock.rules.rule import Hyper, Scalars
from penstock.rules.running import GenericHyper, Running, State, number, options_of
from penstock.rules.storage import StateFormat
from penstock.rules.whole import Shape, Shapes, WholeRule, specs_of

#: For each side of a state, the parameter's side that it is as long as, or its length as a negative number.
Form = tuple[int, ...]

# The sides of the small parameters. None is another's length, in one or in the other.
_FIRST, _SECOND = (5, 7, 3, 2, 4), (6, 4, 8, 3, 5)
_STEPS = 2


class Alone(WholeRule):
    """The rule that is a class which updates each parameter by itself.

    Arguments:
        optimizer: an optimizer of that class; the options of its groups are tried out.
        format_: how states of the parameter's shape are stored: fp32 or bf16.

    Raises:
        ConfigError: the class keeps state of another form, needs 8-bit states, or turns out to look at several
            parameters at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, format_: StateFormat) -> None:
        title = type(optimizer).__qualname__
        super().__init__(type(optimizer).__name__.lower(), title, format_)
        if format_.dtype == "int8":
            raise ConfigError(
                f"Options(state_dtype='int8') is not for {self.name}, whose states may have any range. Use 'fp32' or "
                "'bf16', or one of AdamW, Adam, SGD, Adagrad, Lion."
            )
        self._running = Running(optimizer)
        self._forms: dict[int, dict[str, Form]] = {}
        self._scalars: dict[str, Any] = {}  # how each scalar is made of a number
        self._scale_dims: int | None = None  # of what the scalars are advanced on
        for group in optimizer.param_groups:
            options = options_of(group)
            for dims in sorted({p.dim() for p in group["params"]}):
                self._learn(options, dims)
        known = {shape[:dims]: self.shapes(shape[:dims]) for dims in self._forms for shape in (_FIRST, _SECOND)}
        self.states = tuple(specs_of(known, format_, begins=True))
        self.scalar_names = tuple(self._scalars)

    def shapes(self, shape: Shape) -> Shapes:
        """Return the shapes of the states of a parameter of that shape, by name."""
        if len(shape) not in self._forms:
            raise ConfigError(
                f"{self._title} was prepared without a parameter of {len(shape)} dimensions, such as one of shape "
                f"{tuple(shape)}. Prepare again with it."
            )
        forms = self._forms[len(shape)]
        return {n: tuple(shape[side] if side >= 0 else -side for side in form) for n, form in forms.items()}

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> GenericHyper:  # noqa: B006
        """Read a parameter group; see `Rule.hyper`."""
        scalars = {name: value for name, value in scalars.items() if name in self._scalars}
        if step > 1 and "step" in self._scalars:  # which is not kept twice
            scalars.setdefault("step", step - 1)
        return super().hyper(group, step, scalars)

    def advance(self, hyper: Hyper) -> Scalars:
        """Return the parameters' own scalars after an update, as one on zeros leaves them."""
        assert isinstance(hyper, GenericHyper)
        if not self._scalars:
            return {}
        shape = _FIRST[: self._scale_dims]
        zero = torch.zeros(shape, dtype=torch.float32, device="cpu")
        states = {n: torch.zeros(s, dtype=torch.float32, device="cpu") for n, s in self.shapes(shape).items()}
        kept = self._run(zero, zero.clone(), states, hyper)[1]
        return {name: number(kept[name]) for name in self._scalars if kept.get(name) is not None}

    def apply(self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], hyper: GenericHyper) -> None:
        """Run the class on the parameter; see `WholeRule.apply`."""
        value, kept = self._run(matrix, grad.clone(), states, hyper)
        unknown = [n for n, v in kept.items() if v is not None and n not in states and n not in self._scalars]
        if unknown:
            raise ConfigError(
                f"{self._title} began to keep {unknown[0]!r} of a parameter of shape {tuple(matrix.shape)} after "
                "prepare(), which made no memory for it. Prepare again with the options that call for it."
            )
        given = {state.untyped_storage().data_ptr() for state in states.values()}
        moved = {}
        for name, state in states.items():
            after = kept.get(name)
            if after is None or after.data_ptr() == state.data_ptr():
                continue
            if after.shape != state.shape:
                raise ConfigError(
                    f"{self._title} keeps {name!r} of shape {tuple(after.shape)} for a parameter of shape "
                    f"{tuple(matrix.shape)}, where small parameters let {tuple(state.shape)} be expected: sizes decide "
                    "its form. Give prepare() a rule for it: penstock.optim.register."
                )
            # Two states may have changed places: none is written over before it was read.
            moved[name] = after.clone() if after.untyped_storage().data_ptr() in given else after
        for name, after in moved.items():
            states[name].copy_(after)
        if value.data_ptr() != matrix.data_ptr():
            matrix.copy_(value)

    def temporaries(self, shape: Shape) -> int:
        """Return four tensors of the parameter's shape beside a copy of the gradient: nothing is known of the class."""
        return 4 * 5 * torch.Size(shape).numel()

    def _run(
        self, value: Tensor, grad: Tensor, states: Mapping[str, Tensor], hyper: GenericHyper
    ) -> tuple[Tensor, State]:
        """Run one step of the class on fp32 tensors, changed in place. Return the value and the state afterwards."""
        state: State = {}
        if hyper.step > 1:  # at the first the class makes its state itself
            state = {name: self._scalars[name](scalar) for name, scalar in hyper.scalars.items()}
            state |= states
        values, kept = self._running.steps(hyper.group, [value], [[grad]], state)
        return values[0], kept[0]

    def _learn(self, group: Mapping[str, Any], dims: int) -> None:
        """Try the class on parameters of so many dimensions, with the options of a group, and note what it keeps.

        Raises:
            ConfigError: the class cannot be run like this.
        """
        if not 1 <= dims <= len(_FIRST):
            raise ConfigError(f"{self._title} cannot be run on a parameter of {dims} dimensions, only on 1 to 5.")
        first, second = (self._try_out(group, shape[:dims]) for shape in (_FIRST, _SECOND))
        forms: dict[str, Form] = {}
        for name, kept in first[0].items():
            seen = [kept, *(state.get(name) for state in (first[1], *second))]
            if kept is None:
                continue
            if self._is_scalar(name, seen):
                self._scalars[name] = (
                    partial(torch.tensor, dtype=kept.dtype, device="cpu") if isinstance(kept, Tensor) else type(kept)
                )
            else:
                shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in seen]
                forms[name] = self._form(name, dims, shapes[0], shapes[2])
        known = self._forms.setdefault(dims, {})
        for name, form in forms.items():
            if known.setdefault(name, form) != form:
                raise ConfigError(f"{self._title} keeps {name!r} in another form in each of two parameter groups.")
        self._scale_dims = dims

    def _is_scalar(self, name: str, seen: Sequence[Any]) -> bool:
        """Whether what the class keeps is one number that does not depend on the data: of four parameters the same.

        Raises:
            ConfigError: it is neither that nor an fp32 tensor.
        """
        kept = seen[0]
        if isinstance(kept, Tensor) and kept.dim():
            is_alike = False
        elif isinstance(kept, Tensor | bool | int | float):
            is_alike = len({number(value) for value in seen}) == 1
        else:
            raise ConfigError(f"{self._title} keeps {name!r}, a {type(kept).__name__}: Penstock can carry tensors.")
        if not is_alike and (not isinstance(kept, Tensor) or kept.dtype != torch.float32):
            what = f"a tensor of {kept.dtype}" if isinstance(kept, Tensor) else f"a {type(kept).__name__} of the data"
            raise ConfigError(
                f"{self._title} keeps {name!r}, {what}. Penstock can carry fp32 tensors, and numbers that do not "
                "depend on the data."
            )
        return is_alike

    def _form(self, name: str, dims: int, first: Shape | None, second: Shape | None) -> Form:
        """Say what the sides of a state are, from its shapes for two small parameters."""
        form = []
        if first is not None and second is not None and len(first) == len(second):
            for a, b in zip(first, second, strict=True):
                sides = [side for side in range(dims) if (a, b) == (_FIRST[side], _SECOND[side])]
                form += sides[:1] or ([-a] if a == b and a else [])
            if len(form) == len(first):
                return tuple(form)
        raise ConfigError(
            f"{self._title} keeps {name!r} of shape {first} for a parameter of shape {_FIRST[:dims]}, and {second} for "
            f"{_SECOND[:dims]}. Penstock can carry states whose sides are the parameter's, or always the same."
        )

    def _try_out(self, group: Mapping[str, Any], shape: Shape) -> Sequence[State]:
        """Run the class on two parameters together and one by one, and refuse one for which that differs.

        Returns:
            What it keeps of each of the two.

        Raises:
            ConfigError: the results differ, or the class fails.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        data = torch.randn((1 + _STEPS, 2, *shape), generator=generator, dtype=torch.float32, device="cpu")
        try:
            values, kept = self._running.steps(group, _copies(data[0]), [_copies(grads) for grads in data[1:]])
            for k in range(2):
                alone, state = self._running.steps(
                    group, _copies(data[0, k : k + 1]), [_copies(g[k : k + 1]) for g in data[1:]]
                )
                pairs = [(values[k], alone[0]), *((v, state[0].get(n)) for n, v in kept[k].items())]
                if not all(_alike(a, b) for a, b in pairs):
                    raise ConfigError(
                        f"{self._title} does not update each parameter by itself: two of them together end elsewhere "
                        "than one by one. Penstock runs it on one at a time."
                    )
        except PenstockError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._title} failed on a small parameter of shape {shape}: {one_line(error)}"
            ) from error
        return kept


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy each of some tensors."""
    return [tensor.clone() for tensor in tensors]


def _alike(a: Any, b: Any) -> bool:
    """Whether two values or states are nearly the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-7, equal_nan=True)
    return bool(number(a) == number(b))
