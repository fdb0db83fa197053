"""DTensor parameters, parameters over shared memory, and stand-ins for initialisation."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError
from penstock.layout import Region
from penstock.runtime.topology import DIVIDE, describe, lines_along, roles_of

# ----------------------------------------------------------------------------------------------------------------------
# DTensor parameters: this rank's elements, and where they lie in the whole parameter.
#
# A unit's buffer holds a rank's own elements: those of `_local_tensor`, whose memory can be replaced in place. The
# import of `torch.distributed.tensor` takes seconds. Without it there is no DTensor, so this looks at `sys.modules`.
# ----------------------------------------------------------------------------------------------------------------------


def is_divided(tensor: object) -> bool:
    """Return True for a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_elements(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a DTensor, in its memory; another tensor itself."""
    if not is_divided(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's elements of a DTensor in the placements of another one. Collective where these differ."""
    divided: Any = value
    part: Tensor = divided.redistribute(placements=like._spec.placements).to_local()  # type: ignore[attr-defined]
    return part


def give_elements(tensor: Tensor, values: Tensor) -> None:
    """Replace the elements of a DTensor, in place, by others of any dtype and device."""
    held: Any = tensor
    if values.dtype != held.dtype or values.device != held.device:
        held.data = like_it = _another(held, values)  # the wrapper alone, which has no memory
        held._spec = like_it._spec
    held._local_tensor = values


def _another(held: Any, values: Tensor) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = held._spec.tensor_meta
    meta = TensorMeta(meta.shape, meta.stride, values.dtype)
    return wrapped(values, DTensorSpec(held._spec.mesh, held._spec.placements, tensor_meta=meta))


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
    """Return the bytes of the largest part of a tensor on any rank: the same number on every rank."""
    if not is_divided(tensor):
        return tensor.nbytes
    sizes, _ = _box(tensor, [0] * tensor.device_mesh.ndim)  # type: ignore[attr-defined]
    return prod(sizes) * tensor.dtype.itemsize  # the first part of each dimension is the largest


def region_of(tensor: Tensor) -> Region | None:
    """Return where this rank's elements lie in the whole tensor; `None` if they are all of it.

    Raises:
        ConfigError: they are not the part that torch's placements give this rank.
    """
    box = box_of(tensor)
    if box is not None and box[0] != own_shape(tensor):
        raise ConfigError(
            f"this rank's part of the DTensor {tuple(tensor.shape)} has shape {own_shape(tensor)}, and torch divides "
            f"it into {box[0]}: make it with distribute_tensor(), or from_local() of parts of torch.chunk()."
        )
    return None if box is None else box[1]


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], Region] | None:
    """Return by its placements the box of a whole tensor that is this rank's: its shape, and where it lies.

    `None` where each rank has all of it. Does not look at the elements, which may be missing before first values.
    """
    # A box also where this rank has all rows and another rank a part: ranks assemble whole tensors together.
    if not any(len(line) > 1 for line in divided_over(tensor)):
        return None
    sizes, offsets = _box(tensor, tensor.device_mesh.get_coordinate())  # type: ignore[attr-defined]
    return tuple(sizes), Region(tuple(tensor.shape), tuple(offsets))


