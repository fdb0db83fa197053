"""One engine: its components, its sizes, what it refuses, and how it ends."""

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.config import GATHERED, KEPT, LEAVING, Tier
from penstock.engine.forward_backward.casts import AttributePatches
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.forward_backward.hooks import Hooks
from penstock.engine.forward_backward.saved_tensors import ActivationOffload
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.policy import Gradients, StepPolicy
from penstock.engine.state.access import StateAccess, state_has_failed
from penstock.engine.state.gathered import GatheredBlocks
from penstock.engine.state.loading import StateLoader
from penstock.engine.state.moving import StateOffloader
from penstock.engine.state.saving import StateSaver
from penstock.engine.step.context import EngineContext, SkippedSteps
from penstock.engine.step.owner_thread import in_backward
from penstock.engine.step.step import Stepper
from penstock.engine.step.update import Updater
from penstock.engine.unit.parameter import UnitParameter
from penstock.errors import CheckpointError, EngineError, NvmeError, one_line
from penstock.runtime.control_group import ControlGroup, RankChecks
from penstock.runtime.modes import engine_entry
from penstock.runtime.streams import FailedEvent
from penstock.tiers.tier import Location, LocationReport

# ----------------------------------------------------------------------------------------------------------------------
# The components of one engine, and how they end.
# ----------------------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("penstock")

_LEFT_EMPTY = (
    "it was called while an exception is under way, or something ends, and waits for no other rank. To keep them, call "
    "it after the `except` block, on every rank."
)


class PendingChange(Protocol):
    """A change of units that is planned: its memory was taken, and nothing else has happened."""

    def cancel(self) -> None:
        """Free the memory."""

    def make(self) -> None:
        """Change the units and the engine. Collective."""


