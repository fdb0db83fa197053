"""What a plan decides for `prepare`: whether it is for this run, and the arguments that it stands for.

A plan becomes the same arguments that somebody would write by hand, and goes through the same checks from there on.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.forecast.plan import Plan, placeholders
from penstock.probe.fingerprint import fingerprint
from penstock.recompute import can_be_told, recomputes
from penstock.rules import rule_for
from penstock.runtime.topology import Grid

AUTO = "auto"
#: What a plan and a run have to share of their machines. What a launcher decides (threads, cores, ranks of a host), and
#: what an update of the system changes, is left out: `penstock plan` runs as one process, and on another day.
_OF_A_MACHINE = ("cpu", "memory_bytes", "device", "device_name", "device_memory_bytes")

PlanOrFile = Plan | str | os.PathLike[str]


def check_elementwise(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at whole parameters: machines have figures of updates by bytes alone.

    Raises:
        ConfigError: it names the optimizer.
    """
    made = optimizer
    if isinstance(made, type):
        try:
            made = made([nn.Parameter(torch.zeros(8, 8))])  # type: ignore[call-arg]
        except Exception:  # it takes something else: the rehearsal says so
            return
    if rule_for(made).whole:
        raise ConfigError(
            f"{type(made).__name__} looks at whole parameters, and a plan times updates by their bytes, which does not "
            "hold for products of matrices. Say where state should be with a penstock.Placement; penstock.footprint "
            "tells whether it fits."
        )


def asks_for_plan(placement: object) -> bool:
    """Whether a placement is the word for one that is planned."""
    return isinstance(placement, str) and placement == AUTO


def check_asked(placement: object, plan: object, batch: object, *, trains: bool) -> None:
    """Refuse arguments of `prepare` that do not say what is planned.

    Arguments:
        placement: as for `prepare`; `"auto"` needs one of the other two, and they need it.
        plan: a plan, or its file.
        batch: makes one micro-batch.
        trains: whether there is an optimizer.

    Raises:
        ConfigError: it says which of them to give.
    """
    given = [f"{name}=" for name, value in (("plan", plan), ("batch", batch)) if value is not None]
    if not asks_for_plan(placement):
        if given:
            raise ConfigError(f"{given[0]} goes with placement='auto' alone. Give that, or leave {given[0]} out.")
        return
    if not given:
        raise ConfigError(
            "placement='auto' needs to know what it is for: give plan=, the file that penstock plan wrote, or batch=, "
            "a function that makes one micro-batch, to rehearse it."
        )
    if len(given) > 1:
        raise ConfigError("plan= and batch= both say what placement='auto' is for. Give one of them.")
    if plan is not None and not isinstance(plan, Plan | str | os.PathLike):
        raise ConfigError(f"plan is a {type(plan).__name__}. Give a penstock.planner.Plan, or the file of one.")
    if batch is not None and not callable(batch):
        raise ConfigError(f"batch is a {type(batch).__name__}. Give a function that makes one micro-batch.")
    if batch is not None and not trains:
        raise ConfigError(
            "batch= rehearses steps of training, and prepare(model, None) trains nothing. Give plan=, the one of the "
            "model in training, or a penstock.Placement."
        )


def taken(plan: PlanOrFile) -> Plan:
    """Give a plan, or read it from its file.

    Raises:
        ConfigError: the file cannot be read, or is no plan's.
    """
    return plan if isinstance(plan, Plan) else Plan.read(plan)


def planned(
    model: nn.Module,
    plan: Plan,
    arguments: Mapping[str, Any],
    *,
    grid: Grid,
    device: torch.device,
    trains: bool,
) -> dict[str, Any]:
    """Give arguments of `prepare`, with those that a plan decides.

    Arguments:
        model: the model, before `prepare`.
        plan: what was planned.
        arguments: what was written by hand, checked by itself; a placement among them is replaced.
        grid: the ranks.
        device: the one that computes.
        trains: whether there is an optimizer.

    Returns:
        The same arguments as somebody would have written who knew the plan.

    Raises:
        ConfigError: the plan does not fit, is for another run, or contradicts what was written by hand.
    """
    _check_folders(plan)
    there = fingerprint(device) if plan.machine_fingerprint else {}
    stage, precision = arguments.get("stage", 3), arguments.get("precision", "bf16")
    machine = {name: there[name] for name in _OF_A_MACHINE if name in there}
    # What nothing trains has the plan of a model that is trained beside it, and is that one with other parts frozen.
    checked = plan if trains else replace(plan, model_fingerprint="")
    checked.check_for(model, machine, grid.world_size, stage, precision, sizes=grid.sizes)
    said = {name: arguments[name] for name in ("options", "overlap") if name in arguments}
    decided = plan.prepare_arguments(**said)
    if trains and plan.recompute and not recomputes(model):
        raise ConfigError(f"The plan has the model compute activations again in backward. {_how_to_recompute(model)}")
    return {**arguments, **decided}


def _check_folders(plan: Plan) -> None:
    """Refuse folders that stand for those of a machine that was planned for without any by name."""
    named = plan.placement.nvme_folders()
    if named and named == [Path(name) for name in placeholders(len(named))] and not any(map(Path.exists, named)):
        raise ConfigError(
            f"The plan was made without names of folders, and {', '.join(map(str, named))} stand for {len(named)} of "
            "them. Plan again with penstock plan --folders, or name them as placement.nvme_path in the plan."
        )


def _how_to_recompute(model: nn.Module) -> str:
    """Say how a model is told to compute activations again."""
    if can_be_told(model):
        older = hasattr(model, "gradient_checkpointing_enable")  # which transformers has had for longer
        return f"Call model.{'gradient' if older else 'activation'}_checkpointing_enable() before prepare()."
    return (
        f"Nothing tells whether this {type(model).__name__} does: wrap its blocks with torch.utils.checkpoint, and say "
        "so by its attribute gradient_checkpointing = True; or plan again with penstock plan."
    )
