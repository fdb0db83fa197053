"""State in parts: something failed between the first write and the last. Whoever needs such a unit gets the error."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from penstock.engine.units.unit import Unit
from penstock.errors import EngineError, PenstockError
from penstock.machine.streams import FailedEvent


class TornEvent(FailedEvent):
    """The error was raised when it happened, and is raised again wherever the unit is needed."""


class BrokenEvent(TornEvent):
    """Homes are half exchanged: a load would write to some of the old ones, and has to be refused as well."""


def tear(units: Iterable[Unit], error: BaseException, event: type[TornEvent] = TornEvent) -> None:
    """Note that the state of these units is in parts: whoever waits for one of their homes gets the error."""
    for unit in units:
        for home in unit.updated_homes:
            # site failure.noted
            home.note_write(event(error))  # the last write: gathers, updates, saves and looks all wait for it


def is_torn(units: Iterable[Unit]) -> bool:
    """Whether the state of any of them is in parts."""
    return any(isinstance(unit.params.memory.written, TornEvent) for unit in units)


def check_loadable(units: Iterable[Unit]) -> None:
    """Raise the error of state that no load makes whole."""
    for unit in units:
        written = unit.params.memory.written
        if isinstance(written, BrokenEvent):
            written.check()


@contextmanager
def broken_on_failure(units: Sequence[Unit], verb: str) -> Iterator[None]:
    """Mark the engine of these units as of no more use where something fails inside, while homes are exchanged."""
    try:
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        tear(
            units,
            EngineError(
                f"{verb} failed while state changed its place. Close the optimizer with keep_params=False, prepare the "
                f"model again, and load a checkpoint. ({reason})"
            ),
            BrokenEvent,
        )
        raise


@contextmanager
def torn_on_failure(units: Sequence[Unit], verb: str) -> Iterator[None]:
    """Mark the state of these units as in parts where something fails inside, in the middle of writing to them.

    Raises:
        EngineError: says that it is in parts, and of which units.
    """
    try:
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        torn = EngineError(
            f"{verb} failed in the middle, so the state of {_names(units)} is in parts. Load a checkpoint, or close "
            f"the optimizer with keep_params=False. ({reason})"
        )
        torn.__cause__ = error
        tear(units, torn)
        if isinstance(error, PenstockError) or not isinstance(error, Exception):
            raise
        raise torn from error


def _names(units: Sequence[Unit]) -> str:
    return f"unit '{units[0].name}'" if len(units) == 1 else f"{len(units)} units"
