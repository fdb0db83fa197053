"""Wire formats: the bits of the native pass and the reference, round trips, and blocks that have no codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.rules import Pool
from penstock.rules.device import compile_pass
from penstock.rules.wire import WireFormat, WireName, pack_words, unpack_words
from tests.lib.fuzz import examples
from tests.unit.rules.segments import GRADS, Guarded, assert_same_bits, hard_values

NAMES: list[WireName] = ["int8", "fp8", "int4"]
TOP = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
BYTES = {"int8": 260, "fp8": 260, "int4": 132}
LEAST = 2.0**-96
names = pytest.mark.parametrize("name", NAMES)
dtypes = pytest.mark.parametrize("dtype", GRADS, ids=str)


def packed_by_reference(name: WireName, values: Tensor) -> Tensor:
    packed = torch.empty(WireFormat(name).packed_bytes(values.numel()), dtype=torch.uint8)
    pack_words(name, values, packed.view(torch.int32).view(-1, BYTES[name] // 4))
    return packed


def unpacked_by_reference(name: WireName, packed: Tensor, into: Tensor, add: bool = False) -> Tensor:
    unpack_words(name, into, packed.view(torch.int32).view(-1, BYTES[name] // 4), add)
    return into


def hard_blocks(dtype: torch.dtype) -> Tensor:
    """Blocks of neighbouring hard values: of any size, with ties, denormals and whatever is not finite among them."""
    hard = hard_values().to(dtype)
    spread = hard.view(-1, 256)[:, torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    finite = hard[hard.isfinite()]
    return torch.cat([spread.reshape(-1), finite[: finite.numel() // 256 * 256]])


@names
@dtypes
def test_the_native_pass_packs_the_bits_of_the_reference(name: WireName, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    values = torch.cat([hard_blocks(dtype), (torch.randn(67 * 256) * 0.02).to(dtype)])
    expected = packed_by_reference(name, values)
    found = Guarded(torch.zeros_like(expected), 3)
    WireFormat(name).pack(Guarded(values, 1).tensor, found.tensor)
    found.check()
    assert found.tensor.tolist() == expected.tolist()


@names
@dtypes
def test_the_native_pass_unpacks_the_bits_of_the_reference(
    name: WireName,
    dtype: torch.dtype,
    isa: str,
) -> None:
    every = torch.arange(BYTES[name] - 4, dtype=torch.int32).to(torch.uint8)  # every code, and every pair of int4
    scales = torch.cat([hard_values()[::97], torch.tensor([1.0, 0.1, -0.0, 3e38])]).view(torch.uint8).view(-1, 4)
    if name == "fp8":  # as large as blocks have them
        values = scales.contiguous().view(torch.float32).flatten()
        scales = scales[~(values.isfinite() & (values.abs() > 2.0**119))]
    parts = [every, every + 128] if name == "int4" else [every]
    packed = torch.cat([torch.cat([scales, part.expand(len(scales), -1)], dim=1) for part in parts]).flatten()
    if name == "fp8":  # what no value is packed into
        packed.view(-1, 260)[:, [4 + 0x7F, 4 + 0xFF]] = 0
    numel = packed.numel() // BYTES[name] * 256
    expected = unpacked_by_reference(name, packed, torch.empty(numel, dtype=dtype))
    found = Guarded(torch.zeros(numel, dtype=dtype), 5)
    WireFormat(name).unpack(Guarded(packed, 1).tensor, found.tensor)
    found.check()
    assert_same_bits(found.tensor, expected)


@names
def test_what_is_added_is_rounded_as_torch_rounds_it(name: WireName, isa: str) -> None:
    torch.manual_seed(0)
    packed = packed_by_reference(name, hard_blocks(torch.float32))
    before = torch.randn(packed.numel() // BYTES[name] * 256) * 10
    found = before.clone()
    WireFormat(name).unpack(packed, found, add=True)
    one = unpacked_by_reference(name, packed, torch.empty_like(before))
    assert_same_bits(found, before + one)
    assert_same_bits(unpacked_by_reference(name, packed, before.clone(), add=True), found)


def test_fp8_rounds_every_tie_and_its_neighbours_as_torch_does(isa: str) -> None:
    """With a largest value of 448 the codes are those of the values themselves."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2
    near = torch.cat([codes, *(ties.nextafter(ties + step) for step in (-1, 0, 1)), torch.tensor([1e-30, 1e-44])])
    near = torch.cat([near, -near, codes.nextafter(codes - 1)[1:]])
    near = nn.functional.pad(near, (0, -near.numel() % 255)).view(-1, 255)
    values = torch.cat([near, torch.full((len(near), 1), 448.0)], dim=1)
    packed = torch.empty(WireFormat("fp8").packed_bytes(values.numel()), dtype=torch.uint8)
    WireFormat("fp8").pack(values.flatten(), packed)
    assert packed.view(-1, 260)[:, 4:].tolist() == values.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_bf16_of_fp8_is_rounded_alike_at_every_scale(isa: str) -> None:
    """Also where the least values of a block are hardly normal numbers, and where the largest ones overflow bf16."""
    mantissas = torch.linspace(1, 2, 65)[:-1]
    powers = [-126.0, -125.0, -101.0, -100.0, -99.0, -3.0, 0.0, 117.0, 118.0, 119.0]
    edges = torch.tensor([2.0**-100, 2.0**119])
    scales = torch.cat([(mantissas[:, None] * 2.0 ** torch.tensor(powers)[None]).flatten(), edges])
    scales = torch.cat([scales, edges.nextafter(edges * 2), edges.nextafter(edges * 0)])
    scales = scales[scales <= 2.0**119]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # what no value is packed into
    packed = torch.cat([scales.view(torch.uint8).view(-1, 4), codes.expand(len(scales), -1)], dim=1).flatten()
    found = torch.zeros(256 * len(scales), dtype=torch.bfloat16)
    WireFormat("fp8").unpack(packed, found)
    assert_same_bits(found, unpacked_by_reference("fp8", packed, torch.zeros_like(found)))
    exact = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    assert_same_bits(found, exact.bfloat16().flatten())


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """Blocks of values of one size or of many, zeros among them."""
    count = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count * 256, generator=generator).view(count, 256)
    values *= 2.0 ** torch.tensor(draw(st.lists(st.integers(-90, 120), min_size=count, max_size=count)))[:, None]
    if draw(st.booleans()):  # of many sizes in one block
        values *= 2.0 ** -torch.randint(0, 40, values.shape, generator=generator)
    return (values * (torch.rand(values.shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0])))).flatten()


