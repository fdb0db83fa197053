"""An engine in the child of a fork: it has none of the threads, and the memory of its homes reads as zeros there."""

import os

from penstock.engine.engine import Engine
from penstock.errors import EngineError
from penstock.machine.border import crossing
from penstock.machine.streams import FailedEvent


@crossing
def leave_to_parent(engine: Engine) -> None:
    """Make the parameters placeholders in a child of a fork, and have every use of the engine raise an error.

    Nothing waits for work that was under way: it goes on in the parent, and no thread of this process would end it.
    """
    if engine.closed:
        return
    error = EngineError(
        f"The model was prepared in another process ({os.getppid()}), which forked this one: its parameters are there. "
        "Here it can be neither run nor trained. Hand values over before the fork (full_param, state_dict), or save() "
        "there and load() here."
    )
    engine.elsewhere = error
    # The memory of homes reads as zeros here, which would be computed with in silence. NaN shows itself.
    for unit in engine.rig.units:
        unit.hide()
        unit.event = FailedEvent(error)
        for home in unit.homes.values():
            # In place of the events of before: those are of the parent's threads, and would be waited for for ever.
            home.note_write(FailedEvent(error))
