"""From a plan to arguments of `prepare`: checks that it is for this run, and the values that it decides.

They pass the same checks as arguments that were written by hand.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.planner.plans import Plan, placeholders
from penstock.probe.fingerprint import fingerprint
from penstock.recompute import can_be_told, recomputes
from penstock.rules import rule_for
from penstock.runtime.topology import Grid

AUTO = "auto"
#: Properties of a machine that must be the same for a plan and a run. Those that a launcher decides (threads, cores,
#: ranks of a host), or an update of the system, are left out: `penstock plan` is one process, on another day.
_OF_A_MACHINE = ("cpu", "memory_bytes", "device", "device_name", "device_memory_bytes")

PlanOrFile = Plan | str | os.PathLike[str]


def check_elementwise(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at whole parameters: machine specs have rates of updates by bytes alone.

    Raises:
        ConfigError: it names the optimizer.
    """
    made = optimizer
    if isinstance(made, type):
        try:
            made = made([nn.Parameter(torch.zeros(8, 8))])  # type: ignore[call-arg]
        except Exception:  # it needs other arguments, which the simulation reports
            return
    if rule_for(made).whole:
        raise ConfigError(
            f"{type(made).__name__} looks at whole parameters, and a plan times updates by their bytes, which does not "
            "hold for products of matrices. Say where state should be with a penstock.Placement; penstock.footprint "
            "tells whether it fits."
        )


def asks_for_plan(placement: object) -> bool:
    """Return True if a placement is `"auto"`."""
    return isinstance(placement, str) and placement == AUTO


def check_asked(placement: object, plan: object, batch: object, *, trains: bool) -> None:
    """Refuse a plan or a batch that does not go with the placement.

    Arguments:
        placement: as for `prepare`; `"auto"` needs one of the other two, and they need it.
        plan: a plan, or its file.
        batch: a function that makes one micro-batch.
        trains: whether there is an optimizer.

    Raises:
        ConfigError: the message says which of them to give.
    """
    given = [f"{name}=" for name, value in (("plan", plan), ("batch", batch)) if value is not None]
    if not asks_for_plan(placement):
        if given:
            raise ConfigError(f"{given[0]} goes with placement='auto' alone. Give that, or leave {given[0]} out.")
        return
    if not given:
        raise ConfigError(
            "placement='auto' needs to know what it is for: give plan=, the file that penstock plan wrote, or batch=, "
            "a function that makes one micro-batch, to simulate it."
        )
    if len(given) > 1:
        raise ConfigError("plan= and batch= both say what placement='auto' is for. Give one of them.")
    if plan is not None and not isinstance(plan, Plan | str | os.PathLike):
        raise ConfigError(f"plan is a {type(plan).__name__}. Give a penstock.planner.Plan, or the file of one.")
    if batch is not None and not callable(batch):
        raise ConfigError(f"batch is a {type(batch).__name__}. Give a function that makes one micro-batch.")
    if batch is not None and not trains:
        raise ConfigError(
            "batch= simulates steps of training, and prepare(model, None) trains nothing. Give plan=, the one of the "
            "model in training, or a penstock.Placement."
        )


def taken(plan: PlanOrFile) -> Plan:
    """Return a plan, or read it from its file.

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
    """Return arguments of `prepare`, with those that a plan decides.

    Arguments:
        model: the model, before `prepare`.
        plan: the plan.
        arguments: arguments that were written by hand, checked by themselves; a placement among them is replaced.
        grid: the ranks.
        device: the device that computes.
        trains: whether there is an optimizer.

    Returns:
        The arguments that have the same effect as the plan.

    Raises:
        ConfigError: the plan does not fit, is for another run, or contradicts what was written by hand.
    """
    _check_folders(plan)
    there = fingerprint(device) if plan.machine_fingerprint else {}
    stage, precision = arguments.get("stage", 3), arguments.get("precision", "bf16")
    machine = {name: there[name] for name in _OF_A_MACHINE if name in there}
    # A model for inference has the plan of the one that is trained: the same model with other parameters frozen.
    checked = plan if trains else replace(plan, model_fingerprint="")
    checked.check_for(model, machine, grid.world_size, stage, precision, sizes=grid.sizes)
    said = {name: arguments[name] for name in ("options", "overlap") if name in arguments}
    decided = plan.prepare_arguments(**said)
    if trains and plan.recompute and not recomputes(model):
        raise ConfigError(f"The plan has the model compute activations again in backward. {_how_to_recompute(model)}")
    return {**arguments, **decided}


def _check_folders(plan: Plan) -> None:
    """Refuse placeholders of folders, of a plan for a machine whose folders had no names."""
    named = plan.placement.nvme_folders()
    if named and named == [Path(name) for name in placeholders(len(named))] and not any(map(Path.exists, named)):
        raise ConfigError(
            f"The plan was made without names of folders, and {', '.join(map(str, named))} stand for {len(named)} of "
            "them. Plan again with penstock plan --folders, or name them as placement.nvme_path in the plan."
        )


def _how_to_recompute(model: nn.Module) -> str:
    """Make the advice of how to turn on activation checkpointing for a model."""
    if can_be_told(model):
        older = hasattr(model, "gradient_checkpointing_enable")  # which transformers has had for longer
        return f"Call model.{'gradient' if older else 'activation'}_checkpointing_enable() before prepare()."
    return (
        f"Nothing tells whether this {type(model).__name__} does: wrap its blocks with torch.utils.checkpoint, and say "
        "so by its attribute gradient_checkpointing = True; or plan again with penstock plan."
    )
