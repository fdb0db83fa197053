"""The arithmetic of the optimizers: pure, without movement. docs/rules.md has the equations."""

from penstock._native import Pool
from penstock.rules.deposit import deposit, squared_norm
from penstock.rules.master import join_master, split_master
from penstock.rules.rule import Hyper, Rule, Segment, StateSpec
from penstock.rules.select import rule_for
from penstock.rules.storage import StateFormat

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
