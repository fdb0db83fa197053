"""The parts of an engine, in the groups that its folders are: passes, updates, state."""

from dataclasses import dataclass

from penstock.engine.passes.gather import Gatherer
from penstock.engine.passes.hooks import Hooks
from penstock.engine.passes.reduce import Reducer
from penstock.engine.state.access import Access
from penstock.engine.state.averages import Averages
from penstock.engine.state.gathered import Blocks
from penstock.engine.state.loading import Loader
from penstock.engine.state.moving import Mover
from penstock.engine.state.saving import Saver
from penstock.engine.updates.skips import Skips
from penstock.engine.updates.step import Stepper
from penstock.engine.updates.update import Updater


@dataclass(frozen=True)
class Passes:
    """What happens in forward and backward."""

    gatherer: Gatherer
    reducer: Reducer
    hooks: Hooks


@dataclass(frozen=True)
class Updates:
    """What a step decides and does."""

    updater: Updater
    stepper: Stepper
    skips: Skips


@dataclass(frozen=True)
class State:
    """What looks at the state of training, changes it, moves it, and keeps it in files."""

    access: Access
    blocks: Blocks
    mover: Mover
    saver: Saver
    loader: Loader
    averages: Averages
