"""The native update is the reference, bit for bit: rules, storages, instruction sets, threads, sizes, alignments."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from penstock.rules import Pool, StateFormat, UpdateSlice, join_master
from penstock.rules.device import DeviceUpdate, one_pass, update_reference
from penstock.rules.rule import RecordChecksums
from penstock.runtime.aio import checksum
from tests.lib.covering import covering
from tests.unit.rules.segments import (
    FORMATS,
    GRADS,
    INPUTS,
    RULES,
    STORAGES,
    Guarded,
    assert_same,
    assert_same_bits,
    copy_of,
    each_isa,
    make,
    mixed,
    parts,
    random_inputs,
    rule_and_hyper,
    tensors_of,
)

formats = pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f"{f.dtype}-{f.rounding}")
some_formats = pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[3], FORMATS[4]], ids=lambda f: f.dtype)
#: For each rule and format: every storage with every dtype of gradients, and both with all inputs.
ROWS = covering({"storage": STORAGES, "grad_dtype": GRADS, "inputs": list(INPUTS)})


def summed(update: Callable[[RecordChecksums], None], update_slice: UpdateSlice) -> None:
    """Hold what an update sums in passing against the checksums of the bytes, before and after."""
    before, sums = [checksum(tensor) for tensor in tensors_of(update_slice)], RecordChecksums(tensors_of(update_slice))
    update(sums)
    found = [sums.of(tensor) for tensor in tensors_of(update_slice)]
    assert found == [(b, checksum(tensor)) for b, tensor in zip(before, tensors_of(update_slice), strict=True)]


@formats
@pytest.mark.parametrize("name", RULES)
def test_every_back_end_gives_the_bits_of_the_reference(name: str, format_: StateFormat) -> None:
    """Two steps: one without sums, then one that sums what it passes; and the function that devices run."""
    rule, _ = rule_and_hyper(name, format_)
    scalars = [rule_and_hyper(name, format_, step)[1] for step in (1, 3)]
    for row in ROWS:
        given = make(rule, *INPUTS[row["inputs"]](), row["storage"], row["grad_dtype"])
        first = copy_of(given)
        update_reference(rule, first, scalars[0], 0.7)
        second = copy_of(first)
        update_reference(rule, second, scalars[1], 0.7)
        for isa in each_isa():
            actual = copy_of(given)
            rule.update(actual, scalars[0], 0.7, None)
            assert_same(actual, first, isa, row)
            summed(lambda sums, of=actual: rule.update_many([(of, scalars[1])], 0.7, None, sums), actual)
            assert_same(actual, second, isa, row)
        on_device = copy_of(given)
        DeviceUpdate(one_pass)(rule, [(on_device, scalars[0])], 0.7)
        assert_same(on_device, first, "one pass", row)


SIZES = [*range(71), 255, 256, 257, 511, 1023, 1024, 1025, 1300]


@some_formats
@pytest.mark.parametrize("storage", [STORAGES[1], STORAGES[2]], ids=str)
def test_every_small_size_at_any_alignment(storage: tuple[Any, Any], format_: StateFormat) -> None:
    for name, numel in product(("adamw", "sgd-nesterov"), SIZES):
        rule, step_scalars = rule_and_hyper(name, format_)
        given = make(rule, *random_inputs(numel), storage, torch.bfloat16)
        expected = copy_of(given)
        update_reference(rule, expected, step_scalars, 0.7)
        for isa in each_isa():
            guards = [Guarded(tensor, numel % 5 + i) for i, (_, tensor) in enumerate(parts(given))]
            tensors = iter(guard.tensor for guard in guards)
            actual = replace(
                given,
                param=next(tensors),
                master=None if given.master is None else next(tensors),
                states=tuple(next(tensors) for _ in given.states),
                scales=tuple(None if scale is None else next(tensors) for scale in given.scales),
            )
            rule.update(actual, step_scalars, 0.7, None)
            assert_same(actual, expected, isa, name, numel)
            for guard in guards:
                guard.check()


@some_formats
@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_any_cut_on_blocks_and_any_number_of_threads(name: str, format_: StateFormat) -> None:
    """Sums of the pieces are joined."""
    rule, step_scalars = rule_and_hyper(name, format_)
    pools = {threads: Pool(threads) for threads in (1, 3)}
    for numel, pieces in {100_001: (1 << 17, 256 * 77), 32767: (1 << 15,), 32769: (1 << 16,), 1: (256,)}.items():
        whole = make(rule, *random_inputs(numel), STORAGES[2], torch.bfloat16)
        expected = copy_of(whole)
        update_reference(rule, expected, step_scalars, 0.7)
        for isa in each_isa():
            for (threads, pool), cut in product(pools.items(), pieces):
                actual = copy_of(whole)
                for piece in actual.pieces(cut):
                    summed(lambda sums, of=piece, p=pool: rule.update_many([(of, step_scalars)], 0.7, p, sums), piece)
                assert_same(actual, expected, isa, threads, cut)
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("name", RULES)
def test_the_form_of_the_master_never_changes_the_result(name: str) -> None:
    """Value and states bit for bit; the bf16 parameter is the nearest, and on ties alone not the even one."""
    rule, _ = rule_and_hyper(name)
    finite = [mixed(seed, hard=False) for seed in range(1, 6)]
    given = [make(rule, finite[0], finite[4], tuple(finite[1:4]), STORAGES[k], torch.bfloat16) for k in (0, 2, 3, 4)]
    for _ in each_isa():
        fp32, split, *copied = map(copy_of, given)
        for step in range(1, 31):
            step_scalars = rule_and_hyper(name, step=step)[1]
            grad = mixed(10 + step, hard=False).bfloat16()
            for update_slice in (fp32, split, *copied):
                rule.update(replace(update_slice, grad=grad), step_scalars, 0.7, None)
        for other, value in (
            (split, join_master(split.param, split.master)),
            *((each, each.master) for each in copied),
        ):
            assert_same_bits(value, fp32.param)
            for found, wanted in zip(other.states, fp32.states, strict=True):
                assert_same_bits(found, wanted)
        tie = (fp32.param.view(torch.int32) & 0xFFFF) == 0x8000
        assert_same_bits(split.param[~tie], fp32.param.bfloat16()[~tie])


def test_an_update_that_flushes_no_denormal(isa: str) -> None:
    for name in RULES:
        rule, step_scalars = rule_and_hyper(name)
        given = UpdateSlice(torch.full((50,), 1e-40), torch.zeros(50), None, (torch.full((50,), 1e-40),) * 3)
        given = replace(given, states=given.states[: len(rule.states)], scales=given.scales[: len(rule.states)])
        actual, expected = copy_of(given), copy_of(given)
        update_reference(rule, expected, step_scalars, 1.0)
        torch.set_flush_denormal(True)
        try:
            rule.update(actual, step_scalars, 1.0, None)
        finally:
            torch.set_flush_denormal(False)
        assert_same(actual, expected, name)


def test_dtypes_without_a_kernel_are_refused() -> None:
    n = 4
    rule, step_scalars = rule_and_hyper("adamw")
    moments = (torch.zeros(n), torch.zeros(n))
    for param, grad, master, states, message in (
        (torch.zeros(n, dtype=torch.float64), torch.zeros(n), None, moments, "param is torch.float64"),
        (torch.zeros(n), torch.zeros(n, dtype=torch.int32), None, moments, "grad is torch.int32"),
        (torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.int64), moments, "master is torch.int64"),
        (torch.zeros(n), torch.zeros(n), None, (moments[0].bfloat16(), moments[1]), "exp_avg is torch.bfloat16"),
    ):
        with pytest.raises(TypeError, match=message):
            rule.update(UpdateSlice(param, grad, master, states), step_scalars, 1.0, None)
    half_alone = UpdateSlice(torch.zeros(n, dtype=torch.float16), torch.zeros(n), None, moments)
    with pytest.raises(ValueError, match="no kernel for this dtype of the parameter"):
        rule.update(half_alone, step_scalars, 1.0, None)


def test_a_segment_begins_on_a_block() -> None:
    with pytest.raises(ValueError, match="begins on a block of 256 elements, not at element 64"):
        UpdateSlice(torch.zeros(4), torch.zeros(4), None, (), first=64)


def test_states_that_a_group_does_not_use_are_as_they_were() -> None:
    """And summed, as all that an update could write."""
    rule, _ = rule_and_hyper("amsgrad")
    _, step_scalars = rule_and_hyper("adamw")
    assert rule.used(step_scalars) < len(rule.states)
    given = make(rule, *random_inputs(1000), STORAGES[2], GRADS[1])
    plain, unused = copy_of(given), given.states[2].clone()
    rule.update(plain, step_scalars, 0.7, None)
    summed(lambda sums: rule.update_many([(given, step_scalars)], 0.7, None, sums), given)
    assert_same(given, plain)
    assert_same_bits(given.states[2], unused)
