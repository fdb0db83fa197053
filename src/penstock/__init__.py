"""Penstock trains PyTorch models that are larger than the memory of the GPU, exactly.

Public names are imported when they are first used: `penstock --help` does not wait for torch, and the command line can
set up the process before torch reads its environment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import Options, Placement
    from penstock.engine.step.step import StepResult
    from penstock.errors import (
        CheckpointError,
        ConfigError,
        EngineError,
        MemoryBudgetError,
        NvmeError,
        PenstockError,
    )
    from penstock.ext.ema import EMA
    from penstock.ext.export import export
    from penstock.optimizer import Optimizer
    from penstock.preparing import prepare
    from penstock.rules.generic import elementwise
    from penstock.tiers.tier import Location, LocationReport

__version__ = "0.2.0"

__all__ = [
    "EMA",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "Location",
    "LocationReport",
    "MemoryBudgetError",
    "NvmeError",
    "Optimizer",
    "Options",
    "PenstockError",
    "Placement",
    "StepResult",
    "elementwise",
    "export",
    "prepare",
]

_HOMES = {
    "prepare": "penstock.preparing",
    "export": "penstock.ext.export",
    "EMA": "penstock.ext.ema",
    "Options": "penstock.config",
    "Placement": "penstock.config",
    "StepResult": "penstock.engine.step.step",
    "Optimizer": "penstock.optimizer",
    "elementwise": "penstock.rules.generic",
    "Location": "penstock.tiers.tier",
    "LocationReport": "penstock.tiers.tier",
}

#: Public modules: attributes of the package without an import of their own.
_MODULES = ("footprint", "integrations", "losses", "optim", "parallel", "planner", "ring")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"penstock.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "penstock.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
