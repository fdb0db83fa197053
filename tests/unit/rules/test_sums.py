"""What an update sums in passing: all of it in native code, and of rules with kernels alone."""

import pytest
import torch

from penstock import _native
from penstock.rules import rule_for
from penstock.rules.rule import RecordChecksums
from tests.unit.rules.segments import (
    FORMATS,
    GRADS,
    RULES,
    STORAGES,
    make,
    random_inputs,
    rule_and_hyper,
    tensors_of,
)


def test_native_code_sums_all_that_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else everything would be right, and summed from memory by `RecordChecksums.of`."""
    rule, step_scalars = rule_and_hyper("adamw", FORMATS[4])
    update_slice = make(rule, *random_inputs(1000), STORAGES[2], GRADS[1])
    sums = RecordChecksums(tensors_of(update_slice))
    rule.update_many([(update_slice, step_scalars)], 0.7, None, sums)
    lengths: list[int] = []
    crc32c = _native.crc32c
    monkeypatch.setattr(_native, "crc32c", lambda at, nbytes: lengths.append(nbytes) or crc32c(at, nbytes))
    for tensor in tensors_of(update_slice):
        sums.of(tensor)
    assert set(lengths) == {0}


def test_rules_with_kernels_sum_and_others_do_not() -> None:
    for name in RULES:
        assert rule_and_hyper(name)[0].sums
    for optimizer in (torch.optim.RMSprop, torch.optim.Adafactor):
        assert not rule_for(optimizer([torch.nn.Parameter(torch.zeros(4, 4))])).sums
