"""The 8-bit map: what it keeps, what it refuses to lose, and the same codes on every instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.layout import ALIGNMENT_NUMEL
from penstock.rules.device import update_reference
from penstock.rules.formats import decode_blocks, encode_blocks
from penstock.rules.rule import BLOCK_NUMEL
from tests.unit.rules.segments import FORMATS, assert_same, copy_of, make, rule_and_hyper

both = pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])


def table(signed: bool) -> Tensor:
    """What each code stands for, at scale 1."""
    assert ALIGNMENT_NUMEL == BLOCK_NUMEL == 256  # parameters begin on blocks
    return decode_blocks(torch.arange(256, dtype=torch.uint8), torch.ones(1), signed=signed)


@both
def test_codes_stand_for_different_values_up_to_one(signed: bool) -> None:
    values = table(signed)
    positive = values[:128] if signed else values
    assert positive[0] == 0
    assert positive[-1] == 1
    assert (positive.diff() > 0).all()
    if signed:
        assert torch.equal(values.flip(0)[:128], -positive)


@both
def test_what_was_decoded_is_encoded_to_the_same_bits(signed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    spread = 10 ** torch.empty(20 * 256).uniform_(-12, 2, generator=generator)
    value = torch.randn(20 * 256, generator=generator) * spread
    codes, scale = encode_blocks(value if signed else value.abs(), signed=signed)
    decoded = decode_blocks(codes, scale, signed=signed)
    again, scale_again = encode_blocks(decoded, signed=signed)
    assert torch.equal(scale_again, scale)
    assert torch.equal(decode_blocks(again, scale_again, signed=signed), decoded)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 2.0**100, width=32, allow_subnormal=True), min_size=1, max_size=300))
def test_relative_error_is_bounded_and_nothing_positive_becomes_zero(values: list[float]) -> None:
    value = torch.tensor(values)
    codes, scale = encode_blocks(value, signed=False)
    decoded = decode_blocks(codes, scale, signed=False)
    largest = torch.stack([block.max() for block in value.split(256)]).repeat_interleave(256)[: len(values)]
    usable = largest >= 2.0**-96
    assert (decoded[~usable] == 0).all()
    assert ((decoded > 0) == (value > 0))[usable].all()
    assert torch.equal(decoded[value == largest][usable[value == largest]], largest[(value == largest) & usable])
    # An interval is 1/32 of an octave in the highest decade, and twice as much in each one below. A decade ends half
    # an interval above the power of two.
    for decade in range(4):
        inside = usable & (value > largest * 2.0 ** (-4 * (decade + 1)) * 1.03)
        assert ((decoded - value).abs() <= value.double() * (2.0 ** (decade - 6) * 1.01))[inside].all()


@both
def test_blocks_that_are_not_finite_are_nan_and_leave_others_alone(signed: bool) -> None:
    value = torch.ones(3 * 256)
    value[5], value[256 + 7] = torch.nan, torch.inf
    value[6] = 0
    decoded = decode_blocks(*encode_blocks(value, signed=signed), signed=signed)
    assert decoded[: 2 * 256].isnan().all()
    assert torch.equal(decoded[2 * 256 :], value[2 * 256 :])


@pytest.mark.parametrize("root_scale", [1.0, 2.0**-48], ids=["one", "least"])
@pytest.mark.parametrize("name", ["sgd-momentum", "adagrad"])
def test_borders_of_intervals_on_every_instruction_set(name: str, root_scale: float, isa: str) -> None:
    """The first update of SGD stores its gradient, that of Adagrad its square: values around every border, and 0."""
    rule, step_scalars = rule_and_hyper(name, FORMATS[4], step=1)
    signed = rule.states[0].signed
    values = table(signed)[:128] if signed else table(signed)
    logs = values.view(torch.int32).double()
    between = ((logs[1:] + logs[:-1]) / 2).to(torch.int32).view(torch.float32)
    centres = torch.cat([between, values, values[1:2] / 2**1.5])
    bits = centres.view(torch.int32)[:, None] + torch.arange(-40, 41, dtype=torch.int32)
    around = bits.clamp(min=0).flatten().view(torch.float32)
    around = (around if signed else around.sqrt()).clamp(max=1.0)
    grad = torch.nn.functional.pad(around, (1, -(around.numel() + 1) % 255)).view(-1, 255)
    grad = torch.cat([torch.ones(grad.shape[0], 1), grad], dim=1).flatten()
    grad *= root_scale**2 if signed else root_scale  # the scale of every block is the square
    zeros = torch.zeros_like(grad)
    expected = make(rule, zeros, grad * (1 if not signed else -1), (zeros,), (torch.float32, None), torch.float32)
    actual = copy_of(expected)
    update_reference(rule, expected, step_scalars, 1.0)
    rule.update(actual, step_scalars, 1.0, None)
    assert_same(actual, expected)
    assert (actual.scales[0] == root_scale**2).all()
