"""Parameters that are not one object and share memory: each would get a place of its own, and they would part."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from penstock.engine.units.dtensors import is_divided, own_elements
from penstock.errors import ConfigError


def check_aliases(model: nn.Module) -> None:
    """Refuse a trained parameter that shares elements with another parameter or with a buffer.

    What lies in one storage without sharing elements may: parameters packed into a flat tensor do. So may what is
    frozen: nobody writes it.

    Raises:
        ConfigError: names both.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(model):
        if is_divided(tensor):
            tensor = own_elements(tensor).detach().requires_grad_(tensor.requires_grad)
        plain = type(tensor) in (Tensor, nn.Parameter)  # wrappers have no memory of their own
        if plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for held in by_storage.values():
        if len(held) > 1 and any(tensor.requires_grad for _, tensor in held):
            _check_apart(held)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_apart(held: list[tuple[str, Tensor]]) -> None:
    """Refuse a tensor of a storage that shares an element with a trained one there."""
    held.sort(key=lambda item: item[1].data_ptr())
    if all(one.data_ptr() + _extent_bytes(one) <= other.data_ptr() for (_, one), (_, other) in pairwise(held)):
        return
    for index, (other_name, other) in enumerate(held):
        for name, one in held[:index]:
            if (one.requires_grad or other.requires_grad) and _overlap(one, other):
                raise ConfigError(
                    f"'{name}' {tuple(one.shape)} and '{other_name}' {tuple(other.shape)} are two objects over the "
                    "same memory. They would be trained apart. If they are to be tied, use one Parameter for both "
                    "(other.weight = one.weight); else give one of them memory of its own (.clone())."
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage, the first of which begins first, share an element."""
    distance = other.data_ptr() - one.data_ptr()
    if distance >= _extent_bytes(one):
        return False
    if one.element_size() != other.element_size() or distance % one.element_size():
        return True
    start = distance // one.element_size()
    covered = torch.zeros(max(_extent(one), start + _extent(other)), dtype=torch.bool, device="cpu")
    covered.as_strided(one.shape, one.stride()).fill_(True)
    return bool(covered.as_strided(other.shape, other.stride(), start).any())


def _extent(tensor: Tensor) -> int:
    """Count the elements from the first to the last of a tensor, with those that lie between and are not its own."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _extent_bytes(tensor: Tensor) -> int:
    return _extent(tensor) * tensor.element_size()
