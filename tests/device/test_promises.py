"""The promises of the engine, on the strict device: wherever state rests and whenever it moves, the cpu's own bits."""

import json
from collections import Counter
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.runtime.streams import Streams
from tests.device.running import on_threads, strict
from tests.lib.engines import ON_CPU as ALL_ON_CPU
from tests.lib.engines import ON_NVME, loss_of, prepare_on, prepared
from tests.lib.memory import disks
from tests.lib.models import Blocks, batch_of
from tests.lib.streams import inline
from tests.parity import whole
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, changed, shares, train

KIB = 1 << 10
STEPS = 2
SUMMED = Arithmetic(precision="bf16", accumulation=2, clip=0.5)
CAST = Arithmetic(precision="bf16", accumulation=2, clip=0.5, accumulation_dtype=torch.float32)
SINGLE = Arithmetic(clip=0.5, groups=True)
UNCLIPPED = Arithmetic(precision="bf16", accumulation=2, no_sync=True)
ON_CPU = Movement(3, "cpu", "cpu", "cpu")

#: Any two kinds on any two tiers.
TIERS = [(a, b, a if b == "cpu" else {"cpu": "device"}.get(a, "cpu")) for a, b in product(("device", "cpu"), repeat=2)]
PLACEMENTS = [Movement(3, *tiers).but(tile_bytes=4 * KIB) for tiers in TIERS]
FILES = [Movement(3, "nvme", "cpu", "nvme"), Movement(3, "nvme", "nvme", "nvme")]
SPLIT = [
    Movement(3, "cpu", "cpu", shares(device=0.4, cpu=0.6)).but(tile_bytes=4 * KIB),
    Movement(3, shares(device=0.5, cpu=0.5), shares(device=0.3, cpu=0.7), shares(device=0.5, nvme=0.5)).but(
        tile_bytes=4 * KIB
    ),
]
STREAMED = [
    how.but(streamed_updates=0.5, tile_bytes=4 * KIB) for how in (FILES[0], Movement(3, "device", "cpu", "cpu"))
]
WINDOWS = [ON_CPU.but(prefetch_bytes=0), ON_CPU.but(live_bytes=40 * KIB), ON_CPU.but(persistent_bytes=1 * KIB)]
OVERLAPS = [Movement(3, "cpu", "cpu", "cpu", overlap="none")]


def rows():
    """Every movement once, with arithmetic in turn."""
    kinds = (SUMMED, CAST, SINGLE, UNCLIPPED)
    for number, how in enumerate([*PLACEMENTS, *FILES, *SPLIT, *STREAMED, *WINDOWS, *OVERLAPS]):
        yield kinds[number % len(kinds)], how
    yield UNCLIPPED, Movement(3, "cpu", "cpu", "cpu", overlap="backward")


@cache
def as_on_the_cpu(what: Arithmetic, steps: int = STEPS) -> list[object]:
    return bits(train(what, Movement(3), streams=inline(), steps=steps))


@pytest.mark.parametrize(("what", "how"), list(rows()), ids=changed)
def test_placement_changes_no_bit(what: Arithmetic, how: Movement) -> None:
    assert bits(train(what, how, streams=strict(), steps=STEPS)) == as_on_the_cpu(what)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (Movement(3), "device"),
        (Movement(3, "device", "cpu", "cpu", "forward"), "home"),
        (Movement(3, "cpu", "cpu", "cpu", "backward"), "device"),
        (Movement(3, "nvme", "cpu", "nvme", "forward"), "home"),
        (Movement(3, "cpu", "cpu", shares(device=0.5, cpu=0.5)).but(state_dtype="int8"), "device"),
    ],
    ids=lambda value: changed(value) if isinstance(value, Movement) else value,
)
def test_whole_matrices_come_up_and_go_back(how: Movement, where: str) -> None:
    """Through the ring of tiles, or updated on the host."""
    settings = dict(precision="bf16", accumulation=1 if how.overlap == "backward" else 2, steps=STEPS)
    ours = whole.train(how.but(whole_updates=where), streams=strict(), **settings)
    quiet = Movement(3).but(**{key: value for key, value in how.options if key == "state_dtype"})
    assert whole.different(ours, whole.train(quiet, **settings)) == []


