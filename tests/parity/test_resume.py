"""Resume never changes the result: what was saved and loaded goes on bit for bit as what was not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.optim import Lion
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate
from tests.parity.resuming import (
    SAVED_AT,
    SMALL,
    Other,
    Run,
    Seen,
    Values,
    different,
    go_on,
    iterate,
    resumed,
    saved,
    values,
)
from tests.parity.rows import Arithmetic, Movement, shares

KIB = 1 << 10
NVME = "nvme"
IN_FILES = Movement(params=NVME, grads=NVME, optimizer=NVME)
ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu")
THIRDS = shares(device=0.3, cpu=0.4, nvme=0.3)
SPLIT = Movement(params=THIRDS, grads=THIRDS, optimizer=THIRDS)
FP16 = Arithmetic(precision="fp16", master="fp32", accumulation=2)
OPTIMIZER_ON_CPU = Movement(optimizer="cpu").but(**SMALL)


#: What the table has not: other models, buffers, dropout, tied and frozen parameters, and a scale that falls.
SPECIAL = [
    Run(FP16, OPTIMIZER_ON_CPU.but(initial_loss_scale=2.0**18), separate),  # too large for a few steps
    Run(replace(FP16, clip=0.5), IN_FILES.but(**SMALL)),
    *(Run(Arithmetic(precision="bf16", schedule=True), how.but(**SMALL), separate, Other) for how in (ON_CPU, SPLIT)),
    Run(Arithmetic(clip=0.5), IN_FILES.but(**SMALL), inline, Other),
    Run(Arithmetic(precision="bf16"), Movement(overlap="backward").but(**SMALL), separate, Other),
    *(
        Run(Arithmetic(precision="bf16"), OPTIMIZER_ON_CPU, separate, offloaded=(kinds, "cpu"))
        for kinds in (("param",), ("optimizer", "master"), ("param", "grad", "master", "optimizer"))
    ),
]


@pytest.mark.parametrize("run", SPECIAL, ids=str)
def test_a_resumed_run_is_the_run(run: Run, tmp_path: Path) -> None:
    goes_on = saved(run, tmp_path / "a")
    assert resumed(run, tmp_path / "a").otherwise(goes_on) == []


def test_back_in_time_twice(tmp_path: Path) -> None:
    """Into the engine that runs, between other steps, and while a gradient is accumulated."""
    run = Run(Arithmetic(precision="bf16", schedule=True), ON_CPU.but(**SMALL), separate, Other)
    model, optimizer, scheduler = run.prepare()
    for step in range(SAVED_AT):
        iterate(run, model, optimizer, scheduler, step, 0, 1)
    optimizer.save(tmp_path / "a", extra={"scheduler": scheduler.state_dict()})
    goes_on = go_on(run, model, optimizer, scheduler)
    for _ in range(2):
        optimizer.backward(model(torch.ones(4, 12)).sum())
        extra = optimizer.load(tmp_path / "a")
        scheduler.load_state_dict(extra["scheduler"])
        assert go_on(run, model, optimizer, scheduler).otherwise(goes_on) == []
    optimizer.close()


# Into another engine.

FP32, BF16 = Arithmetic(), Arithmetic(precision="bf16")
OTHER_PLACES = [
    (Run(FP32, ON_CPU.but(**SMALL)), Run(FP32, ON_CPU.but(**SMALL, persistent_bytes=512), separate)),
    (Run(BF16, ON_CPU.but(**SMALL, persistent_bytes=512)), Run(BF16, SPLIT.but(**SMALL))),
    (Run(FP32, ON_CPU.but(**SMALL), model=Other), Run(FP32, SPLIT.but(**SMALL), separate, Other)),
    (
        Run(BF16, OPTIMIZER_ON_CPU.but(state_dtype="int8"), separate),
        Run(BF16, SPLIT.but(tile_bytes=6 * KIB, state_dtype="int8")),
    ),
]


@pytest.mark.parametrize(("before", "after"), OTHER_PLACES, ids=str)
def test_a_run_goes_on_elsewhere(before: Run, after: Run, tmp_path: Path) -> None:
    """Placement, tile size and stage change no bit; other units add up another norm, in its last bit."""
    goes_on = saved(before, tmp_path / "a")
    assert resumed(after, tmp_path / "a").otherwise(goes_on, but="norms") == []


def set_by_hand(run: Run, given: Values) -> Values:
    """The values of an engine into which others were set, one by one."""
    model, optimizer, _ = run.prepare(seed=77)
    for name, parameter in model.named_parameters():
        optimizer.set_full_param(parameter, given[name])
        for state in ("step", *optimizer._engine.access.state_names(parameter)):
            optimizer.set_full_state(parameter, state, given[f"{name} {state}"])
    found = values(model, optimizer)
    optimizer.close()
    return found


def form(precision: str, master: str = "remainder", **options: Any) -> Run:
    return Run(Arithmetic(precision=precision, master=master), SPLIT.but(**SMALL, **options), separate)


# Another form of master or states: what they keep of a value, relative to it, or to the largest of its tensor.
FORMS = [
    (form("fp32"), form("bf16"), 0.0, 0.0),
    (form("bf16"), form("bf16", "fp32"), 0.0, 0.0),
    (form("fp16", "fp32"), form("bf16"), 0.0, 0.0),
    (form("bf16", "none"), form("bf16"), 0.0, 0.0),
    (form("bf16"), form("bf16", "none"), 2**-8, 0.0),
    (form("fp32", state_dtype="bf16"), form("fp32"), 0.0, 0.0),
    (form("fp32"), form("fp32", state_dtype="int8"), 0.05, 0.02),
    (form("bf16", state_dtype="bf16"), form("bf16", state_dtype="int8"), 0.05, 0.02),
]


@pytest.mark.parametrize(("before", "after", "relative", "of_largest"), FORMS, ids=str)
def test_other_forms_take_over_what_they_can_hold(
    before: Run, after: Run, relative: float, of_largest: float, tmp_path: Path
) -> None:
    there = saved(before, tmp_path / "a", steps=0).at_once
    here = resumed(after, tmp_path / "a", steps=0).at_once
    assert different(here, set_by_hand(after, there)) == []
    for name, value in there.items():
        allowed = value.abs() * relative + value.abs().max() * of_largest
        assert ((here[name] - value).abs() <= allowed).all(), name


# Several ranks.

RANKED = [
    Run(BF16, OPTIMIZER_ON_CPU.but(stage=3), separate, Other),
    Run(BF16, OPTIMIZER_ON_CPU.but(stage=1, state_dtype="int8"), separate, rule=Lion, offloaded=(("param",), "cpu")),
]
OF_ONE = Run(FP32, ON_CPU.but(**SMALL))
WIDER, NARROWER = Run(FP32, SPLIT.but(stage=3, **SMALL), separate), Run(FP32, Movement(1).but(**SMALL))
REPLICATED = replace(WIDER, mesh=(2, 2))


def on_two_ranks(rank: int, folder: Path) -> tuple[list[str], Seen, Seen]:
    """Failures; what was saved in `two`, and what was loaded from `one`."""
    failures = []
    for number, run in enumerate(RANKED):
        goes_on = saved(run, folder / str(number), rank, 2, steps=2)
        found = resumed(run, folder / str(number), rank, 2, steps=2).otherwise(goes_on)
        failures += [f"{run}: {message}" for message in found]
    at_two = saved(WIDER, folder / "two", rank, 2, steps=1)
    found = resumed(NARROWER, folder / "two", rank, 2, steps=1).otherwise(at_two, but="norms")
    failures += [f"stage 3 to 1: {message}" for message in found]
    return failures, at_two, resumed(WIDER, folder / "one", rank, 2, steps=0)


def on_four_ranks(rank: int, folder: Path) -> tuple[Seen, Seen]:
    """What was loaded from `two`, and what was saved in `four`."""
    return resumed(WIDER, folder / "two", rank, 4, steps=0), saved(REPLICATED, folder / "four", rank, 4, steps=1)


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    of_one = saved(OF_ONE, tmp_path / "one", steps=0).at_once
    on_two = run_ranks(on_two_ranks, 2, tmp_path)
    assert [failures for failures, _, _ in on_two] == [[], []]
    assert [different(loaded.at_once, of_one) for _, _, loaded in on_two] == [[], []]
    of_two = on_two[0][1].at_once
    on_four = run_ranks(on_four_ranks, 4, tmp_path)
    assert [different(loaded.at_once, of_two) for loaded, _ in on_four] == [[]] * 4
    of_four = on_four[0][1].at_once
    assert different(resumed(OF_ONE, tmp_path / "two", steps=0).at_once, of_two) == []
    assert different(resumed(OF_ONE, tmp_path / "four", steps=0).at_once, of_four) == []
