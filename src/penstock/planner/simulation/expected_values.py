"""Expected values of fake tensors, as far as routing to experts needs them: the sizes of what a mask chooses.

Which rows go to an expert depends on values. How many do is known on average: indices that `topk` returns are taken
to be equally likely. What is made of them is followed as a mean: of a mask, it is the share of ones.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.planner.simulation.fake_tensor import ByStorage, is_fake
from penstock.planner.simulation.shapes import Shaped

aten = torch.ops.aten


class Indices(NamedTuple):
    """Numbers from 0 up to, and without, a bound, each as likely."""

    bound: int


class Mean(NamedTuple):
    """Numbers of which the mean is known, such as a mask's share of ones."""

    value: float


Known = Indices | Mean | None
_Lookup = Callable[[Any], Known]
_Rule = Callable[[_Lookup, Sequence[Any], Sequence[Tensor]], Sequence[Known]]


class ExpectedValues:
    """What is known of the values of fake tensors, by storage.

    Arguments:
        make: makes a fake tensor.
        refusal: makes the error of an operation.
        share: of ones in masks of which nothing is known; `None` where that is an error.
    """

    def __init__(
        self, make: Callable[[Shaped], Tensor], refusal: Callable[[Any, str], Exception], share: float | None
    ) -> None:
        self._make = make
        self._refusal = refusal
        self._share = share
        self._known: ByStorage[Indices | Mean] = ByStorage()

    def follow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, written: Sequence[int | str]
    ) -> None:
        """Note what an operation that was not run makes known; forget what it overwrites."""
        rule = _RULES.get(func._overloadpacket)
        if rule is not None:
            made = out if isinstance(out, tuple) else (out,)
            for tensor, known in zip(made, rule(self._known.get, args, made), strict=True):
                self._known.put(tensor, known)
        elif written and len(self._known):
            for which in written:
                target = kwargs.get(which) if isinstance(which, str) else args[which]
                if isinstance(target, Tensor):
                    self._known.put(target, None)

    def settle(self, func: Any, args: Sequence[Any]) -> Any:
        """Return what an operation would whose result depends on values.

        Raises:
            ConfigError: nothing is known of these.
        """
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            known = self._known.get(args[0])
            if not isinstance(known, Mean) or args[0].is_floating_point():
                raise self._refusal(func, "reads a value, and a simulation has none")
            return bool(round(known.value)) if args[0].dtype == torch.bool else round(known.value)
        if packet is aten.nonzero:
            (mask,) = args
            if self._ones(func, mask) >= 1:
                return torch.nonzero(torch.ones(mask.shape, dtype=torch.bool))
            count = self._count(func, mask)
            return self._make(Shaped((count, mask.dim()), (1, max(count, 1)), torch.int64))
        if packet is aten.masked_select:
            values, mask = args
            rows = prod(torch.broadcast_shapes(values.shape, mask.shape))  # type: ignore[no-untyped-call]
            return self._flat(round(self._ones(func, mask) * rows), values.dtype)
        raise self._refusal(func, "returns what depends on values, and a simulation has none")

    def indices(self, func: Any, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices in place of masks: one for each dimension of a mask.

        Raises:
            ConfigError: nothing is known of a mask.
        """
        found: list[Tensor | None] = []
        for index in given:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                found += (self._flat(self._count(func, index), torch.int64) for _ in range(index.dim()))
        return found

    def _count(self, func: Any, mask: Tensor) -> int:
        return round(self._ones(func, mask) * mask.numel())

    def _ones(self, func: Any, mask: Tensor) -> float:
        """Return the share of ones in a mask."""
        if not is_fake(mask):
            return int(torch.count_nonzero(mask)) / max(mask.numel(), 1)
        known = self._known.get(mask)
        if isinstance(known, Mean):
            return known.value
        if self._share is None:
            raise self._refusal(func, "counts what a mask chooses, and a simulation has no values")
        return self._share

    def _flat(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._make(Shaped((count,), (1,), dtype))


def _copied(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    return [known(args[0])]


def _chosen(place: int, known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    """Note the indices along a dimension, which are returned last."""
    dim = args[place] if len(args) > place else -1
    return [*(None for _ in made[1:]), Indices(args[0].shape[dim]) if dim is not None and args[0].dim() else None]


def _one_of(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    """Note that the least and the greatest of indices are within their bound, which `one_hot` asks for."""
    found = known(args[0])
    return [Mean(found.bound - 1) if isinstance(found, Indices) and len(args) == 1 else None for _ in made]


def _scattered(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    """Count ones that are put among zeros: in each row as many as there are indices, of as many as these may be."""
    _, dim, index, value = args[:4]
    found = known(index)
    if not isinstance(found, Indices) or isinstance(value, Tensor) or value != 1:
        return [None]
    return [Mean(min(index.shape[dim] / found.bound, 1.0))]


def _equal(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    found = known(args[0])
    return [Mean(1 / found.bound) if isinstance(found, Indices) else None]


def _counted(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    found = known(args[0])
    return [Mean(found.value * args[0].numel() / max(made[0].numel(), 1)) if isinstance(found, Mean) else None]


def _some(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    (found,) = _counted(known, args, made)
    return [Mean(min(found.value, 1.0)) if isinstance(found, Mean) else None]


def _positive(known: _Lookup, args: Sequence[Any], made: Sequence[Tensor]) -> Sequence[Known]:
    """Count what is not 0: of counts of ones, as many as there are ones, up to all."""
    return _some(known, args, made) if not isinstance(args[1], Tensor) and args[1] == 0 else [None]


#: For each result of an operation what is known of it, from what is known of its arguments.
_RULES: Mapping[Any, _Rule] = {
    aten.topk: partial(_chosen, 2),
    aten.argmax: partial(_chosen, 1),
    aten.aminmax: _one_of,
    aten.min: _one_of,
    aten.max: _one_of,
    aten.scatter_: _scattered,
    aten.scatter: _scattered,
    aten.eq: _equal,
    aten.sum: _counted,
    aten.any: _some,
    aten.gt: _positive,
    aten.ne: _positive,
    aten.clone: _copied,
    aten._to_copy: _copied,
    aten.index: _copied,
}
