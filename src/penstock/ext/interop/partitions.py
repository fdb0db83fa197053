"""Where each parameter lies in the flat tensors of the ranks of DeepSpeed's ZeRO. Pure arithmetic.

Stages 1 and 2 lay the parameters of a param group out one after the other and cut that into a partition for each rank:

    rank 0 | a a a a b b | rank 1 | b b c c c . |         . padding

Stage 3 cuts each parameter, and lays out what a rank has of each, in groups of parameters:

    rank 0 | a a b b c c | rank 1 | a a b b c . |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.ext.interop.importing import Read


class Span(NamedTuple):
    """Elements of a parameter, `start` to `stop`, that one rank's flat tensor has from its element `inside` on."""

    start: int
    stop: int
    rank: int
    inside: int


@dataclass(frozen=True)
class Flat:
    """A flat group: its tensors on each rank, all of the same layout.

    Attributes:
        master: the fp32 weights, by rank.
        states: the optimizer's states, by name and rank.
        step: how often the group was updated.
    """

    master: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]
    step: int


def concatenated(
    shapes: Sequence[tuple[str, tuple[int, ...]]], flat: Flat, paddings: Sequence[int]
) -> Iterator[list[Span]]:
    """Find parameters that lie one after the other in all ranks' tensors together.

    Arguments:
        shapes: the name and the shape of each parameter, in their order.
        flat: the tensors that they lie in.
        paddings: how many elements are left free after each parameter.

    Yields:
        For each parameter, where its elements are.

    Raises:
        CheckpointError: the tensors have too few elements for the parameters, or too many.
    """
    partitions = [(rank, tensor.numel()) for rank, tensor in enumerate(flat.master)]
    offset = 0
    for (name, extents), padding in zip(shapes, paddings, strict=True):
        spans = chained(partitions, offset, offset + prod(extents))
        if sum(span.stop - span.start for span in spans) != prod(extents):
            raise CheckpointError(
                f"The optimizer files end within '{name}': they are not of the model file.", field=name
            )
        yield spans
        offset += prod(extents) + padding
    left = sum(numel for _, numel in partitions) - offset
    if left >= 2 * len(partitions):  # DeepSpeed pads to a multiple of it
        raise CheckpointError(
            f"The optimizer files have {left:,} elements more than the model file.", field="param_shapes"
        )


def partitioned(shapes: Sequence[tuple[str, tuple[int, ...]]], flat: Flat) -> Iterator[list[Span]]:
    """Find parameters that are cut into as many parts as there are ranks, the last one shorter.

    Raises:
        CheckpointError: the tensors have not the size that this makes.
    """
    ranks = len(flat.master)
    inside = 0
    for _, extents in shapes:
        numel = prod(extents)
        part = -(-numel // ranks)
        yield [
            Span(rank * part, min((rank + 1) * part, numel), rank, inside)
            for rank in range(ranks)
            if rank * part < numel
        ]
        inside += part
    if any(tensor.numel() != inside for tensor in flat.master):
        raise CheckpointError(
            "The optimizer files are not of the model file: their sizes differ.", field="param_shapes"
        )


def chained(partitions: Sequence[tuple[int, int]], first: int, last: int) -> list[Span]:
    """Find elements `first` to `last` in tensors that follow each other, each given by its rank and its elements."""
    spans, begin = [], 0
    for rank, numel in partitions:
        start, stop = max(first, begin), min(last, begin + numel)
        if start < stop:
            spans.append(Span(start - first, stop - first, rank, start - begin))
        begin += numel
    return spans


def reader(tensors: Sequence[Tensor], spans: Sequence[Span]) -> Read:
    """Make a function that reads elements of a parameter from where its spans say that they are."""

    def read(start: int, stop: int) -> Tensor:
        parts = [
            tensors[span.rank][span.inside + max(start, span.start) - span.start :][
                : min(stop, span.stop) - max(start, span.start)
            ]
            for span in spans
            if max(start, span.start) < min(stop, span.stop)
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    return read
