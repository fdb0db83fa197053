"""Rows of the parity table on the device: the same training, wherever state rests."""

from functools import lru_cache

import pytest
import torch

import penstock
from tests.gpu.models import EVERYTHING_ON_CPU, HYPER, Outcome, assert_same, batches, build, loss_of, plain_run
from tests.lib.engines import prepare_on

STEPS = 3
LR = HYPER["lr"]
AS_USUAL = penstock.Options()
STREAMED = penstock.Options(streamed_updates=0.5, tile_bytes=8 << 10)  # several tiles on either side
HOMES = {
    "device": (penstock.Placement(), AS_USUAL),
    "optimizer+grads": (penstock.Placement(grads="cpu", optimizer="cpu"), AS_USUAL),
    "cpu": (EVERYTHING_ON_CPU, AS_USUAL),
    "cpu, streamed": (EVERYTHING_ON_CPU, STREAMED),
    "optimizer": (penstock.Placement(optimizer="cpu"), AS_USUAL),
    "optimizer, streamed": (penstock.Placement(optimizer="cpu"), STREAMED),
    "cpu, streamed by rates": (EVERYTHING_ON_CPU, penstock.Options(streamed_updates="auto", tile_bytes=8 << 10)),
}
# precision, micro-batches, clip: those that tell most first
ROWS = [("bf16", 1, 0.5), ("fp32", 4, None)]
# Norms of a later micro-batch are taken where it is added, by the host or by the device: their last bits differ, and
# with them the clip's. So a row of several has none.
EXACT_ROWS = [*((ROWS[0], storage) for storage in HOMES), (ROWS[1], "cpu, streamed"), (("bf16", 4, None), "optimizer")]


def run(streams, storage, row, device) -> Outcome:
    """Train on Penstock."""
    placement, options = HOMES[storage]
    precision, accumulation, clip = row
    model = build()
    optimizer = prepare_on(
        streams,
        model,
        torch.optim.AdamW(model.parameters(), **HYPER),
        placement=placement,
        options=options,
        precision=precision,
        max_grad_norm=clip,
        master="fp32",
    )
    outcome = Outcome()
    data = iter(batches(STEPS * accumulation, device))
    for step in range(STEPS):
        for _ in range(accumulation):
            loss = loss_of(model, next(data))
            optimizer.backward(loss)
            outcome.losses.append(loss.item())
        if step == 0:
            outcome.first_gradients = [optimizer.full_grad(p) for p in model.parameters()]
        outcome.norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
        if step == 0:
            outcome.first_parameters = [optimizer.full_param(p) for p in model.parameters()]
    outcome.parameters = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return outcome


@lru_cache
def plain(row, device) -> Outcome:
    """Plain torch, once for all placements."""
    precision, accumulation, clip = row
    return plain_run(precision, accumulation, clip, STEPS, device)


_exact: dict[object, Outcome] = {}


@pytest.mark.parametrize(("row", "storage"), EXACT_ROWS, ids=str)
def test_no_placement_changes_a_bit(make_streams, device, uncompiled, row, storage):
    """The device's reference update rounds as the host's does; so all placements have to be equal, bit by bit."""
    if row not in _exact:
        _exact[row] = run(make_streams(), "device", row, device)
    assert_exact(run(make_streams(), storage, row, device), _exact[row], row)


@pytest.mark.slow
def test_no_placement_changes_a_bit_where_updates_are_compiled(make_streams, device):
    """With the updates that a user has there: compiled ones give the host's bits as well."""
    row = ROWS[0]
    expected, found = (run(make_streams(), storage, row, device) for storage in ("cpu", "device"))
    assert_exact(found, expected, row)


def assert_exact(found, expected, row):
    """The same bits in everything that two runs have seen."""
    assert_same(found.first_gradients, expected.first_gradients, "gradient of the first step")
    assert found.norms == pytest.approx(expected.norms, rel=0 if row[1] == 1 else 1e-6, abs=0)
    assert_same(found.first_parameters, expected.first_parameters, "parameter after the first step")
    assert found.losses == expected.losses
    assert_same(found.parameters, expected.parameters, "parameter at the end")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("storage", ["device", "cpu"])
def test_every_placement_trains_like_plain_torch(make_streams, device, storage, row):
    """With the updates that a user has there: compiled on a device that has a compiler."""
    expected, found = plain(row, device), run(make_streams(), storage, row, device)
    # The same kernels on the same values: nothing has been rounded differently yet.
    assert_same(found.first_gradients, expected.first_gradients, "gradient of the first step")
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-5)
    # One update of equal gradients: a few last places of the update (at most about lr), and one of the parameter.
    for mine, theirs in zip(found.first_parameters, expected.first_parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-4 * LR)
    tolerance = {"fp32": 1e-5 if device.type == "cpu" else 1e-4, "bf16": 2e-2}[row[0]]
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=tolerance, atol=1e-6)
    for mine, theirs in zip(found.parameters, expected.parameters, strict=True):
        _assert_near(mine, theirs, row[0], device)


def _assert_near(mine, theirs, precision, device):
    """As far apart as other rounding takes them.

    Adam divides each gradient by its own size, so one that is nearly zero, and whose sign is noise, moves its parameter
    by lr in a step like any other. Torch's update on a device and ours differ in the last bit, so the next gradients
    do by about 1e-7 (fp32) or by a bf16's last bit here and there, and elements whose gradient is not far above that
    go their own way. They are few, and none goes further than `STEPS` updates. On a cpu nothing differs.
    """
    rtol, atol = {"fp32": (1e-4, 1e-2 * LR), "bf16": (2e-2, 0.2 * LR)}[precision]
    apart = ~torch.isclose(mine, theirs, rtol=rtol, atol=atol)
    most = 0.0 if device.type == "cpu" else {"fp32": 1e-3, "bf16": 1e-2}[precision]
    assert apart.float().mean() <= most, f"{int(apart.sum())} of {apart.numel()} elements are apart"
    torch.testing.assert_close(mine, theirs, rtol=0, atol=3 * LR * STEPS)
