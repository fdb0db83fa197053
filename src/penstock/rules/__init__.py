"""The arithmetic of the optimizers: pure and element-wise, without movement. docs/rules.md has the equations."""

from penstock._native import Pool
from penstock.rules.deposit import deposit, squared_norm
from penstock.rules.master import join_master, split_master
from penstock.rules.rule import Hyper, Rule, Segment
from penstock.rules.select import rule_for

__all__ = [
    "Hyper",
    "Pool",
    "Rule",
    "Segment",
    "deposit",
    "join_master",
    "rule_for",
    "split_master",
    "squared_norm",
]
