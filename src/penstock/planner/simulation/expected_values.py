"""What is known of fake values: how many of a mask are ones, what an index may be. Sizes follow from it.

Routing to experts is of this kind: which rows go to an expert depends on values, how many do is known on average.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.planner.simulation.fake_tensor import ByStorage, is_fake
from penstock.planner.simulation.operation_cost import cost
from penstock.planner.simulation.program import Op
from penstock.planner.simulation.shapes import Shaped

aten = torch.ops.aten


class Share(NamedTuple):
    """A mask, or zeros and ones: the share of ones."""

    ones: float


class Indices(NamedTuple):
    """Numbers from 0 up to, and without, a bound, each as likely."""

    bound: int


class Mean(NamedTuple):
    """Numbers of which the mean is known, such as counts of ones."""

    value: float


class Value(NamedTuple):
    """A single number that is known."""

    value: int | float | bool


Known = Share | Indices | Mean | Value


class Maker(Protocol):
    """What shares need of a simulation."""

    def make(self, shaped: Shaped) -> Tensor:
        """Make a fake tensor."""

    def refusal(self, func: Any, why: str) -> ConfigError:
        """Return the error of an operation."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Simulate an operation."""


class ExpectedValues:
    """What is known of the values of fake tensors, by storage.

    Arguments:
        share: of ones in masks of which nothing is known; `None` where that is an error.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._known: ByStorage[Known] = ByStorage()

    def of(self, tensor: Tensor) -> Known | None:
        """Return what is known of a tensor's values."""
        if not is_fake(tensor):
            ones = torch.count_nonzero(tensor).item()
            return Share(ones / max(tensor.numel(), 1))
        return self._known.get(tensor)

    def follow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, written: Sequence[int | str]
    ) -> None:
        """Note what an operation that was not run makes known."""
        rule = _RULES.get(func._overloadpacket)
        if rule is not None:
            for tensor, known in rule(self, args, kwargs, out):
                if known is None:
                    self._known.forget(tensor)
                else:
                    self._known.put(tensor, known)
        elif written and len(self._known):
            for which in written:
                target = kwargs.get(which) if isinstance(which, str) else args[which]
                if isinstance(target, Tensor):
                    self._known.forget(target)

    def settle(self, maker: Maker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Op | None]:
        """Return what an operation would whose result depends on values, as far as these are known.

        Returns:
            The result, and what it costs; `None` where nothing is left to be told.

        Raises:
            ConfigError: they are not.
        """
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            known = self._known.get(args[0])
            if isinstance(known, Value):
                return known.value, None
            if isinstance(known, Mean) and not args[0].is_floating_point():
                return round(known.value), None
            raise maker.refusal(func, "reads a value, and a simulation has none")
        if packet is aten.nonzero:
            found = self._nonzero(maker, func, args[0])
            return found, cost(func, args, kwargs, found)
        if packet is aten.masked_select:
            mask = args[1]
            rows = torch.broadcast_shapes(args[0].shape, mask.shape)  # type: ignore[no-untyped-call]
            found = maker.make(_flat(round(self._ones(maker, func, mask) * prod(rows)), args[0].dtype))
            return found, cost(func, args, kwargs, found)
        if packet in (aten.index, aten._unsafe_index):
            indices = [part for index in args[1] for part in self._numbers(maker, func, index)]
            return maker.__torch_dispatch__(func, (), (args[0], indices), kwargs), None
        raise maker.refusal(func, "returns what depends on values, and a simulation has none")

    def _ones(self, maker: Maker, func: Any, mask: Tensor) -> float:
        known = self.of(mask)
        if isinstance(known, Share):
            return known.ones
        if self._share is None:
            raise maker.refusal(func, "counts what a mask chooses, and a simulation has no values")
        return self._share

    def _nonzero(self, maker: Maker, func: Any, mask: Tensor) -> Tensor:
        ones = self._ones(maker, func, mask)
        if ones >= 1:
            return torch.nonzero(torch.ones(mask.shape, dtype=torch.bool))
        shape = (round(ones * mask.numel()), mask.dim())
        return maker.make(Shaped(shape, (1, max(shape[0], 1)), torch.int64))

    def _numbers(self, maker: Maker, func: Any, index: Tensor | None) -> list[Tensor | None]:
        """Return the indices that stand for a mask, one for each of its dimensions."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        count = round(self._ones(maker, func, index) * index.numel())
        return [maker.make(_flat(count, torch.int64)) for _ in range(index.dim())]


def _flat(count: int, dtype: torch.dtype) -> Shaped:
    return Shaped((count,), (1,), dtype)


Notes = list[tuple[Tensor, Known | None]]
_Rule = Callable[[ExpectedValues, Sequence[Any], Mapping[str, Any], Any], Notes]


def _dimension(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, default: int = -1) -> int:
    given = args[place] if len(args) > place else kwargs.get("dim", default)
    return default if given is None else int(given)


def _ranked(place: int) -> _Rule:
    """Make the rule of what returns values and their indices along a dimension."""

    def rule(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
        if not isinstance(out, tuple):  # max and min over everything
            return _extreme(shares, args, kwargs, out)
        size = args[0].shape[_dimension(args, kwargs, place)] if args[0].dim() else 1
        return [(out[1], Indices(size))]

    return rule


def _chosen(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    whole = len(args) < 2 or args[1] is None
    size = args[0].numel() if whole else args[0].shape[_dimension(args, kwargs, 1)]
    return [(out, Indices(size))]


def _extreme(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    """Note the bounds of indices, which `one_hot` asks for."""
    known = shares.of(args[0])
    if not isinstance(known, Indices):
        return []
    low, high = out if isinstance(out, tuple) else (out, out)
    return [(low, Value(0)), (high, Value(known.bound - 1))]


def _same(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    return [(out, shares.of(args[0]))]


def _copied(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    return [(out, shares.of(args[1]))] if isinstance(args[1], Tensor) else []


def _filled(value: float) -> _Rule:
    return lambda shares, args, kwargs, out: [(out, Share(value))]


def _scattered(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    """Count ones that are put where indices say: in each row as many as there are, of as many as they may be."""
    target, dim, index = args[0], args[1], args[2]
    before, known = shares.of(target), shares.of(index)
    wide = known.bound if isinstance(known, Indices) else target.shape[dim]
    if not isinstance(before, (Share, type(None))) or not wide:
        return [(out, None)]
    return [(out, Share(min(index.shape[dim] / wide, 1.0)))]


def _summed(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    known = shares.of(args[0])
    if not isinstance(known, (Share, Mean)) or not out.numel():
        return []
    each = known.ones if isinstance(known, Share) else known.value
    return [(out, Mean(each * args[0].numel() / out.numel()))]


def _counted(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    return [(out, Mean(args[0].numel() / max(out.numel(), 1)))]


def _positive(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    """Count what is not none: of counts of ones, as many as there are ones, up to all."""
    known = shares.of(args[0])
    if not _is_zero(args[1]) or not isinstance(known, (Share, Mean)):
        return []
    return [(out, known if isinstance(known, Share) else Share(min(known.value, 1.0)))]


def _equal(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    known = shares.of(args[0])
    if isinstance(known, Indices):
        return [(out, Share(1 / max(known.bound, 1)))]
    return [(out, Share(1 - known.ones))] if isinstance(known, Share) and _is_zero(args[1]) else []


def _is_zero(value: Any) -> bool:
    """Say whether an operand is the number 0. It may be a tensor, whose values nobody asks for."""
    return not isinstance(value, Tensor) and bool(value == 0)


def _inverted(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
    known = shares.of(args[0])
    return [(out, Share(1 - known.ones))] if isinstance(known, Share) else [(out, None)]


def _joined(either: bool) -> _Rule:
    """Make the rule of two masks, whose ones are taken to be independent."""

    def rule(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
        known = [shares.of(tensor) for tensor in args[:2] if isinstance(tensor, Tensor)]
        ones = [each.ones for each in known if isinstance(each, Share)]
        if len(ones) < 2:
            return [(out, None)]
        return [(out, Share(1 - (1 - ones[0]) * (1 - ones[1]) if either else ones[0] * ones[1]))]

    return rule


def _any_or_all(least: float) -> _Rule:
    def rule(shares: ExpectedValues, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Notes:
        known = shares.of(args[0])
        return [(out, Value(known.ones >= (least or 1e-12)))] if isinstance(known, Share) and not out.dim() else []

    return rule


_RULES: dict[Any, _Rule] = {
    aten.topk: _ranked(2),
    aten.sort: _ranked(1),
    aten.max: _ranked(1),
    aten.min: _ranked(1),
    aten.argsort: _chosen,
    aten.argmax: _chosen,
    aten.argmin: _chosen,
    aten.aminmax: _extreme,
    aten.zeros: _filled(0.0),
    aten.zeros_like: _filled(0.0),
    aten.new_zeros: _filled(0.0),
    aten.zero_: _filled(0.0),
    aten.ones: _filled(1.0),
    aten.ones_like: _filled(1.0),
    aten.scatter_: _scattered,
    aten.scatter: lambda shares, args, kwargs, out: [
        (out, known) for _, known in _scattered(shares, args, kwargs, out)
    ],
    aten.copy_: _copied,
    aten.sum: _summed,
    aten.bincount: _counted,
    aten.histc: _counted,
    aten.gt: _positive,
    aten.ne: _positive,
    aten.eq: _equal,
    aten.logical_not: _inverted,
    aten.bitwise_not: _inverted,
    aten.logical_and: _joined(either=False),
    aten.bitwise_and: _joined(either=False),
    aten.logical_or: _joined(either=True),
    aten.bitwise_or: _joined(either=True),
    aten.any: _any_or_all(0.0),
    aten.all: _any_or_all(1.0),
    **{
        packet: _same
        for packet in (
            aten.clone,
            aten._to_copy,
            aten.index,
            aten.index_select,
            aten.gather,
            aten.masked_select,
        )
    },
}
