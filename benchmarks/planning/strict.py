"""Steps on the strict device, whose modelled time is exact: the planner is told the same figures."""

import itertools
from typing import Any

import penstock
from penstock.planner import plan
from planning.models import batch, gpt2, llama
from planning.rows import row, summary

MODELS = {"llama": llama, "gpt2": gpt2}
LIMIT = 0.5  # of the memory that everything on the device takes


def device() -> None:
    """Makes this process one with the strict device; work is late by little."""
    from tests.device.building import build
    from tests.device.loading import load

    load(build())
    from tests.device.backend import native

    native.configure(0, 0.0002, False)


def cases() -> list[Any]:
    """Placements, links, models and micro-batches."""
    from tests.modelled import Case

    on_cpu = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    half = penstock.Placement(params={"device": 0.5, "cpu": 0.5}, grads="cpu", optimizer="cpu")
    kept = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu", activations="cpu")
    state = penstock.Placement(grads="cpu", optimizer="cpu")
    return [
        *(
            Case(f"{name}, all on cpu, {link:.0e} B/s, {kernel:.0e} s", MODELS[name], batch, on_cpu, link, kernel)
            for name in MODELS
            for link, kernel in ((1e8, 1e-15), (1e8, 1e-5), (1e9, 1e-5))
        ),
        *(
            Case(f"{name}, {what}", MODELS[name], batch, placement, 1e8, 1e-5)
            for name in MODELS
            for what, placement in (("state on cpu", state), ("half of params", half), ("activations on cpu", kept))
        ),
        *(Case(f"{name}, 3 micro-batches", MODELS[name], batch, on_cpu, 1e8, 1e-5, micro_batches=3) for name in MODELS),
        Case("llama, state on cpu, forward", llama, batch, state, 1e8, 1e-5, overlap="forward"),
        Case("llama, all on cpu, forward", llama, batch, on_cpu, 1e8, 1e-5, overlap="forward"),
        Case("llama, norm", llama, batch, on_cpu, 1e8, 1e-5, arguments={"max_grad_norm": 1.0}),
        Case(
            "llama, nothing ahead",
            llama,
            batch,
            on_cpu,
            1e8,
            1e-5,
            arguments={"options": penstock.Options(prefetch_bytes=0)},
        ),
    ]


def strict() -> dict[str, Any]:
    """The rows."""
    device()
    from tests.modelled import measured, predicted

    return summary([row(case.name, predicted(case), measured(case)) for case in cases()])


def grid() -> dict[str, Any]:
    """`auto` against the best of placements on a grid, of those that fit."""
    device()
    from dataclasses import replace

    import torch

    from tests.modelled import Case, machine_of, measured

    rows = []
    for name, (link, kernel) in itertools.product(MODELS, ((1e7, 1e-6), (3e8, 1e-5))):
        machine = machine_of(link, kernel)
        arguments = {"options": penstock.Options(streamed_updates=0.0, tile_bytes=4096)}
        case = Case(name, MODELS[name], batch, penstock.Placement(), link, kernel, arguments=arguments)

        def asked(placement: Any, case: Any = case, machine: Any = machine, **limit: int) -> Any:
            return plan(
                case.model,
                torch.optim.AdamW,
                case.batch,
                machine=machine,
                placement=placement,
                overlap="none",
                **limit,
                **case.arguments,
            )

        room = int(LIMIT * asked(penstock.Placement()).peak_bytes["device"])
        auto = asked("auto", device_bytes=room)
        best = measured(replace(case, placement=auto.placement))
        found = []
        shares = ({"cpu": 1.0}, {"device": 0.25, "cpu": 0.75}, {"device": 0.5, "cpu": 0.5}, {"device": 1.0})
        for params, grads, optimizer in itertools.islice(itertools.product(shares, repeat=3), 60):
            placement = penstock.Placement(params=params, grads=grads, optimizer=optimizer)
            if asked(placement, device_bytes=room).fits:
                found.append(measured(replace(case, placement=placement)))
        rows.append(row(f"{name}, {link:.0e} B/s", best, min(found), fitting=len(found), recompute=auto.recompute))
    return summary(rows)
