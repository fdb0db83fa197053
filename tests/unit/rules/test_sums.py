"""What an update sums in passing: all of it in native code, of runs with gaps, and only where somebody asks."""

import pytest
import torch

from penstock import _native
from penstock.rules import UpdateSlice, rule_for
from penstock.rules.rule import RecordChecksums, StepScalars
from penstock.runtime.aio import checksum
from tests.lib.memory import memory
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


def test_a_record_is_its_runs_and_what_no_run_touches() -> None:
    """Two runs of a buffer with a gap between them, padding between the kinds and a tail."""
    rule, step_scalars = rule_and_hyper("adamw", FORMATS[4])
    numel = 5 * 256
    whole = make(rule, *random_inputs(numel), STORAGES[2], GRADS[1])
    assert whole.master is not None
    scales = [scale for scale in whole.scales if scale is not None]
    record, offset, views = memory(4 * 4096, seed=1), 0, []
    for tensor in (whole.master, whole.states[0], scales[0], whole.states[1], scales[1]):
        offset = -(-offset // 64) * 64 + 128
        view = record[offset : offset + tensor.nbytes].view(tensor.dtype)
        view.copy_(tensor)
        views.append(view)
        offset += tensor.nbytes
    master, *states = views

    def run(start: int, stop: int) -> tuple[UpdateSlice, StepScalars]:
        part, blocks = slice(start, stop), slice(start // 256, -(-stop // 256))
        values, scales = states[::2], states[1::2]
        update_slice = UpdateSlice(
            whole.param[part],
            whole.grad[part],
            master[part],
            tuple(state[part] for state in values),
            tuple(scale[blocks] for scale in scales),
            first=start,
        )
        return update_slice, step_scalars

    before, param = checksum(record), whole.param.clone()
    sums = RecordChecksums([record])
    assert sums.among([whole.param, None, master, record]) == [master, record]
    rule.update_many([run(0, 300), run(512, 1200)], 0.7, None, sums)
    assert sums.of(record) == (before, checksum(record))
    assert before != checksum(record)
    assert not torch.equal(param, whole.param)


def test_rules_with_kernels_sum_and_others_do_not() -> None:
    for name in RULES:
        assert rule_and_hyper(name)[0].sums
    for optimizer in (torch.optim.RMSprop, torch.optim.Adafactor):
        assert not rule_for(optimizer([torch.nn.Parameter(torch.zeros(4, 4))])).sums