@names
@examples(40)
@given(values=blocks(), dtype=st.sampled_from(GRADS))
def test_a_round_trip_is_off_by_half_a_scale_at_most(name: WireName, values: Tensor, dtype: torch.dtype) -> None:
    form, given_values = WireFormat(name), values.to(dtype)
    values = given_values.float()
    if not values.isfinite().all():  # too large for fp16
        return
    packed, found = torch.empty(form.packed_bytes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    form.pack(given_values, packed)
    form.unpack(packed, found)
    largest = values.view(-1, 256).abs().amax(1)
    scale = torch.where(largest >= LEAST, largest / TOP[name], 0)
    error = (found - values).view(-1, 256).abs().double()
    if name == "fp8":  # 3 bits of mantissa, and 2^-9 below 2^-6
        most = torch.maximum(values.view(-1, 256).abs() / 16, scale[:, None] * 2**-10)
    else:
        most = (scale / 2)[:, None]
    slack = (largest * 1e-6)[:, None].double()
    assert (error <= most + slack + torch.where(largest < LEAST, largest, 0)[:, None]).all()
    assert found.view(-1, 256)[largest == 0].eq(0).all()
    if form.name != "fp8":  # codes are kept by another round trip
        again = torch.empty_like(packed)
        form.pack(found, again)
        codes = [p.view(-1, BYTES[name])[largest >= LEAST, 4:] for p in (packed, again)]
        assert torch.equal(*codes)


@names
@dtypes
def test_blocks_without_codes(name: WireName, dtype: torch.dtype, isa: str) -> None:
    form = WireFormat(name)
    values = torch.zeros(6, 256)
    values[1, 7] = torch.nan
    values[2] = 1.0
    values[2, 255] = torch.inf
    values[3, 0] = -torch.inf
    values[4, :] = 2.0
    values[5, 3] = 1e-40
    packed = torch.empty(form.packed_bytes(6 * 256), dtype=torch.uint8)
    form.pack(values.to(dtype).flatten(), packed)
    found = torch.empty(6 * 256, dtype=dtype)
    form.unpack(packed, found)
    found = found.view(6, 256)
    assert found[1:4].isnan().all(), "never hidden"
    assert found[[0, 5]].eq(0).all()
    assert found[4].eq(2).all()
    assert packed.view(6, -1)[[0, 5]].eq(0).all()


@names
@dtypes
def test_the_largest_finite_values_stay_finite(name: WireName, dtype: torch.dtype) -> None:
    form, largest = WireFormat(name), torch.finfo(dtype).max
    values = torch.full((256,), largest, dtype=dtype)
    values[1] = -largest
    packed, found = torch.empty(form.packed_bytes(256), dtype=torch.uint8), torch.empty_like(values)
    form.pack(values, packed)
    form.unpack(packed, found)
    assert found.isfinite().all()
    assert torch.allclose(found.double(), values.double(), rtol=1e-6)


@names
def test_any_whole_blocks_are_a_range_of_bytes_and_threads_change_nothing(name: WireName) -> None:
    torch.manual_seed(0)
    form, values = WireFormat(name), torch.randn(1001 * 256).bfloat16()
    whole = torch.empty(form.packed_bytes(values.numel()), dtype=torch.uint8)
    form.pack(values, whole)
    pool = Pool(3)
    parts = torch.zeros_like(whole)
    for start, stop in ((0, 1), (1, 8), (8, 1001)):
        at, end = form.packed_bytes(start * 256), form.packed_bytes(stop * 256)
        form.pack(values[start * 256 : stop * 256], parts[at:end], pool)
    assert torch.equal(parts, whole)
    one, other = torch.empty_like(values), torch.empty_like(values)
    form.unpack(whole, one)
    form.unpack(whole, other, pool)
    assert torch.equal(one, other)
    pool.close()


def test_bytes_of_the_formats_and_what_does_not_fit() -> None:
    assert [WireFormat(name).packed_bytes(512) for name in NAMES] == [520, 520, 264]
    assert WireFormat("int8").packed_bytes(0) == 0
    with pytest.raises(ValueError, match="no whole blocks"):
        WireFormat("int8").packed_bytes(255)
    form, values, packed = WireFormat("int8"), torch.zeros(256), torch.zeros(260, dtype=torch.uint8)
    with pytest.raises(ValueError, match="259 bytes"):
        form.pack(values, packed[:259])
    with pytest.raises(ValueError, match="contiguous"):
        form.pack(torch.zeros(256, 2)[:, 0], packed)
    with pytest.raises(TypeError, match="float64"):
        form.pack(values.double(), packed)
    with pytest.raises(TypeError, match="uint8"):
        form.unpack(packed.view(torch.int8), values)
    with pytest.raises(TypeError, match="added to float32"):
        form.unpack(packed, values.bfloat16(), add=True)
    form.pack(values[:0], packed[:0])


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_the_compiler_takes_the_passes_whole(name: WireName) -> None:
    torch.manual_seed(0)
    values = torch.randn(3 * 256).bfloat16()
    expected = packed_by_reference(name, values)
    packed = torch.zeros_like(expected).view(torch.int32).view(3, -1)
    compile_pass(pack_words, "eager")(name, values, packed)
    assert torch.equal(packed.view(-1).view(torch.uint8), expected)
    found = torch.ones(3 * 256)
    compile_pass(unpack_words, "eager")(name, found, packed, True)
    assert torch.equal(found, unpacked_by_reference(name, expected, torch.ones(3 * 256), add=True))
