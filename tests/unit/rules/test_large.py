"""More than 2^31 and 2^32 elements: nothing counts in 32 bits.

Memory that large is mapped, not had: what is only read is the page of zeros, and what is written is one short piece of
memory seen again and again. The elements past the border have memory of their own, and they are what is compared.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock.rules import Pool, UpdateSlice, deposit, squared_norm
from penstock.rules.device import update_reference
from penstock.rules.formats import random_words, step_key
from penstock.rules.rule import BLOCK_NUMEL
from tests.unit.rules.segments import (
    FORMATS,
    STORAGES,
    assert_same,
    assert_same_bits,
    copy_of,
    each_isa,
    make,
    parts,
    random_inputs,
    rule_and_hyper,
)

BORDER, BEYOND = 1 << 31, 300_000
PIECE_BYTES = 1 << 21
_FIXED, _NORESERVE, _POPULATE = 0x10, 0x4000, 0x8000  # of Linux; mmap does not name them in Python 3.11

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, nbytes: int, flags: int, file: int = -1) -> int:
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


class Mappings:
    """Makes tensors of more elements than there is memory for."""

    def __init__(self) -> None:
        self._made: list[tuple[int, int]] = []

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros to read; what is written gets memory, page by page."""
        nbytes = numel * dtype.itemsize
        address = _map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # fewer pages to map; slower where it is refused
        self._made.append((address, nbytes))
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)

    def ring(self, values: Tensor) -> Tensor:
        """`BORDER` elements that share a short piece of memory, and `values` after them."""
        tensor = self.zeros(BORDER + values.numel(), values.dtype)
        file = os.memfd_create("ring")
        os.ftruncate(file, PIECE_BYTES)
        head_bytes = BORDER * values.element_size()
        for at in range(tensor.data_ptr(), tensor.data_ptr() + head_bytes, PIECE_BYTES):
            _map(at, PIECE_BYTES, mmap.MAP_SHARED | _FIXED | _POPULATE, file)
        os.close(file)
        tensor[BORDER:] = values
        return tensor

    def close(self) -> None:
        for address, nbytes in self._made:
            assert _libc.munmap(address, nbytes) == 0


@pytest.fixture
def mappings() -> Iterator[Mappings]:
    made = Mappings()
    yield made
    made.close()


def test_a_norm_of_more_than_two_to_the_32(mappings: Mappings) -> None:
    src = mappings.zeros((1 << 32) + 1000, torch.bfloat16)
    for index, value in ((7, 1.0), (BORDER - 1, 2.0), (BORDER, 4.0), ((1 << 32) - 1, 8.0), ((1 << 32) + 999, 16.0)):
        src[index] = value
    pool = Pool(2)
    assert squared_norm(src, pool=pool) == 1 + 4 + 16 + 64 + 256
    pool.close()


def test_a_gradient_of_more_than_two_to_the_31_is_deposited(mappings: Mappings) -> None:
    values = torch.randn(BEYOND, generator=torch.Generator().manual_seed(1)).bfloat16()
    dst, src = mappings.ring(torch.zeros_like(values)), mappings.zeros(BORDER + BEYOND, torch.bfloat16)
    src[BORDER:] = values
    assert deposit(dst, src, add=False, pool=None) == pytest.approx(float(values.double().square().sum()))
    assert_same_bits(dst[BORDER:], values)


def test_an_update_of_more_than_two_to_the_31(mappings: Mappings) -> None:
    """With scales beside the states: indices of elements and of blocks."""
    rule, step_scalars = rule_and_hyper("lion", FORMATS[4])
    beyond = make(rule, *random_inputs(BEYOND), STORAGES[2], torch.bfloat16)
    grad = mappings.zeros(BORDER + BEYOND, torch.bfloat16)
    grad[BORDER:] = beyond.grad
    whole = UpdateSlice(
        mappings.ring(beyond.param),
        grad,
        None if beyond.master is None else mappings.ring(beyond.master),
        tuple(map(mappings.ring, beyond.states)),
        tuple(
            None if scale is None else torch.cat([torch.ones(BORDER // BLOCK_NUMEL), scale]) for scale in beyond.scales
        ),
    )
    expected = replace(copy_of(beyond), first=BORDER)
    rule.update(expected, step_scalars, 0.7, None)
    assert not torch.equal(expected.param, beyond.param)
    rule.update(whole, step_scalars, 0.7, None)
    for (name, found), (_, wanted) in zip(parts(whole), parts(expected), strict=True):
        assert_same_bits(found[-wanted.numel() :], wanted), name


FIRSTS = [BORDER, 1 << 32, (1 << 32) * BLOCK_NUMEL, (1 << 45) + 3 * BLOCK_NUMEL]


@pytest.mark.parametrize(("format_", "storage"), [(1, 1), (3, 1), (3, 2)])
def test_random_bits_of_large_numbers(format_: int, storage: int) -> None:
    rule, step_scalars = rule_and_hyper("amsgrad", FORMATS[format_])
    start = make(rule, *random_inputs(1111), STORAGES[storage], torch.bfloat16)
    rounded = "state 0" if FORMATS[format_].dtype == "bf16" else "param"
    for first in FIRSTS:
        expected = replace(copy_of(start), first=first)
        update_reference(rule, expected, step_scalars, 0.7)
        for isa in each_isa():
            actual, elsewhere = replace(copy_of(start), first=first), replace(copy_of(start), first=0)
            rule.update(actual, step_scalars, 0.7, None)
            rule.update(elsewhere, step_scalars, 0.7, None)
            assert_same(actual, expected, isa, first)
            assert not torch.equal(dict(parts(actual))[rounded], dict(parts(elsewhere))[rounded])


def test_random_words_are_numbered_in_64_bits() -> None:
    key, device = step_key(7, 3), torch.device("cpu")
    words = [random_words(key, first, 1000, 1, device) for first in (0, *FIRSTS)]
    assert all(not torch.equal(a, b) for a, b in pairwise(words))
    signed = torch.tensor(key - (1 << 64) if key >> 63 else key)
    for first, expected in zip((0, *FIRSTS), words, strict=True):
        assert torch.equal(random_words(signed, torch.tensor(first), 1000, 1, device), expected)
