"""Will it fit, how long is a step, what binds, and where should state be: answered before anything is loaded.

    machine    what a machine does in a second (`Machine`): probed, or read from a file
    question   a model, an optimizer and a batch on a machine, checked
    trial      a placement that was simulated by the engine itself, and timed
    plan       the best placement, as a value and a file (`Plan`)

Example:
    >>> import torch
    >>> from penstock.planner import plan
    >>> found = plan(
    ...     lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))),
    ...     torch.optim.AdamW,
    ...     lambda: torch.zeros(8, 256),
    ...     machine="cpu-laptop",
    ... )
    >>> found.fits
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.planner.machine import Machine
    from penstock.planner.make_plan import plan
    from penstock.planner.plans import Plan, block, compare, explain, model_fingerprint
    from penstock.planner.rates import parse_rate
    from penstock.planner.simulation.fake_collectives import simulated_mesh
    from penstock.planner.this_machine import machine_for

__all__ = [
    "Machine",
    "Plan",
    "block",
    "compare",
    "explain",
    "machine_for",
    "model_fingerprint",
    "parse_rate",
    "plan",
    "simulated_mesh",
]

#: Modules are imported by the first use of a name: a plan's file is read without the simulation.
_MODULES = {
    "machine": ("Machine",),
    "make_plan": ("plan",),
    "plans": ("Plan", "block", "compare", "explain", "model_fingerprint"),
    "rates": ("parse_rate",),
    "simulation.fake_collectives": ("simulated_mesh",),
    "this_machine": ("machine_for",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"penstock.planner.{module}"), name)
    raise AttributeError(f"module 'penstock.planner' has no attribute {name!r}")
