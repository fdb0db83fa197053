"""The arithmetic of the optimizers: pure, without movement. docs/rules.md has the equations."""

from penstock._native import Pool
from penstock.rules.formats import StateFormat, deposit, join_master, split_master, squared_norm
from penstock.rules.rule import Hyper, Rule, Segment, StateSpec
from penstock.rules.select import rule_for

__all__ = [
    "Hyper",
    "Pool",
    "Rule",
    "Segment",
    "StateFormat",
    "StateSpec",
    "deposit",
    "join_master",
    "rule_for",
    "split_master",
    "squared_norm",
]