@pytest.mark.parametrize(("tier", "kept"), [("cpu", 0), ("device", 2)])
def test_each_matrix_moves_once_each_way(tier: str, kept: int, tmp_path: Path) -> None:
    """By the trace of a step: parameter, momentum, the master's other part and the gradient of each matrix."""
    model = whole.first_model()
    placement = penstock.Placement(params=tier, grads=tier, optimizer="cpu")
    optimizer = prepare_on(strict(), model, whole.muon(model), stage=3, placement=placement, precision="bf16")
    moved: Counter[tuple[str, str]] = Counter()
    for step, ((ids,),) in enumerate(whole.batches(1, 1, 2)):
        with optimizer.trace(tmp_path / "trace.json") if step else nullcontext():
            optimizer.backward(whole.loss_of(model, ids.to("strict")))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    rows = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "dur" in event]
    for row in rows:
        unit = row["args"].get("unit", "")
        if row["name"].startswith(("update", "save")) and row["tid"] in (1, 2) and ".muon." in unit:
            moved[unit, ("up", "down")[row["tid"] - 1]] += row["args"]["bytes"]
    numels = {"3x16x32": 3 * 16 * 32, "16x16": 3 * 16 * 16, "48x16": 2 * 48 * 16}
    for block, (shape, numel) in product(range(2), numels.items()):
        for direction in ("up", "down"):  # 2 bytes of the gradient, 4 of momentum, 2 of the parameter, 2 of the rest
            assert moved[f"blocks.{block}.muon.{shape}", direction] == (10 - 2 * kept) * numel


def test_two_devices_in_one_process() -> None:
    """Two engines, each on its device, on two threads."""
    expected = as_on_the_cpu(SUMMED)

    def on(index: int) -> list[object]:
        torch.strict.set_device(index)
        return bits(train(SUMMED, ON_CPU, streams=strict(index), steps=STEPS))

    assert on_threads(lambda: on(0), lambda: on(1)) == [expected] * 2


def moved(streams: Streams, **how: Any) -> list[Tensor]:
    """Parameters of some steps, between which all state goes to files and comes back beside training."""
    model, optimizer = prepared(Blocks, streams, **how)
    for number in range(4):
        optimizer.backward(loss_of(model, number, device=streams.device))
        if streams.device.type != "cpu" and number in (1, 2):
            optimizer.offload_states(to="nvme", non_blocking=True, include=None if number == 1 else {"optimizer"})
            optimizer.reload_states(non_blocking=True)
        optimizer.step()
        optimizer.zero_grad()
    values = [optimizer.full_param(parameter) for parameter in model.parameters()]
    optimizer.close()
    return values


def test_moves_to_files_beside_training_change_no_bit() -> None:
    how = {"grads": "cpu", "nvme_path": disks()[0]}
    assert all(map(torch.equal, moved(strict(), **how), moved(inline())))


def averaged(streams: Streams, tier: str, **how: Any) -> list[Tensor]:
    """The parameters, their average, and what the model computes with it, where parts are trained later."""
    model = Blocks()
    model.blocks.requires_grad_(False)
    model, optimizer = prepared(model, streams, precision="bf16", **how)
    ema = penstock.EMA(optimizer, 0.5, tier=tier)  # type: ignore[arg-type]
    later = {1: model.blocks[0], 2: model.blocks[1].up}  # a unit, and a part of one
    for step in range(4):
        if step in later:
            thawed = later[step].requires_grad_(True)
            optimizer.add_param_group({"params": list(thawed.parameters()), "lr": 1e-3})
        optimizer.backward(loss_of(model, step, device=streams.device))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    with ema.applied(), torch.no_grad():
        found = [model(batch_of(model).to(streams.device)).cpu()]
        found += [optimizer.full_param(p) for p in model.parameters()]
    found += [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize(("how", "tier"), [(ALL_ON_CPU, "device"), (ON_NVME, "nvme")], ids=["cpu", "nvme"])
def test_averages_and_unfreezing_change_no_bit(how: dict[str, str], tier: str) -> None:
    assert all(map(torch.equal, averaged(strict(), tier, **how), averaged(inline(), "device")))
