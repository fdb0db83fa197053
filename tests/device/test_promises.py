"""The promises of the engine, on the strict device: wherever state rests and whenever it moves, the cpu's own bits."""

import json
from collections import Counter
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import penstock
from tests.device.running import of_the_user, on_threads, strict
from tests.gpu.models import HYPER
from tests.gpu.models import batches as inputs
from tests.gpu.models import build as make_blocks
from tests.gpu.models import loss_of as loss_of_blocks
from tests.lib.engines import prepare_on
from tests.lib.streams import inline
from tests.parity import whole
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, prepared, shares, train
from tests.parity.test_simulated import everything
from tests.support import thorough

KIB = 1 << 10
STEPS = 2
SUMMED = Arithmetic(precision="bf16", accumulation=2, clip=0.5)
CAST = Arithmetic(precision="bf16", accumulation=2, clip=0.5, accumulation_dtype=torch.float32)
SINGLE = Arithmetic(clip=0.5, groups=True)
UNCLIPPED = Arithmetic(precision="bf16", accumulation=2, no_sync=True)
ON_CPU = Movement(3, "cpu", "cpu", "cpu")

PLACEMENTS = [Movement(3, *tiers).but(tile_bytes=4 * KIB) for tiers in product(("device", "cpu"), repeat=3)]
FILES = [Movement(3, "nvme", "cpu", "nvme"), Movement(3, "nvme", "nvme", "nvme"), Movement(3, "cpu", "cpu", "nvme")]
SPLIT = [
    Movement(3, "cpu", "cpu", shares(device=0.4, cpu=0.6)).but(tile_bytes=4 * KIB),
    Movement(3, shares(device=0.5, cpu=0.5), shares(device=0.3, cpu=0.7), shares(device=0.5, nvme=0.5)).but(
        tile_bytes=4 * KIB
    ),
]
STREAMED = [
    how.but(streamed_updates=0.5, tile_bytes=4 * KIB) for how in (ON_CPU, FILES[0], Movement(3, "device", "cpu", "cpu"))
]
WINDOWS = [ON_CPU.but(prefetch_bytes=0), ON_CPU.but(live_bytes=40 * KIB), ON_CPU.but(persistent_bytes=1 * KIB)]
OVERLAPS = [Movement(3, "cpu", "cpu", "cpu", overlap=overlap) for overlap in ("none", "forward")]


def rows():
    """Every other movement once, with arithmetic in turn; `make test-thorough` runs the rest of the table."""
    kinds = (SUMMED, CAST, SINGLE, UNCLIPPED)
    for number, how in enumerate([*PLACEMENTS, *FILES, *SPLIT, *STREAMED, *WINDOWS, *OVERLAPS]):
        for turn, what in enumerate(kinds):
            name = f"{changed(how)} | {changed(what)}"
            quick = turn == number % len(kinds) and number % 2 == 0
            yield pytest.param(what, how, id=name) if quick else thorough(what, how, id=name)
    begins = Movement(3, "cpu", "cpu", "cpu", overlap="backward")
    yield pytest.param(UNCLIPPED, begins, id="backward")


@cache
def as_on_the_cpu(what: Arithmetic, steps: int = STEPS) -> list[object]:
    return everything(train(what, Movement(3), streams=inline(), steps=steps))


@pytest.mark.parametrize(("what", "how"), list(rows()))
def test_placement_changes_no_bit(what: Arithmetic, how: Movement) -> None:
    assert everything(train(what, how, streams=strict(), steps=STEPS)) == as_on_the_cpu(what)


@pytest.mark.parametrize(
    "how",
    [
        Movement(3),
        Movement(3, "device", "cpu", "cpu", "forward"),
        thorough(Movement(3, "cpu", "cpu", "cpu", "backward")),
        Movement(3, "nvme", "cpu", "nvme", "forward"),
        thorough(Movement(3, "cpu", "cpu", shares(device=0.5, cpu=0.5)).but(state_dtype="int8")),
    ],
    ids=changed,
)
@pytest.mark.parametrize("where", ["device", "home"])
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


