"""Lightning over Penstock: `Trainer(strategy="penstock")`, or `Trainer(strategy=PenstockStrategy(placement=...))`.

strategy     the strategy of a Trainer, for a module that one optimizer trains
precision    the precision plugin: Lightning's names of precisions, and clipping
checkpoints  checkpoint folders, and files of whole weights
record       a callback that records steps, for penstock report
"""

from typing import Any

import lightning
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from penstock.errors import ConfigError
from penstock.integrations import _private
from penstock.integrations._private.lightning import TESTED
from penstock.integrations.lightning.checkpoints import consolidate
from penstock.integrations.lightning.precision import PenstockPrecision
from penstock.integrations.lightning.record import RecordCallback
from penstock.integrations.lightning.strategy import PenstockStrategy

__all__ = ["PenstockPrecision", "PenstockStrategy", "RecordCallback", "consolidate"]

_ABOUT = "Trains models larger than the memory of the device, exactly: sharded, each byte on the cheapest tier."
StrategyRegistry.register("penstock", PenstockStrategy, description=_ABOUT, override=True)


def _refuse_fabric(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "Penstock has no strategy for Fabric. Let Fabric start processes and divide loaders, and prepare the model by "
        "penstock.prepare(): the recipe 'Fabric' of docs/lightning.md."
    )


STRATEGY_REGISTRY.register("penstock", _refuse_fabric, description=_ABOUT, override=True)
_private.warn_untested("Lightning", lightning.__version__, TESTED)


def __getattr__(name: str) -> Any:
    if name in ("PenstockFabricStrategy", "PenstockFabricPrecision"):  # of 0.2
        _refuse_fabric()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
