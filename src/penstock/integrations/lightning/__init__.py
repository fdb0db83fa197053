"""Lightning over Penstock: `Trainer(strategy="penstock")`, or `Trainer(strategy=PenstockStrategy(placement=...))`.

strategy.py is what a Trainer takes, fabric.py what Fabric takes. precision.py maps Lightning's names of precisions and
clips; parts.py says which optimizer trains which part of a module; prepared.py holds what `penstock.prepare` returned
for them; refusals.py names what cannot be had; checkpoints.py writes and reads folders, and whole weights;
record.py records steps, for penstock report.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from penstock.integrations.lightning.checkpoints import consolidate
from penstock.integrations.lightning.fabric import PenstockFabricPrecision, PenstockFabricStrategy
from penstock.integrations.lightning.precision import PenstockPrecision
from penstock.integrations.lightning.record import RecordCallback
from penstock.integrations.lightning.strategy import PenstockStrategy

__all__ = [
    "PenstockFabricPrecision",
    "PenstockFabricStrategy",
    "PenstockPrecision",
    "PenstockStrategy",
    "RecordCallback",
    "consolidate",
]

_ABOUT = "Trains models larger than the memory of the device, exactly: sharded, each byte on the cheapest tier."
StrategyRegistry.register("penstock", PenstockStrategy, description=_ABOUT, override=True)
STRATEGY_REGISTRY.register("penstock", PenstockFabricStrategy, description=_ABOUT, override=True)
