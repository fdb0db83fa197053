"""Penstock trains PyTorch models that are larger than the memory of the GPU, exactly."""

from penstock.config import Options, Placement
from penstock.engine.step import StepResult
from penstock.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    MemoryBudgetError,
    NvmeError,
    PenstockError,
)
from penstock.optimizer import Optimizer
from penstock.prepare import prepare
from penstock.tiers.report import Location, LocationReport

__version__ = "0.1.0"

__all__ = [
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
    "prepare",
]
