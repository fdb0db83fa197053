"""The arithmetic of the optimizers: pure, without movement. docs/rules.md has the equations."""

from penstock._native import Pool
from penstock.rules.formats import StateFormat, deposit, join_master, split_master, squared_norm
from penstock.rules.rule import Rule, StateSpec, StepScalars, UpdateSlice
from penstock.rules.select import rule_for

__all__ = [
    "Pool",
    "Rule",
    "StateFormat",
    "StateSpec",
    "StepScalars",
    "UpdateSlice",
    "deposit",
    "join_master",
    "rule_for",
    "split_master",
    "squared_norm",
]