@dataclass
class Engine:
    """Everything that `prepare` built. Components know each other through their constructors alone.

    The constructor's arguments do not depend on the units, and last as long as the engine. `connect` makes the other
    components and sets them: again when units change.

    Attributes:
        context: shared by all components.
        gatherer, reducer, hooks: run forward and backward.
        activations: offloads saved tensors; `None` leaves them on the device.
        updater, stepper, skips: run the updates of a step, and count skipped steps.
        save_group: the ranks as they agree on saves, and on nothing else: a thread of its own communicates there.
        access, blocks, offloader, saver, loader: read, write, move, save and load training state.
        gradients: changes gradients between backward and step.
        policy: scales the loss, and decides on a step.
        restore_model: undoes changes of the model for the present units, beside parameters and hooks.
        patches: changes of the model and of the given optimizer until `close`.
        adopt: plans the change of units where the param groups of the given optimizer have more parameters, reserves
            its memory, and adds the facts that ranks compare before it.
        averages: the averages of the parameters (`penstock.ext.ema.Averages`); `None` until the first one is made.
        closed: True once the model was left, while everything is being freed.
        elsewhere: the error of every use in a child of the process that has the engine; `None` in that process.
        begun_in: the id of the exception that the caller of `prepare` was handling.
    """

    context: EngineContext
    gatherer: Gatherer
    reducer: Reducer
    activations: ActivationOffload | None
    skips: SkippedSteps
    save_group: ControlGroup
    patches: AttributePatches = field(default_factory=AttributePatches)
    hooks: Hooks = field(init=False)
    updater: Updater = field(init=False)
    stepper: Stepper = field(init=False)
    access: StateAccess = field(init=False)
    blocks: GatheredBlocks = field(init=False)
    offloader: StateOffloader = field(init=False)
    saver: StateSaver = field(init=False)
    loader: StateLoader = field(init=False)
    gradients: Gradients = field(init=False)
    policy: StepPolicy = field(init=False)
    restore_model: Callable[[], None] = field(init=False)
    adopt: Callable[["Engine", torch.optim.Optimizer, RankChecks], PendingChange] = field(init=False)
    averages: Any = None
    closed: bool = False
    elsewhere: EngineError | None = None
    begun_in: int = field(default_factory=lambda: id(sys.exception()))
    _ending: deque[Callable[[], object]] = field(default_factory=deque)

    def turn(self, method: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that keeps the model from other threads during a method of the optimizer."""
        return self.hooks.owner_thread.turn(method)

    def check_process(self, verb: str) -> None:
        """Refuse a method in a child of the process that prepared the model."""
        if self.elsewhere is not None:
            raise EngineError(f"{verb}() was called in a child process. {self.elsewhere}")

    def at_rest(self, unit_name: str, kind: str) -> bool:
        """Return True if no transfer or update of a cell is under way."""
        unit = next((unit for unit in self.context.units if unit.name == unit_name), None)
        if unit is None:  # staging
            return all(
                storage.memory.written.done() for unit in self.context.units for storage in unit.updated_storages
            )
        storages = [
            storage
            for storage in unit.storages.values()
            if any(c.kind == kind for plan in storage.plans for c in plan.cells)
        ]
        return all(storage.written.done() for storage in storages)

    def close(self, *, keep_params: bool) -> None:
        """Finish work, restore the parameters, and free everything.

        After an update that failed, or if a file cannot be read, everything is freed, the parameters are left empty,
        and the error is raised. Without parameters to keep it is raised only if it was not raised before: `close`
        stands in a `finally`. If whole parameters do not fit into memory, that error is raised and nothing has changed.

        While an exception is propagating, other ranks may never call `close`. They are told of it and not waited for:
        parameters that ranks share are left empty.
        """
        if self.closed:  # an interrupt has ended an earlier call
            self._end()
            return
        raised = sys.exception()  # read first: inside an `except` below it is another one
        under_way = raised is not None and id(raised) != self.begun_in  # the whole loop may run in an `except` block
        if self.context.ranks.control_group.size > 1 and (under_way or _is_ending()):
            why = f"{type(raised).__name__}: {raised}" if under_way else "the end of the program or of an object"
            self.context.ranks.control_group.tell(f"was ended by {why}")
            if keep_params and self.context.ranks.shards > 1:
                keep_params = False
                _logger.warning(f"close() leaves the model without parameters: {_LEFT_EMPTY} ({one_line(why, 200)})")
        # A save reads storages from a thread of its own: it ends before their memory is freed.
        unsaved: CheckpointError | None = None
        try:
            self.saver.close()
        except CheckpointError as error:
            unsaved = error  # the state in memory is whole
        try:
            # Values are read by the host below, so every update has to be over (ordering rule 5).
            self.access.finish()
            if keep_params and self.stepper.is_open:
                self.stepper.abandon()
                self.access.finish()
            # A rank whose update failed does not gather the parameters: the others stop here.
            if keep_params and self.context.ranks.shards > 1:
                with self.context.ranks.control_group.together("close()"):
                    pass
        except Exception as error:
            # Nothing collective from here on: the other ranks are past this meeting, or see this rank's control group
            # closed.
            heard = state_has_failed(self.context.units) or _is_among(error, raised)
            self.abandon()
            if keep_params or not heard:
                raise
            return
        try:
            values = {
                parameter: parameter.as_before(self.access.own_param(parameter.tensor))
                for parameter in self._parameters()
                if keep_params
            }
        except (NvmeError, EngineError):  # on this rank, or on another
            self.abandon()
            raise
        self._give_back(values)
        if unsaved is not None:
            raise unsaved

    def abandon(self) -> None:
        """Free everything and leave the parameters empty, after an error that is raised anyway."""
        with contextlib.suppress(NvmeError):  # of a transfer that was not waited for
            self._give_back({})

    def _parameters(self) -> Iterator[UnitParameter]:
        return (parameter for unit in self.context.units for parameter in unit.parameters)

    def _give_back(self, values: Mapping[UnitParameter, Tensor]) -> None:
        """Leave the model with these values of its parameters, or none, and without hooks; free all memory.

        1. Remove the engine from the model: no new work begins.
        2. End all work under way: the memory of the engine is unused from here on.
        3. Free the memory.
        """
        self._ending = deque(
            [
                # 1.
                self.hooks.remove,
                self.restore_model,
                self.patches.remove,
                *(partial(parameter.leave, values.get(parameter)) for parameter in self._parameters()),
                # 2. Before memory is freed: gathers and writes to files still use it (ordering rule 1).
                self.context.streams.close,
                self.gatherer.release_memory,
                self.reducer.close,
                self.hooks.close,
                # 3. After the streams, whose threads call the pool, and whose collectives end before their group.
                self.context.store.close,
                # Torch refuses the backward of graphs that are left: their saved tensors are freed.
                *(unit.count_writes for unit in self.context.units),
                *(unit.drop for unit in self.context.units),
                self.context.pool.close,
                self.context.ranks.close,
            ]
        )
        self.closed = True  # a failure from here on is not tried again on half an engine
        self._end()

    def _end(self) -> None:
        """Run the remaining steps of `close`. The next `close` repeats a step that an interrupt has ended."""
        failure: Exception | None = None
        while self._ending:
            try:
                self._ending[0]()
            except Exception as error:  # run the others all the same
                failure = failure or error
            self._ending.popleft()
        if failure is not None:
            raise failure

    @property
    def ended(self) -> bool:
        """True if everything was freed."""
        return self.closed and not self._ending


def _is_ending() -> bool:
    """Return True in the exit of the interpreter, or in a `__del__`, which other ranks may not run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame.f_code.co_name == "__del__" or not threading.main_thread().is_alive()


def _is_among(error: BaseException, raised: BaseException | None) -> bool:
    """Return True if an error is propagating already, or led to one that is; a repeated read raises an equal one."""
    while raised is not None:
        if raised is error or (type(raised) is type(error) and str(raised) == str(error)):
            return True
        raised = raised.__cause__ or raised.__context__
    return False


# ----------------------------------------------------------------------------------------------------------------------
# An engine in the child of a fork: it has no threads there, and the memory of its storages reads as zeros.
# ----------------------------------------------------------------------------------------------------------------------


@engine_entry
def leave_to_parent(engine: Engine) -> None:
    """Make the parameters placeholders in a child of a fork, and every use of the engine an error.

    Nothing waits for work that was under way: it goes on in the parent, and no thread of this process ends it.
    """
    if engine.closed:
        return
    error = EngineError(
        f"The model was prepared in another process ({os.getppid()}), which forked this one: its parameters are there. "
        "Here it can be neither run nor trained. Hand values over before the fork (full_param, state_dict), or save() "
        "there and load() here."
    )
    engine.elsewhere = error
    # Storages read as zeros here, a wrong result without an error: placeholders read as NaN.
    for unit in engine.context.units:
        unit.unset()
        unit.event = FailedEvent(error)
        for storage in unit.storages.values():
            # Replaces events of the parent's threads, for which a wait would never end.
            storage.note_write(FailedEvent(error))


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of an engine on this rank: a report of every cell, and sums that are cheap enough for every step.
# ----------------------------------------------------------------------------------------------------------------------


def locate(engine: Engine) -> LocationReport:
    """List where every byte of the training state is, as `penstock.Optimizer.locations` says."""
    rows = []
    for segment, allocation, name in engine.context.store.table():
        pinned = allocation is not None and allocation.pinned
        for cell in segment.cells:
            kind = name or cell.kind
            flies = kind != KEPT and (kind == LEAVING or not engine.at_rest(cell.unit, kind))
            rows.append(Location(cell.unit, kind, cell.tier.value, cell.dtype, cell.numel, cell.nbytes, pinned, flies))
    for unit in engine.context.units:
        if unit.allocated:
            flies, numel = not unit.event.done(), unit.layout.numel
            rows.append(Location(unit.name, GATHERED, "device", unit.spec.dtype, numel, unit.nbytes, False, flies))
    return LocationReport(rows)


def bytes_by_tier(engine: Engine) -> dict[str, int]:
    """Return the sums of the bytes that `locate` lists, by tier, the fastest first."""
    found = {tier.value: 0 for tier in Tier}
    found[Tier.DEVICE.value] = sum(unit.nbytes for unit in engine.context.units if unit.allocated)
    for segment, _, _ in engine.context.store.table():
        found[segment.tier.value] += segment.nbytes
    return {tier: nbytes for tier, nbytes in found.items() if nbytes}


# ----------------------------------------------------------------------------------------------------------------------
# Refusals of a step, and of other methods that need whole gradients or whole state, before anything has changed.
# ----------------------------------------------------------------------------------------------------------------------


_TRAINING = ("backward", "step", "clip_grad_norm_", "no_sync", "save", "close", "EMA", "EMA.update", "EMA.applied")
_MOVING = ("offload_states", "reload_states")


def check_step(engine: Engine) -> None:
    """Refuse a step that would lose gradients, or values that the user wrote.

    Raises:
        EngineError: names them.
    """
    engine.gradients.check_whole("step")
    if any(unit.holding.blocks for unit in engine.context.units):
        raise EngineError("step() was called inside gathered(). Leave the block first: step changes what it shows.")
    for unit in engine.context.units:
        if unit.trained is None:
            for parameter in unit.parameters:
                parameter.check_frozen()
    engine.hooks.forward.membership.check()
    for unit in engine.context.units:
        unit.check_written()


def check_not_averaged(verb: str, engine: Engine, *, writes: bool) -> None:
    """Refuse a method that would train, save or lose an average in the place of the parameters.

    Arguments:
        verb: the method that was called.
        engine: may have an average in that place now.
        writes: the method writes parameters or state, or moves them.
    """
    if engine.hooks.backward.refusal is not None and (verb in _TRAINING or (writes and verb not in _MOVING)):
        raise EngineError(
            f"{verb}() was called inside EMA.applied(), where the parameters are the average's. Leave the block first."
        )


def check_at_rest(verb: str, engine: Engine) -> None:
    """Refuse a method inside a forward, a backward or a `gathered` block: the state is in use there."""
    check_outside(verb, engine)
    if any(unit.holding.blocks for unit in engine.context.units):
        raise EngineError(f"{verb}() was called inside gathered(). Leave the block first.")


def check_outside(verb: str, engine: Engine) -> None:
    """Refuse a method inside a forward or a backward: it would write, move or gather what the pass reads."""
    if in_backward() or engine.hooks.in_forward:
        raise EngineError(f"{verb}() was called inside a forward or a backward. Call it between steps.")


def scalars_of(param_groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    """Yield the options of param groups that updates read, for ranks to compare: each updates a shard with its own."""
    for number, group in enumerate(param_groups):
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value):
                value = list(value)
            if value is None or isinstance(value, bool | int | float | str) or type(value) is list:
                yield f"param_groups[{number}]['{name}']", value
