"""Training on a stream of the user's own: compute is the current stream, whichever that is."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import penstock
from tests.gpu.models import EVERYTHING_ON_CPU, HYPER, assert_same, batches, build, slow_down, take_step
from tests.lib.engines import prepare_on

PLACEMENTS = {
    "cpu": EVERYTHING_ON_CPU,
    "optimizer": penstock.Placement(grads="cpu", optimizer="cpu"),
    "device": penstock.Placement(),
}
STEPS = 4


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """A new stream is the current one inside of the block. Both sides of the block's border wait for the other."""
    before = torch.accelerator.current_stream(device)
    own = torch.Stream(device)
    own.wait_stream(before)
    with own:
        yield
    before.wait_stream(own)


def where(device, *, own: bool):
    """The context of a run."""
    return on_own_stream(device) if own else nullcontext()


def prepared(streams, placement, **options):
    """A model whose blocks take a while on the device."""
    model = build()
    slow_down(model)
    stock = torch.optim.AdamW(model.parameters(), **HYPER)
    return model, prepare_on(streams, model, stock, placement=placement, max_grad_norm=0.5, **options)


@pytest.mark.parametrize("always", [True, False], ids=["always", "every other step"])
@pytest.mark.parametrize("placement", ["cpu", "device"])
def test_the_users_own_stream_trains_the_same(make_streams, device, uncompiled, placement, always):
    """Nothing is read on the host before the end, so nothing but the right waits makes this right."""
    if device.type == "cpu":
        pytest.skip("a cpu has no streams of its own")
    inputs = batches(STEPS, device)

    def train(own: bool):
        losses = []
        with where(device, own=own and always):
            model, optimizer = prepared(make_streams(), PLACEMENTS[placement])
            for number, x in enumerate(inputs):
                with where(device, own=own and not always and number % 2 == 1):
                    losses.append(take_step(model, optimizer, x))
            parameters = [optimizer.full_param(p) for p in model.parameters()]
            values = torch.stack(losses).cpu()
            optimizer.close()
        return [values, *parameters]

    assert_same(train(own=True), train(own=False), placement)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_a_save_beside_training_holds_the_state_of_its_step(make_streams, device, uncompiled, placement, tmp_path):
    """Saved between two steps without a wait: updates of the one may be under way, those of the next follow at once."""
    own = device.type != "cpu"
    inputs = batches(STEPS, device)
    model, optimizer = prepared(make_streams(), PLACEMENTS[placement])
    for x in inputs[:2]:
        take_step(model, optimizer, x)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    moments = [optimizer.full_state(p, "exp_avg") for p in model.parameters()]
    optimizer.close()

    with where(device, own=own):
        model, optimizer = prepared(make_streams(), PLACEMENTS[placement])
        for x in inputs[:2]:
            take_step(model, optimizer, x)
        optimizer.save(tmp_path / "saved", blocking=False)
        for x in inputs[2:]:
            take_step(model, optimizer, x)
        optimizer.synchronize()
        later = [optimizer.full_param(p) for p in model.parameters()]
        optimizer.load(tmp_path / "saved")
        found = [optimizer.full_param(p) for p in model.parameters()]
        found_moments = [optimizer.full_state(p, "exp_avg") for p in model.parameters()]
        optimizer.close()
    assert not all(torch.equal(a, b) for a, b in zip(later, expected, strict=True)), "training went on"
    assert_same(found, expected, "parameter")
    assert_same(found_moments, moments, "exp_avg")
