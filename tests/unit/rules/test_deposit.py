"""Gradients into their home: the values against torch, the norm against exact sums, the bits against each other."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.rules import Pool, deposit, squared_norm
from penstock.rules.formats import _deposit_in_torch, deposit_part, deposit_parts, squared_norms
from tests.unit.rules.segments import GRADS, Guarded, assert_same_bits, each_isa, hard_values


def expected_after(dst: Tensor, src: Tensor, add: bool) -> Tensor:
    return dst.clone().add_(src) if add else src.to(dst.dtype)


def tolerance(dtype: torch.dtype) -> float:
    """Of a norm: 4 squares of bf16 are added up in fp32, all else in fp64."""
    return 2e-7 if dtype == torch.bfloat16 else 1e-14


def all_halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("src_dtype", GRADS, ids=str)
@pytest.mark.parametrize("dst_dtype", GRADS, ids=str)
def test_every_small_size_at_any_alignment(dst_dtype: torch.dtype, src_dtype: torch.dtype, add: bool, isa: str) -> None:
    for numel in range(71):
        storage = Guarded(torch.randn(numel).to(dst_dtype), numel % 5)
        src = Guarded(torch.randn(numel).to(src_dtype), numel % 3).tensor
        expected = expected_after(storage.tensor, src, add)
        norm = deposit(storage.tensor, src, add=add, pool=None)
        assert_same_bits(storage.tensor, expected)
        storage.check()
        assert norm == pytest.approx(math.fsum(x * x for x in expected.tolist()), rel=tolerance(dst_dtype))
        assert norm == squared_norm(expected, pool=None)


@pytest.mark.parametrize("offset", [0, 1], ids=["on a line", "beside it"])
@pytest.mark.parametrize("src_dtype", GRADS, ids=str)
@pytest.mark.parametrize("dst_dtype", GRADS, ids=str)
def test_what_is_written_past_the_cache_is_what_small_pieces_get(
    dst_dtype: torch.dtype, src_dtype: torch.dtype, offset: int, isa: str
) -> None:
    numel = (1 << 19) + 16384 + 37  # more than a MiB, with a block of the norm that is not whole
    src = torch.randn(numel).to(src_dtype)
    src[-70_000 : -70_000 + (1 << 16)] = all_halves(torch.bfloat16).to(src_dtype)
    storages = [torch.full((numel + 128,), 7.0, dtype=dst_dtype) for _ in range(2)]
    start = -storages[0].data_ptr() // dst_dtype.itemsize % 32 + offset
    whole, pieces = (storage[start : start + numel] for storage in storages)
    norm = deposit(whole, src, add=False, pool=None)
    norms = [
        deposit(to, one, add=False, pool=None) for to, one in zip(pieces.split(16384), src.split(16384), strict=True)
    ]
    assert_same_bits(storages[0], torch.cat([storages[0][:start], pieces, storages[0][start + numel :]]))
    assert (storages[0][:start] == 7).all()
    assert (storages[0][start + numel :] == 7).all()
    assert math.isnan(norm)
    assert math.isnan(sum(norms))
    finite = torch.where(src.isfinite(), src, 0)
    assert deposit(whole, finite, add=False, pool=None) == squared_norm(finite.to(dst_dtype), pool=None)


@pytest.mark.parametrize("dst_dtype", GRADS, ids=str)
def test_hard_values_are_rounded_as_torch_rounds_them(dst_dtype: torch.dtype, isa: str) -> None:
    for src in (hard_values(), all_halves(torch.bfloat16), all_halves(torch.float16)):
        dst = torch.empty(src.numel(), dtype=dst_dtype)
        deposit(dst, src, add=False, pool=None)
        assert_same_bits(dst, src.to(dst_dtype))
        shuffled = src[torch.randperm(src.numel(), generator=torch.Generator().manual_seed(2))]
        expected = expected_after(dst, shuffled, add=True)
        deposit(dst, shuffled, add=True, pool=None)
        assert_same_bits(dst, expected)


@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_the_norm_has_the_same_bits_on_every_processor_and_thread_count(dtype: torch.dtype) -> None:
    src = (torch.randn(100_003) * 10 ** torch.empty(100_003).uniform_(-4, 2)).to(dtype)
    norms = set()
    for threads in (1, 2, 3):
        pool = Pool(threads)
        for _ in each_isa():
            norms.add(squared_norm(src, pool=pool))
            norms |= {deposit(torch.zeros_like(src), src, add=add, pool=pool) for add in (False, True)}
        pool.close()
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(math.fsum(x * x for x in src.tolist()), rel=tolerance(dtype))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((torch.float32, value) for value in (torch.finfo(torch.float32).max, 1e-45)),
        *((torch.bfloat16, value) for value in (2.0**-130, 2.0**-60, 2.0**63, 3e38)),
    ],
)
def test_the_norm_of_values_whose_squares_fp32_cannot_hold(dtype: torch.dtype, value: float, isa: str) -> None:
    src = torch.full((20_000,), value, dtype=dtype)
    src[::3] = 0
    expected = math.fsum(x * x for x in src.tolist())
    assert squared_norm(src, pool=None) == pytest.approx(expected, rel=1e-6)
    assert deposit(torch.zeros_like(src), src, add=True, pool=None) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_one_bad_element_anywhere_makes_the_norm_not_finite(dtype: torch.dtype, bad: float, isa: str) -> None:
    for at in (0, 31, 32, 16_383, 16_384, 20_000, 20_010):
        src = torch.ones(20_011, dtype=dtype)
        src[at] = bad
        assert not math.isfinite(float(squared_norm(src, pool=None)))
        assert not math.isfinite(float(deposit(torch.zeros_like(src), src, add=True, pool=None)))


def test_sums_that_overflow_and_sums_of_nothing(isa: str) -> None:
    dst = torch.full((10,), 60_000.0, dtype=torch.float16)
    assert deposit(dst, dst.clone(), add=True, pool=None) == math.inf
    assert squared_norm(torch.empty(0), pool=None) == 0.0
    assert deposit(torch.empty(0), torch.empty(0, dtype=torch.bfloat16), add=False, pool=None) == 0.0


PARTS = [(0, 300), (512, 513), (600, 1000)]  # with gaps, which are zero


def gradients(dtype: torch.dtype) -> Tensor:
    values = torch.zeros(1024, dtype=dtype)
    for start, stop in PARTS:
        values[start:stop] = torch.randn(stop - start).to(dtype)
    return values


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_the_back_end_in_torch_agrees(dtype: torch.dtype, add: bool) -> None:
    ours, src = gradients(torch.float32), gradients(dtype)
    theirs = ours.clone()
    norms = _deposit_in_torch(ours, src, PARTS, add=add)
    expected = deposit_parts(theirs, src, PARTS, add=add, pool=None)
    assert_same_bits(ours, theirs)
    assert [(norm.shape, norm.dtype) for norm in norms] == [((), torch.float64)] * len(PARTS)
    assert [norm.item() for norm in norms] == pytest.approx(expected, rel=1e-6)
    assert squared_norms(ours, PARTS, pool=None) == expected


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("dst_dtype", GRADS, ids=str)
def test_a_part_is_written_as_a_view_of_it_would_be(dst_dtype: torch.dtype, add: bool) -> None:
    storage, src = torch.randn(40).to(dst_dtype), torch.randn(3, 5).to(torch.bfloat16)
    expected = storage.clone()
    norm = deposit(expected[7:22], src.view(-1), add=add, pool=None)
    assert deposit_part(storage, 7, 22, src, add=add, pool=None) == norm
    assert_same_bits(storage, expected)


def into(dst: Tensor, src: Tensor) -> Callable[[], object]:
    return lambda: deposit(dst, src, add=False, pool=None)


def part(start: int, stop: int, src: Tensor) -> Callable[[], object]:
    return lambda: deposit_part(torch.zeros(40), start, stop, src, add=False, pool=None)


def whole(src: Tensor) -> Callable[[], object]:
    return lambda: deposit_parts(torch.zeros(40), src, [(0, 39)], add=False, pool=None)


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        (into(torch.zeros(3), torch.zeros(4)), ValueError, "dst has 3 elements on cpu, src 4 on cpu"),
        (into(torch.zeros(3), torch.zeros(6)[::2]), ValueError, "src must be contiguous"),
        (into(torch.zeros(3, dtype=torch.int32), torch.zeros(3)), TypeError, r"dst is torch\.int32"),
        (lambda: squared_norm(torch.zeros(3, dtype=torch.float64), pool=None), TypeError, r"src is torch\.float64"),
        (part(7, 22, torch.ones(16)), ValueError, "dst has 15 elements on cpu, src 16 on cpu: they must be alike"),
        (part(7, 22, torch.ones(5, 3).t()), ValueError, "src must be contiguous"),
        (part(30, 45, torch.ones(15)), ValueError, "elements 30 to 45 are not all in dst, which has 40"),
        (whole(torch.ones(39)), ValueError, "dst has 40 elements on cpu, src 39 on cpu: they must be alike"),
    ],
)
def test_tensors_that_do_not_match_are_refused(work: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        work()


def test_a_tensor_of_rows_is_written_on_a_device() -> None:
    storage, src = torch.zeros(3, 5, device="meta"), torch.ones(3, 5, device="meta")
    assert isinstance(deposit(storage, src, add=True, pool=None), Tensor)
