"""A simulation of an accelerator against one: the same jobs, and the peak of its memory as the allocator counts it.

What differs, and is kept out of the rows: attention and activation functions that the strict device has as many
operations where a GPU has one kernel (so attention is eager, and the activation has a kernel); the update of tiles,
which a GPU compiles into one kernel without memory of its own; dropout's mask, which a cpu keeps in the dtype of the
values and other devices as bools: a simulation counts it too high.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.planner.simulation.simulate import Setup, loss_of
from penstock.rules import device as device_rules
from tests.device.running import strict
from tests.parity.rows import INPUTS, Movement, Net, shares
from tests.parity.test_simulation import Row, models, optimizer_of
from tests.simulations import as_simulated, run_really, simulated

ABOVE, BELOW = 0.03, 0.02


def text() -> dict[str, Tensor]:
    ids = torch.arange(4 * 32).view(4, 32) % 96
    return {"input_ids": ids, "labels": ids}


TEXTS = models(128, 256, layers=3, experts="eager", hidden_act="relu", attn_implementation="eager")
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "net": (lambda: Net(128, 3), lambda: torch.ones(64, INPUTS)),
    # Each expert by itself: the strict device lacks an operation of grouped ones.
    **{name: (make, text) for name, make in TEXTS.items()},
}

TILES = (("tile_bytes", 64 << 10),)
HERE = Movement(options=TILES)
AWAY = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward", options=TILES)
TWIN = Movement(
    params=shares(0.3, 0.7), grads="cpu", optimizer=shares(0.25, 0.5, 0.25), overlap="forward", options=TILES
)
FILES = Movement(params="nvme", grads="nvme", optimizer="nvme", options=TILES)
HALVES = Movement(grads=shares(0.5, 0.5), optimizer=shares(0.5, 0.5), options=TILES)

# Each model, and each way of movement, once.
ROWS = [
    Row("net", HERE),
    Row("net", AWAY, micro_batches=2, precision="fp32"),
    Row("net", FILES),
    Row("net", Movement(grads="cpu", optimizer="cpu", options=TILES), micro_batches=3),
    Row("llama", TWIN, streamed=0.5),
    Row("llama", AWAY.but(prefetch_bytes=0, persistent_bytes=1 << 12), activations="cpu"),
    Row("recomputed", replace(AWAY, overlap="backward"), activations="nvme"),
    Row("tied", AWAY),
    Row("gpt2", HALVES),
    Row("moe", AWAY),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rehearsal_submits_what_a_device_is_given_and_counts_what_it_takes(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.device.backend import native

    # One kernel in place of an update, as a compiler makes it: what it computes is not looked at here.
    monkeypatch.setattr(device_rules, "has_compiler", lambda device: True)
    monkeypatch.setattr(device_rules, "compile_pass", lambda function: lambda *arguments: None)
    make, batch = MODELS[row.model]
    before = native.memory(0)["allocated"]
    model = make()
    real, prepared = run_really(
        model,
        optimizer_of(model),
        batch,
        row.request(model),
        strict(),
        micro_batches=row.micro_batches,
        loss_of=loss_of,
        when_built=lambda: native.reset_peak(0),
    )
    torch.accelerator.synchronize()
    peak = native.memory(0)["peak"] - before
    prepared.close(keep_params=False)
    del prepared, model
    gc.collect()

    meant = make()
    setup = Setup(meant, optimizer_of(meant), batch, micro_batches=row.micro_batches, back_end="accelerator")
    virtual, found = simulated(setup, row.request(meant))
    real = as_simulated(real, found.program)
    for number, (one, other) in enumerate(zip(real, virtual, strict=False)):
        assert one == other, f"job {number} of {len(real)}"
    assert len(real) == len(virtual)
    counted = found.program.peak_bytes["device"]
    assert (1 - BELOW) * peak <= counted <= (1 + ABOVE) * peak, f"{counted / peak - 1:+.1%} of {peak:,}"
