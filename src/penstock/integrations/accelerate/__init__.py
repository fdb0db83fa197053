"""One line in loops of accelerate: `PenstockAccelerator(penstock={...})` in place of `Accelerator()`.

settings     what accelerate and Penstock are both told, and what they cannot both be
pairs        models with their optimizers: found, prepared, given back
accelerator  the class: accelerate's public methods, over the pairs
"""

import accelerate

from penstock.integrations import _private
from penstock.integrations._private.accelerate import TESTED
from penstock.integrations.accelerate.accelerator import PenstockAccelerator
from penstock.integrations.accelerate.pairs import PreparedOptimizer

__all__ = ["PenstockAccelerator", "PreparedOptimizer"]

_private.warn_untested("accelerate", accelerate.__version__, TESTED)