@pytest.mark.parametrize("how", [Movement(3), ON_CPU, FILES[0], STREAMED[0]], ids=changed)
def test_the_stream_of_the_user_changes_no_bit(how: Movement) -> None:
    with of_the_user():
        assert everything(train(SUMMED, how, streams=strict(), steps=STEPS)) == as_on_the_cpu(SUMMED)


def test_another_stream_for_every_step() -> None:
    """Who changes streams orders them, as everywhere in torch. What is gathered and collected follows."""
    model, optimizer = prepared(SINGLE, ON_CPU, strict())
    reference, plain = prepared(SINGLE, Movement(3), inline())
    for (((x, y),),) in batches(1, 1)[:4]:
        stream = torch.Stream("strict:0")
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            optimizer.backward(loss_of(model, (x.to("strict"), y.to("strict"))))
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.current_stream().wait_stream(stream)
        plain.backward(loss_of(reference, (x, y)))
        plain.step()
        plain.zero_grad()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(one), plain.full_param(other))
    optimizer.close()
    plain.close()


def test_two_devices_in_one_process() -> None:
    """Two engines, each on its device, on two threads."""
    expected = as_on_the_cpu(SUMMED)

    def on(index: int) -> list[object]:
        torch.strict.set_device(index)
        return everything(train(SUMMED, ON_CPU, streams=strict(index), steps=STEPS))

    assert on_threads(lambda: on(0), lambda: on(1)) == [expected] * 2


@pytest.mark.parametrize("to", ["cpu", "nvme"])
@pytest.mark.parametrize("non_blocking", [thorough(False, id="blocking"), pytest.param(True, id="non-blocking")])
def test_moves_between_steps_change_no_bit(to: str, non_blocking: bool, tmp_path: Path) -> None:
    model, optimizer = _blocks(penstock.Placement(nvme_path=tmp_path, grads="cpu"))
    for number, x in enumerate(inputs(4, torch.device("strict"))):
        optimizer.backward(loss_of_blocks(model, x))
        if number == 1:
            optimizer.offload_states(to=to, non_blocking=non_blocking)
            optimizer.reload_states(non_blocking=non_blocking)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            optimizer.offload_states(include={"optimizer", "master"}, to=to, non_blocking=non_blocking)
    assert _equal(_parameters(model, optimizer), _trained_on_the_cpu(4))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_activations_on_a_tier_change_no_bit(tier: str, tmp_path: Path) -> None:
    everything_on_cpu = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
    model, optimizer = _blocks(
        penstock.Placement(**everything_on_cpu, activations=tier, nvme_path=tmp_path), width=64, size=256
    )
    for x in inputs(3, torch.device("strict"), size=256):
        optimizer.backward(loss_of_blocks(model, x))
        optimizer.step()
        optimizer.zero_grad()
    assert _equal(_parameters(model, optimizer), _trained_on_the_cpu(3, size=256))


def test_a_save_beside_training_holds_its_step(tmp_path: Path) -> None:
    model, optimizer = _blocks(penstock.Placement(params="cpu"))
    saved = []
    for number, x in enumerate(inputs(4, torch.device("strict"))):
        optimizer.backward(loss_of_blocks(model, x))
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            optimizer.save(tmp_path / "beside", blocking=False)
            saved = _trained_on_the_cpu(2)
    optimizer.synchronize()
    optimizer.load(tmp_path / "beside")
    assert _equal(_parameters(model, optimizer), saved)


def _blocks(placement: penstock.Placement, width: int = 64, size: int = 32):
    del size
    model = make_blocks(width)
    stock = torch.optim.AdamW(model.parameters(), **HYPER)
    return model, prepare_on(strict(), model, stock, placement=placement, options=penstock.Options(tile_bytes=8 * KIB))


def _trained_on_the_cpu(steps: int, size: int = 32) -> list[Tensor]:
    model = make_blocks()
    optimizer = prepare_on(inline(), model, torch.optim.AdamW(model.parameters(), **HYPER))
    for x in inputs(4, torch.device("cpu"), size=size)[:steps]:
        optimizer.backward(loss_of_blocks(model, x))
        optimizer.step()
        optimizer.zero_grad()
    return _parameters(model, optimizer)


def _parameters(model: torch.nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    values = [optimizer.full_param(parameter).clone() for parameter in model.parameters()]
    optimizer.close()
    return values


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