def _box(tensor: Tensor, coordinate: Sequence[int]) -> tuple[list[int], list[int]]:
    """Compute the box of a DTensor that a rank at a coordinate of its mesh has: its sizes and offsets."""
    held: Any = tensor
    sizes, offsets = list(held.shape), [0] * held.ndim
    for dimension, placement in enumerate(held.placements):
        if placement.is_shard():
            ranks, along = held.device_mesh.size(dimension), placement.dim % held.ndim
            chunk = -(-sizes[along] // ranks)
            start = min(sizes[along], chunk * coordinate[dimension])
            sizes[along] = min(sizes[along], start + chunk) - start
            offsets[along] += start
    return sizes, offsets


def cut(whole: Tensor, shape: Sequence[int], region: Region) -> Tensor:
    """Return a view of the box of a region in a whole tensor."""
    return whole[tuple(slice(first, first + size) for first, size in zip(region.offsets, shape, strict=True))]


def counts_once(tensor: Tensor, lines: Sequence[Sequence[int]], rank: int) -> bool:
    """Return True if this rank's elements are counted, of those that others have too: on the first rank of each line.

    Arguments:
        tensor: a parameter.
        lines: the ranks of each dimension of the mesh over which parameters are divided, this one among them.
        rank: this one.
    """
    divided = divided_over(tensor)
    return all(line[0] == rank for line in lines if list(line) not in divided)


def divided_over(tensor: Tensor) -> list[list[int]]:
    """List the lines of ranks over which a tensor's elements are divided: of none where it is no DTensor."""
    if not is_divided(tensor):
        return []
    held: Any = tensor
    lines = lines_along(held.device_mesh)
    return [line for line, placement in zip(lines, held.placements, strict=True) if placement.is_shard()]


def give_values(parameter: Tensor, values: Tensor) -> None:
    """Replace the values of a parameter, of any shape and on any device; of a DTensor its elements."""
    if is_divided(parameter):
        give_elements(parameter, values)
    else:
        parameter.data = values


# ----------------------------------------------------------------------------------------------------------------------
# DTensors that `prepare` refuses, before anything is allocated.
# ----------------------------------------------------------------------------------------------------------------------


def check_divided(parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh | None) -> None:
    """Refuse DTensors that are not divided over `tp` or `ep` dimensions of the mesh.

    Arguments:
        parameters: the parameters of a model, with their names.
        mesh: the mesh that `prepare` was given.

    Raises:
        ConfigError: names the parameter, and prints both meshes.
    """
    for name, parameter in parameters:
        if not is_divided(parameter):
            continue
        if mesh is None:
            raise ConfigError(
                f"{_which(name, parameter)} and prepare() was given no mesh: say which ranks have copies and which "
                "have parts, prepare(mesh=init_device_mesh(..., mesh_dim_names=('dp_shard', 'tp')))."
            )
        _check(name, parameter, mesh)


def _check(name: str, parameter: Any, mesh: DeviceMesh) -> None:
    which, given = _which(name, parameter), describe(mesh)
    if parameter.device_mesh.device_type != mesh.device_type:
        raise ConfigError(f"{which} and prepare() was given the {given} of {mesh.device_type}: use one kind of device.")
    if parameter.device_mesh.get_coordinate() is None:
        raise ConfigError(f"{which} in which this rank is not; prepare() was given the {given}.")
    if mesh.get_coordinate() is None:
        return  # refused elsewhere: this rank is not in the mesh
    known = list(zip(roles_of(mesh), lines_along(mesh), strict=True))
    for line, placement in zip(lines_along(parameter.device_mesh), parameter.placements, strict=True):
        if placement.is_partial():
            raise ConfigError(f"{which}: a partial sum is no value. Redistribute it to Replicate() or Shard().")
        if len(line) == 1:
            continue
        role = next((role for role, of_mesh in known if of_mesh == line), None)
        if role is None:
            raise ConfigError(
                f"{which}, and no dimension of the {given} has its ranks {line}. Give prepare() the mesh of all "
                "dimensions, with a tp or ep dimension of these ranks."
            )
        if not placement.is_replicate() and role != DIVIDE:
            raise ConfigError(
                f"{which}: its ranks {line} share the training state in the {given}, which Penstock divides itself. "
                "Give the model before fully_shard()."
            )
        if not placement.is_replicate() and type(placement).__name__ != "Shard":
            raise ConfigError(f"{which}: only Shard() and Replicate() can be trained, not {type(placement).__name__}.")
    try:
        region_of(parameter)
    except ConfigError as error:
        raise ConfigError(f"{which}: {error}") from None


def _which(name: str, parameter: Any) -> str:
    placements = ", ".join(map(repr, parameter.placements))
    of_mesh = describe(parameter.device_mesh)
    return f"Parameter '{name}' {tuple(parameter.shape)} is a DTensor ({placements}) on a {of_mesh}"


# ----------------------------------------------------------------------------------------------------------------------
# Parameters that are two objects over the same memory: each would get a slot of its own, with values of its own.
# ----------------------------------------------------------------------------------------------------------------------


def check_aliases(model: nn.Module) -> None:
    """Refuse a trained parameter that shares elements with another parameter or with a buffer.

    Parameters of one storage without a common element are accepted, as those packed into a flat tensor. So are frozen
    ones, which are not written.

    Raises:
        ConfigError: names both.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_divided(tensor):
            tensor = own_elements(tensor).detach().requires_grad_(tensor.requires_grad)
        plain = type(tensor) in (Tensor, nn.Parameter)  # wrappers have no memory of their own
        if plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for held in by_storage.values():
        held.sort(key=lambda item: item[1].data_ptr())
        for index, (name, one) in enumerate(held):
            end = one.data_ptr() + _extent(one) * one.element_size()
            for other_name, other in held[index + 1 :]:
                if other.data_ptr() >= end:
                    break
                if (one.requires_grad or other.requires_grad) and _overlap(one, other):
                    raise ConfigError(
                        f"'{name}' {tuple(one.shape)} and '{other_name}' {tuple(other.shape)} are two objects over the "
                        "same memory. They would be trained apart. If they are to be tied, use one Parameter for both "
                        "(other.weight = one.weight); else give one of them memory of its own (.clone())."
                    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one storage, the first of which begins first, share an element."""
    distance = other.data_ptr() - one.data_ptr()
    if one.element_size() != other.element_size() or distance % one.element_size():
        return True
    start = distance // one.element_size()
    covered = torch.zeros(max(_extent(one), start + _extent(other)), dtype=torch.bool, device="cpu")
    covered.as_strided(one.shape, one.stride()).fill_(True)
    return bool(covered.as_strided(other.shape, other.stride(), start).any())


def _extent(tensor: Tensor) -> int:
    """Count the elements from the first to the last of a tensor, with those that lie between and are not its own."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# The values of a model before its first values arrive, to restore them on failure.
# ----------------------------------------------------------------------------------------------------------------------


def keep_values(model: nn.Module) -> Callable[[], None]:
    """Keep the values of a model's parameters, and its buffers. Return a function that restores them.

    Their memory is kept alive until that function is dropped. Parameters on the meta device have no values.
    """
    values = {p: own_elements(p).detach() for p in model.parameters() if not p.is_meta}
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]

    def undo() -> None:
        for parameter, value in values.items():
            give_values(parameter, value)
        for module, own in buffers:
            module._buffers.update(own)

    return undo


def replace_meta(model: nn.Module) -> Callable[[], None]:
    """Replace parameters on the meta device by empty ones on the cpu, in place: optimizers keep the objects.

    Returns:
        A function that restores them.

    Raises:
        ConfigError: a weak reference or a graph holds one of them; nothing has changed.
    """
    values: dict[nn.Parameter, Tensor] = {}

    def undo() -> None:
        release_references(model)
        for parameter, value in values.items():
            _exchange(parameter, value)
        renew_references(model)

    release_references(model)  # before the first swap, which they would stop
    try:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                value = parameter.detach()
                try:
                    _exchange(parameter, _empty(parameter))
                except RuntimeError as error:
                    raise ConfigError(
                        f"Parameter '{name}' is on the meta device and cannot be given values: something else holds a "
                        f"weak reference to it, or a graph. Prepare the model before that is made. ({error})"
                    ) from error
                values[parameter] = value
    except ConfigError:
        undo()
        raise
    renew_references(model)
    return undo


def release_references(model: nn.Module) -> None:
    """Drop the weak references of torch's recurrent modules to their parameters: `swap_tensors` refuses those."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []


def renew_references(model: nn.Module) -> None:
    """Restore the weak references of torch's recurrent modules, after `release_references`."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights = module._flat_weights
            module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


def _empty(parameter: nn.Parameter) -> Tensor:
    if not is_divided(parameter):
        return torch.empty(0, dtype=parameter.dtype)
    held: Any = parameter  # on the meta device: divided as it, on the device of its mesh
    empty: Tensor = _another(held, torch.empty(0, dtype=held.dtype, device=held.device_mesh.device_type))
    return empty


def _exchange(parameter: nn.Parameter, value: Tensor) -> None:
    """Replace the value of a parameter by one on another device, in place."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)  # else attributes that the user has set would be swapped too
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


# ----------------------------------------------------------------------------------------------------------------------
# Whole parameters that stand in for DTensors while a model is initialised.
#
# Every rank initialises all of a parameter, from the same random numbers, and keeps its own part. Values drawn by
# DTensor itself would depend on the number of ranks and on the device; these equal those of one rank alone.
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def standing_in(model: nn.Module) -> Iterator[Mapping[nn.Parameter, nn.Parameter]]:
    """Replace each DTensor of a model by a plain parameter of the whole shape, without memory, inside the block.

    Yields:
        The stand-in of each DTensor.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and is_divided(parameter)
    ]
    for parameters, key, parameter in places:
        if parameter not in stand_ins:
            stand_ins[parameter] = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
            stand_ins[parameter].__dict__.update(parameter.__dict__)  # some initialisations read attributes there
        parameters[key] = stand_ins[parameter]
    try:
        yield stand_ins
    finally:
        for parameters, key, parameter in places:
            parameters[key] = parameter


def let_go(stand_in: nn.Parameter) -> None:
    """Free the memory of a stand-in whose values are in their storage: it reads as NaN, and refuses writes."""
    give_values(stand_in, _without_memory(stand_in))


def _without_memory(like: Tensor) -> Tensor:
    nothing = float("nan") if like.is_floating_point() else 0
    return torch.full((), nothing, dtype=like.dtype, device="cpu").expand(like.shape)
