"""Optimizers that torch does not have, as stock classes for `prepare` or to use alone; and rules of one's own."""

from penstock.optim.lamb import Lamb
from penstock.optim.lion import Lion
from penstock.optim.matrix import MatrixRule, register
from penstock.optim.muon_adamw import MuonAdamW

__all__ = ["Lamb", "Lion", "MatrixRule", "MuonAdamW", "register"]
