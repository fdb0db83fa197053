"""The parity table at world size 1: against plain torch, and the same bits wherever the bytes are."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate
from tests.parity.compare import against_plain_by_step, against_plain_run, beyond, different_bits
from tests.parity.rows import CORE, EXTRA, PLACEMENTS, STATE_NAMES, STEPS, Arithmetic, Movement, Plain, changed, train
from tests.support import sampled

STEPS_OF_A_MOVEMENT = 4
KIB = 1 << 10


def movements() -> Iterator[tuple[Callable[[], Streams], Movement]]:
    """Compute beside the host's memory or in it, and everything that must not change a bit."""
    for stage, placement in product((0, 1, 2, 3), PLACEMENTS):
        yield inline, placement.but(stage=stage)
    for placement in (*PLACEMENTS, Movement(params="cpu"), Movement(grads="cpu"), Movement(optimizer="cpu")):
        yield separate, placement.but(stage=1, tile_bytes=4 * KIB)
    yield inline, Movement(optimizer="cpu").but(tile_bytes=4 * KIB, update_threads=1)
    yield inline, Movement(optimizer="cpu").but(tile_bytes=4 * KIB, update_threads=3)
    everything_on_cpu = PLACEMENTS[2]
    yield separate, everything_on_cpu.but(prefetch_bytes=0)
    yield separate, everything_on_cpu.but(live_bytes=32 * KIB)


@pytest.mark.parametrize("what", sampled([*CORE, *EXTRA], every=6), ids=changed)
def test_steps_are_plain_torchs_and_movement_changes_no_bit(what: Arithmetic) -> None:
    reference = train(what, Movement(), look=True)
    failures = list(against_plain_by_step(what, reference))
    if what.compute == what.reduce == torch.float32:
        failures += against_plain_run(what, reference)
    assert not failures, "\n".join(failures)
    for streams, how in movements():
        trace = train(what, how, streams=streams(), steps=STEPS_OF_A_MOVEMENT)
        found = different_bits(trace, reference, STEPS_OF_A_MOVEMENT, what.accumulation)
        if found:
            failures.append(f"{streams.__name__} {changed(how)}: {', '.join(found)}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("what", [Arithmetic(clip=0.5), Arithmetic(precision="bf16", accumulation=4)], ids=changed)
def test_persistent_parameters_form_other_units_but_train_the_same(what: Arithmetic) -> None:
    """Other units add the norm up in another order: its last bit, beyond fp32, may differ."""
    everything_on_cpu = PLACEMENTS[2].but(persistent_bytes=512)
    reference = train(what, everything_on_cpu, look=True)
    assert not list(against_plain_by_step(what, reference))
    one_unit_more = train(what, everything_on_cpu, streams=separate(), steps=STEPS)
    assert different_bits(one_unit_more, reference, STEPS, what.accumulation) == []
    without = train(what, PLACEMENTS[2])
    assert without.norms == pytest.approx(reference.norms, rel=1e-12)
    without.norms = reference.norms
    assert different_bits(without, reference, STEPS, what.accumulation) == []


class Uphill(nn.Module):
    """All activations and weights positive, all residuals of one sign: no sum anywhere cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(index)
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.1 + 0.05)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_without_cancellation_every_element_is_within_a_millionth_of_plain_torch_after_ten_steps(
    accumulation: int, clip: float | None
) -> None:
    ours, theirs = Uphill(), Uphill()
    optimizer = prepare_on(
        separate(),
        ours,
        torch.optim.AdamW(ours.parameters(), lr=1e-2),
        precision="fp32",
        placement=penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
        max_grad_norm=clip,
        options=penstock.Options(tile_bytes=4 * KIB),
    )
    stock = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        for _ in range(accumulation):
            x = torch.rand(8, 16, generator=generator) + 0.5
            optimizer.backward((100 - ours(x)).square().mean())
            (100 - theirs(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        stock.step()
        stock.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert beyond(optimizer.full_param(p), q.detach(), relative=1e-6, of_largest=0) is None
        for name in STATE_NAMES:
            assert beyond(optimizer.full_state(p, name), stock.state[q][name], relative=1e-6, of_largest=0) is None
    optimizer.close()


def test_bf16_losses_stay_within_one_percent_of_plain_torch_over_a_run() -> None:
    """Each side from its own states: one rounding of a weight that falls the other way sets them apart for good."""
    what = Arithmetic(precision="bf16", accumulation=4, clip=0.5)
    plain = Plain(what, 1)
    ours = train(what, Movement())
    theirs = []
    for step in range(STEPS):
        gradients, losses = plain.accumulate(step)
        plain.step(gradients[-1])
        theirs += losses
    assert ours.losses == pytest.approx(theirs, rel=1e-2)
