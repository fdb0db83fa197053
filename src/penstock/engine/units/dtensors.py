"""Parameters that ranks divide (torch's DTensor): which elements are this rank's, and where they lie.

A unit's buffer holds a rank's own elements: those of `_local_tensor`, whose memory may be exchanged in place. Torch's
module of them takes seconds to import, so it is asked for only where somebody has done so: without, there are none.
"""

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.layout import Region
from penstock.machine.mesh import lines_along


def is_divided(tensor: object) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_elements(tensor: Tensor) -> Tensor:
    """Give this rank's elements of a DTensor, in its memory; another tensor as it is."""
    if not is_divided(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """Give this rank's elements of a DTensor as they are divided in another one. Collective where that differs."""
    divided: Any = value
    placements = like._spec.placements  # type: ignore[attr-defined]
    if tuple(divided.placements) != tuple(placements):
        divided = divided.redistribute(placements=placements)
    part: Tensor = divided.to_local()
    return part


def give_elements(tensor: Tensor, values: Tensor) -> None:
    """Put other elements, of any dtype and device, under a DTensor, which stays the same object."""
    held: Any = tensor
    if values.dtype != held.dtype or values.device != held.device:
        held.data = like_it = _another(held, values)  # the outside alone, which has no memory
        held._spec = like_it._spec
    held._local_tensor = values


def emptied(tensor: Tensor) -> Tensor:
    """Make a DTensor that is divided as one on the meta device, without elements, on the device of its mesh."""
    held: Any = tensor
    device = held.device_mesh.device_type
    empty: Tensor = _another(held, torch.empty(0, dtype=held.dtype, device=device))
    return empty


def _another(held: Any, values: Tensor) -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = held._spec.tensor_meta
    meta = TensorMeta(meta.shape, meta.stride, values.dtype)
    spec = DTensorSpec(held._spec.mesh, held._spec.placements, tensor_meta=meta)
    return DTensor(values, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def spec_of(tensor: Tensor) -> Any:
    """Return torch's description of how ranks divide a DTensor."""
    return tensor._spec  # type: ignore[attr-defined]


def wrapped(values: Tensor, spec: Any) -> Tensor:
    """Make a DTensor of this rank's elements and a description."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor(values, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def own_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of this rank's elements."""
    return tuple(own_elements(tensor).shape)


def most_bytes(tensor: Tensor) -> int:
    """Return the bytes of the largest part that a rank has of a tensor: the same number on each of them."""
    if not is_divided(tensor):
        return tensor.nbytes
    held: Any = tensor
    sizes = list(held.shape)
    for dimension, placement in enumerate(held.placements):
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // held.device_mesh.size(dimension))
    nbytes: int = prod(sizes) * held.dtype.itemsize
    return nbytes


def region_of(tensor: Tensor) -> Region | None:
    """Say where this rank's elements lie in a whole tensor; `None` if they are all of it.

    Raises:
        ConfigError: they are not where torch divides tensors of its size.
    """
    box = box_of(tensor)
    if box is not None and box[0] != own_shape(tensor):
        raise ConfigError(
            f"this rank's part of the DTensor {tuple(tensor.shape)} has shape {own_shape(tensor)}, and torch divides "
            f"it into {box[0]}: make it with distribute_tensor(), or from_local() of parts of torch.chunk()."
        )
    return None if box is None else box[1]


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], Region] | None:
    """Say by its placements alone which box of a whole tensor is this rank's: its shape, and where it lies.

    `None` where each rank has all of it. One that is about to get values may have no elements yet.
    """
    if not is_divided(tensor):
        return None
    held: Any = tensor
    coordinate = held.device_mesh.get_coordinate()
    sizes, offsets = list(held.shape), [0] * held.ndim
    for dimension, placement in enumerate(held.placements):
        if placement.is_shard():
            ranks, along = held.device_mesh.size(dimension), placement.dim % held.ndim
            chunk = -(-sizes[along] // ranks)
            start = min(sizes[along], chunk * coordinate[dimension])
            sizes[along] = min(sizes[along], start + chunk) - start
            offsets[along] += start
    # Where another rank has a part, this one says so too, be it all rows: they put whole tensors together as one.
    parted = any(len(line) > 1 for line in divided_over(tensor))
    return (tuple(sizes), Region(tuple(held.shape), tuple(offsets))) if parted else None


def cut(whole: Tensor, shape: Sequence[int], region: Region) -> Tensor:
    """View the box of a region in a whole tensor."""
    return whole[tuple(slice(first, first + size) for first, size in zip(region.offsets, shape, strict=True))]


def counts_once(tensor: Tensor, lines: Sequence[Sequence[int]], rank: int) -> bool:
    """Whether this rank's elements are counted, where others have the same: on the first rank of each line of copies.

    Arguments:
        tensor: a parameter.
        lines: the ranks of each dimension of the mesh over which parameters are divided, this one among them.
        rank: this one.
    """
    divided = divided_over(tensor) if is_divided(tensor) else []
    return all(line[0] == rank for line in lines if list(line) not in divided)


def divided_over(tensor: Tensor) -> list[list[int]]:
    """List the lines of ranks over which a DTensor's elements are divided."""
    held: Any = tensor
    lines = lines_along(held.device_mesh)
    return [line for line, placement in zip(lines, held.placements, strict=True) if placement.is_shard()]


def is_alike(tensor: Tensor) -> bool:
    """Whether ranks that divide parameters have the same elements of it: of no dimension of its mesh a part each."""
    return not (is_divided(tensor) and divided_over(tensor))


def give_values(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter that no unit has yet other values, of any shape and on any device; a DTensor its elements."""
    if is_divided(parameter):
        give_elements(parameter, values)
    else:
        parameter.data = values
