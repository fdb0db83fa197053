"""Reading and writing training state by parameter."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.format import SavedParameter
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.step.context import EngineContext
from penstock.engine.step.update import Updater
from penstock.engine.unit.dtensor import cut, is_divided, own_part
from penstock.engine.unit.unit import TrainingState, Unit, UnitGradient
from penstock.errors import ConfigError, EngineError, NvmeError, PenstockError
from penstock.layout import Slot, SlotPiece
from penstock.rules.formats import as_param, read_state, squared_norm, write_state
from penstock.rules.rule import Scalars, StateSpec
from penstock.runtime.streams import FailedEvent

# ----------------------------------------------------------------------------------------------------------------------
# Failed state: a write stopped between its first and its last byte. Every later use of such a unit raises the error.
# ----------------------------------------------------------------------------------------------------------------------


class FailedStateEvent(FailedEvent):
    """The last write of a unit whose state has failed. Its error is raised again at every use of the unit."""


class HalfMovedEvent(FailedStateEvent):
    """The storage of a unit is half exchanged: a load would write to some of the old one, and is refused as well."""


def mark_failed(units: Iterable[Unit], error: BaseException, event: type[FailedStateEvent] = FailedStateEvent) -> None:
    """Mark the state of units as failed: every wait for one of their storages raises the error."""
    for unit in units:
        for storage in unit.updated_storages:
            # site failure.noted
            storage.note_write(event(error))  # the last write: every use of the storage waits for it (ordering rule 7)


def state_has_failed(units: Iterable[Unit]) -> bool:
    """Return True if the state of one of the units has failed."""
    return any(isinstance(unit.params.memory.written, FailedStateEvent) for unit in units)


def check_loadable(units: Iterable[Unit]) -> None:
    """Raise the error of state that no load can replace."""
    for unit in units:
        written = unit.params.memory.written
        if isinstance(written, HalfMovedEvent):
            written.check()


@contextmanager
def failing_as_a_whole(units: Sequence[Unit], verb: str, *, moves: bool = False) -> Iterator[None]:
    """Mark the state of these units as failed where something fails inside, in the middle of writing to them.

    Arguments:
        units: what is written.
        verb: what is done, for the message.
        moves: True if storages are exchanged inside: no load replaces such state, and the error is raised as it is.

    Raises:
        EngineError: says that the state has failed, and of which units.
    """
    try:
        yield
    except BaseException as error:
        if moves:
            text = (
                f"{verb} failed while state changed its place. Close the optimizer with keep_params=False, prepare the "
                "model again, and load a checkpoint."
            )
        else:
            what = f"unit '{units[0].name}'" if len(units) == 1 else f"{len(units)} units"
            text = (
                f"{verb} failed in the middle, so the state of {what} is in parts. Load a checkpoint, or close the "
                "optimizer with keep_params=False."
            )
        failed = EngineError(f"{text} ({str(error) or type(error).__name__})")
        failed.__cause__ = error
        mark_failed(units, failed, HalfMovedEvent if moves else FailedStateEvent)
        if moves or isinstance(error, PenstockError) or not isinstance(error, Exception):
            raise
        raise failed from error


# ----------------------------------------------------------------------------------------------------------------------
# Values of parameters, gradients and states as users give them.
# ----------------------------------------------------------------------------------------------------------------------


def as_state(value: Any) -> Tensor:
    """Return a value of a `state_dict`, which may be a number, as a tensor."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")


def greater(one: float, other: float) -> float:
    """Return the greater of two numbers, or NaN if one of them is NaN, which `max` would drop."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def check_value(name: str, slot: Slot, value: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a value that cannot be written. `shape` is that of a state whose shape is not its slot's."""
    if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex():
        raise ConfigError(f"The value for '{name}' is sparse, quantised, complex or meta. Give a dense, real tensor.")
    if shape not in (None, slot.shape):
        if tuple(value.shape) != shape:
            raise ConfigError(f"The value for '{name}' has shape {tuple(value.shape)}; this state of it has {shape}.")
        return
    whole = slot.shape if slot.region is None else slot.region.shape
    if tuple(value.shape) != whole:
        raise ConfigError(f"The value for '{name}' has shape {tuple(value.shape)}; the parameter has {whole}.")


#: Values of a range of this rank's shard, piece by piece: first element, one past the last, values.
Pieces = Iterator[tuple[int, int, Tensor]]


def part_of_this_rank(unit: Unit, index: int, value: Tensor) -> tuple[int, int, Tensor] | None:
    """Find the range of this rank's shard that holds a part of the slot, and that part of `value`.

    In fp32 for a trained unit, in the dtype that it came in for a frozen one.
    """
    slot = unit.layout.slots[index]
    check_value(unit.spec.names[index], slot, value)
    overlap = unit.layout.overlap(slot, unit.rank)
    if overlap is None:
        return None
    start, stop = overlap
    first = unit.own_range[0]
    value = value.detach()
    if is_divided(value):
        value = own_part(value, unit.parameters[index].tensor)  # collective where it is divided otherwise
    elif slot.region is not None:
        value = cut(value, slot.shape, slot.region)
    values = value.reshape(-1)[start - slot.start : stop - slot.start]
    return start - first, stop - first, values.float() if unit.trained else values


def _shares(unit: Unit, slot: Slot) -> list[tuple[int, int, int]]:
    """List which ranks have which elements of a slot: rank, first element, one past the last."""
    found = [(rank, unit.layout.overlap(slot, rank)) for rank in range(unit.layout.shards)]
    return [(rank, own[0] - slot.start, own[1] - slot.start) for rank, own in found if own is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Training state is read and written by parameter, on any tier.
#
# Every call is collective, in one order on all ranks. Values are fp32 on the cpu, in the parameter's shape.
# ----------------------------------------------------------------------------------------------------------------------


class StateAccess:
    """Read and write the state of single parameters.

    Arguments:
        gatherer: is told of parameters that were written.
        reducer: measures gradients that are set.
        updater: counts the updates of each parameter.
    """

    def __init__(
        self,
        context: EngineContext,
        gatherer: Gatherer,
        reducer: Reducer,
        updater: Updater,
    ) -> None:
        self._context = context
        self._gatherer = gatherer
        self._reducer = reducer
        self._scalar_names = context.rule.scalar_names
        self._steps = updater.steps
        self._scalars = updater.scalars
        self._device = context.streams.device
        self._places = {p: (unit, index) for unit in context.units for index, p in enumerate(unit.spec.parameters)}
        self._given_state: set[nn.Parameter] = set()  # by `set_state`, before the first update

    def take_over_counts(self, other: "StateAccess") -> None:
        """Take over step counts, scalars, and the set of parameters that have state."""
        self._steps.update(other._steps)
        self._scalars.update(other._scalars)
        self._given_state |= other._given_state

    def finish(self) -> None:
        """Wait on the host until everything that was written has reached its storage."""
        for unit in self._context.units:
            for storage in unit.storages.values():
                storage.written.synchronize()  # site access.written

    def param(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter at master precision, in fp32."""
        return self._assembled(*self._place(parameter), self.own_param(parameter)).float()

    def own_param(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter at master precision, or in its own dtype if it is frozen.

        Of one that ranks divide, this rank's elements.
        """
        self.finish()  # a read follows the last write, and an update may be under way (ordering rule 3)
        unit, index = self._place(parameter)
        dtype = torch.float32 if unit.trained else unit.spec.dtype

        def read(start: int, stop: int) -> Pieces:
            for first, last, weights in unit.visit(start, stop):
                yield first, last, weights.read() if unit.trained else weights.param

        return self._own(unit, index, read, dtype)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient accumulated so far, over ranks and micro-batches; zeros where there is none."""
        self.finish()
        self.check_grad(parameter)
        unit, index, trained = self._trained_place(parameter)
        gradient = trained.gradient
        if index not in gradient.held:
            return torch.zeros(unit.parameters[index].whole_shape, dtype=torch.float32, device="cpu")

        def read(start: int, stop: int) -> Pieces:
            for first, last, (values,) in gradient.storage.visit(start, stop):
                yield first, last, values.float() * self._context.gradient_scale.value

        return self._assembled(unit, index, self._own(unit, index, read))

    def grad_norms(self, norm_type: float) -> list[float]:
        """Compute the norm of each trained parameter's gradient so far, over ranks, by unit and slot. Collective.

        `norm_type` is above 0, infinity too, as in `torch.linalg.vector_norm`; without a gradient the norm is 0.
        """
        self.finish()
        greatest = math.isinf(norm_type)
        totals: list[float] = []
        for unit in self._context.units:
            gradient = unit.trained.gradient if unit.trained else None
            if gradient is None:
                continue
            of_unit = [0.0] * len(unit.layout.slots)
            for index, start, stop in unit.parts():
                if index not in gradient.held:
                    continue
                counts = float(unit.parameters[index].counts)  # else other ranks have it alike, and one counts
                for _, _, (values,) in gradient.storage.visit(start, stop):
                    norm = counts * float(torch.linalg.vector_norm(values, norm_type, dtype=torch.float64))
                    of_unit[index] = greater(of_unit[index], norm) if greatest else of_unit[index] + norm**norm_type
            totals += of_unit
        if self._context.ranks.world_size > 1:
            summed = torch.tensor(totals, dtype=torch.float64, device=self._device)
            if greatest:
                self._context.ranks.all_reduce_max(summed)
            else:
                self._context.ranks.all_reduce(summed)
                summed /= self._context.ranks.replicas
            totals = summed.tolist()
        return [
            (total if greatest else total ** (1 / norm_type)) * self._context.gradient_scale.size for total in totals
        ]

    def state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return an optimizer state by its name; `"step"` is the count of updates."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        if name == "step":
            return torch.tensor(float(self._steps[parameter]), dtype=torch.float32, device="cpu")
        if name in self._scalar_names:
            number = float(self._scalars.get(parameter, {}).get(name, 0.0))
            return torch.tensor(number, dtype=torch.float32, device="cpu")
        state, spec, shape = self._state_of(unit, index, name)

        def read(start: int, stop: int) -> Pieces:
            for first, last, views in trained.optimizer.visit(start, stop):
                states, scales = trained.fields.name(views)
                yield first, last, read_state(spec, states[state], scales[state])

        if shape == unit.layout.slots[index].shape:
            return self._assembled(unit, index, self._own(unit, index, read))
        # Values of another shape stand at the beginning of the parameter's tile, on the rank that has all of it.
        ((owner, _, _),) = _shares(unit, unit.layout.slots[index])
        numel = math.prod(shape)

        def fill(part: Tensor, *_: int) -> None:
            part.copy_(next(read(*_tile(unit, index)))[2][:numel])

        return self._collect(unit, [(owner, 0, numel)], fill, numel, torch.float32).view(shape)

    def set_param(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the parameter and its master weights."""
        self.finish()
        self.check_param(parameter, value)
        unit, index = self._place(parameter)
        found = part_of_this_rank(unit, index, value)
        with failing_as_a_whole([unit], f"Setting parameter '{unit.spec.names[index]}'"):
            if found is not None:
                start, stop, values = found
                for first, last, weights in unit.visit(start, stop, modify=True):
                    part = values[first - start : last - start]
                    if unit.trained:
                        weights.write(part)
                    else:
                        weights.param.copy_(as_param(part, weights.param.dtype))
            unit.count_writes([index])
            unit.outdate_parts()
            self._gatherer.outdate(unit)
            if unit.resident:
                self._gatherer.acquire(unit)

    def set_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the accumulated gradient."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        self.check_grad(parameter, value)
        found = part_of_this_rank(unit, index, value)
        if found is not None:
            start, stop, values = found
            self._write_grad(
                trained.gradient, SlotPiece(index, start, stop), values / self._context.gradient_scale.value
            )
        self._reducer.changes += 1
        trained.gradient.present.add(index)
        trained.gradient.held.add(index)

    def scale_grad(self, parameter: nn.Parameter, factor: float) -> None:
        """Multiply the accumulated gradient in its storage and dtype. Not collective: each rank scales its shard."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        for part in unit.parts():
            if part.slot == index and index in (gradient := trained.gradient).held:
                values = torch.empty(part.stop - part.start, dtype=torch.float32, device="cpu")
                for first, last, (kept,) in gradient.storage.visit(part.start, part.stop):
                    values[first - part.start : last - part.start] = kept
                self._write_grad(gradient, part, values * factor)
        self._reducer.changes += 1

    def _write_grad(self, gradient: UnitGradient, part: SlotPiece, values: Tensor) -> None:
        """Write a part of a gradient in the dtype of its storage, and measure it."""
        rounded = values.to(gradient.storage.plans[0].cells[0].dtype)
        for first, last, (kept,) in gradient.storage.visit(part.start, part.stop, modify=True):
            kept.copy_(rounded[first - part.start : last - part.start])
        gradient.squared_norms[part.slot] = squared_norm(rounded, pool=None)
        gradient.unmeasured.discard(part.slot)

    def set_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Overwrite an optimizer state; `"step"` takes a whole number."""
        self.finish()
        self.check_state(parameter, name, value)
        unit, index, trained = self._trained_place(parameter)
        self._given_state.add(parameter)
        if name in self._scalar_names:
            self._scalars[parameter] = {**self._scalars.get(parameter, {}), name: value.item()}
        if name == "step":
            self._steps[parameter] = int(value)
        if name == "step" or name in self._scalar_names:
            return
        state, spec, shape = self._state_of(unit, index, name)
        if spec.begins_with_update:
            self._steps[parameter] = max(1, self._steps[parameter])
        if shape == unit.layout.slots[index].shape:
            found = part_of_this_rank(unit, index, value)
        elif unit.layout.overlap(unit.layout.slots[index], unit.rank) is None:
            found = None
        else:
            found = (*_tile(unit, index), value.detach().float().reshape(-1))
        if found is None:
            return
        start, stop, new = found
        with failing_as_a_whole([unit], f"Setting '{name}' of '{unit.spec.names[index]}'"):
            for first, last, views in trained.optimizer.visit(start, stop, modify=True):
                states, scales = trained.fields.name(views)
                values = new[first - start : last - start]
                # Of another shape there are fewer values than elements, and padding behind them.
                kept = states[state][: len(values)]
                write_state(spec, kept, scales[state], values.to(kept.device))

    def check_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Refuse what `set_state` would refuse."""
        unit, index, _ = self._trained_place(parameter)
        shape = self.check_name(parameter, name)
        if shape is not None:
            check_value(unit.spec.names[index], unit.layout.slots[index], value, shape)
        elif value.numel() != 1 or value.is_complex() or not math.isfinite(value.item()):
            raise ConfigError(f"'{name}' of '{unit.spec.names[index]}' is {value}: give one finite number.")

    def check_name(self, parameter: nn.Parameter, name: str) -> tuple[int, ...] | None:
        """Refuse the name of a state that does not exist. Return its shape, `None` for a single number."""
        unit, index, _ = self._trained_place(parameter)
        return None if name == "step" or name in self._scalar_names else self._state_of(unit, index, name)[2]

    def check_param(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Refuse what `set_param` would refuse."""
        unit, index = self._place(parameter)
        if unit.holding.is_held:
            raise EngineError(f"Unit '{unit.name}' is gathered. Set its parameters outside gathered() and forward.")
        check_value(unit.spec.names[index], unit.layout.slots[index], value)

    def check_grad(self, parameter: nn.Parameter, value: Tensor | None = None) -> None:
        """Refuse to read a gradient that is not whole, or to set one to a value of another shape."""
        unit, index, trained = self._trained_place(parameter)
        if trained.gradient.pending is not None:
            raise EngineError(
                f"Gradients of no_sync micro-batches are not reduced yet. {'Read' if value is None else 'Set'} them "
                "after the last backward."
            )
        if value is not None:
            check_value(unit.spec.names[index], unit.layout.slots[index], value)

    def name(self, parameter: nn.Parameter) -> str:
        """Return a parameter's name in the model."""
        unit, index = self._place(parameter)
        return unit.spec.names[index]

    def reset_state(self, parameter: nn.Parameter) -> None:
        """Reset every state of a parameter to what it was before the first update."""
        unit, index, _ = self._trained_place(parameter)
        whole = unit.layout.slots[index].region
        for name, shape in self._shapes(unit, index).items():
            zeros = torch.zeros(shape if whole is None else whole.shape, dtype=torch.float32, device="cpu")
            self.set_state(parameter, name, zeros)
        self._scalars.pop(parameter, None)
        self._steps[parameter] = 0
        self._given_state.discard(parameter)

    def restore_counts(self, parameter: nn.Parameter, saved: SavedParameter) -> None:
        """Restore the step count and the scalars of a parameter. The elements of its states are written elsewhere."""
        self._steps[parameter] = saved.step
        self._scalars.pop(parameter, None)
        if saved.scalars:
            self._scalars[parameter] = dict(saved.scalars)
        self._given_state.discard(parameter)
        if saved.has_state:
            self._given_state.add(parameter)

    def scalars(self, parameter: nn.Parameter) -> Scalars:
        """Return the parameter's own scalars; empty if the rule has none."""
        return self._scalars.get(parameter, {})

    def has_state(self, parameter: nn.Parameter) -> bool:
        """Return True if the parameter was updated, or its state was set."""
        return self._steps[parameter] > 0 or parameter in self._given_state

    def state_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names that `state` accepts for a parameter beside `"step"`."""
        unit, index, _ = self._trained_place(parameter)
        return (*self._shapes(unit, index), *(name for name in self._scalar_names if name != "step"))

    def steps(self) -> Mapping[nn.Parameter, int]:
        """Return the count of updates of each trained parameter."""
        return self._steps

    def is_trained(self, parameter: Tensor) -> bool:
        """Return True for a parameter that the optimizer trains."""
        place = self._places.get(parameter)  # type: ignore[call-overload] # only parameters are keys
        return place is not None and place[0].trained is not None

    def unit_of(self, parameter: nn.Parameter) -> Unit:
        """Find the unit that a parameter is in."""
        return self._place(parameter)[0]

    # Helpers

    def _own(
        self, unit: Unit, index: int, read: Callable[[int, int], Pieces], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Collect a slot from all shards. `read` yields the values of a range of this rank's shard. Collective."""
        slot = unit.layout.slots[index]
        first = unit.own_range[0] - slot.start  # of this rank's shard, counted from the slot

        def fill(part: Tensor, start: int, stop: int) -> None:
            for begin, end, values in read(start - first, stop - first):
                part[begin + first - start : end + first - start] = values

        return self._collect(unit, _shares(unit, slot), fill, slot.numel, dtype).view(slot.shape)

    def _collect(
        self,
        unit: Unit,
        shares: Sequence[tuple[int, int, int]],
        fill: Callable[[Tensor, int, int], None],
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Broadcast each part from the rank that has it, and return all of them as one flat tensor. Collective."""
        ranks = self._context.ranks
        whole = torch.empty(numel, dtype=dtype, device="cpu")
        failure: NvmeError | None = None
        for rank, start, stop in shares:
            part = torch.empty(stop - start, dtype=dtype, device=self._device)
            if rank == unit.rank:
                try:
                    fill(part, start, stop)
                except NvmeError as error:
                    failure = error  # raised below: the other ranks wait for this part (ordering rule 4)
            ranks.broadcast_part(part, rank)
            whole[start:stop] = part.cpu()
        # Only a read of a file fails on one rank alone. Without the agreement the others would use values of no file.
        if unit.layout.shards > 1 and any(storage.in_files for storage in unit.storages.values()):
            ranks.control_group.agree(failure)
        elif failure is not None:
            raise failure
        return whole

    def _assembled(self, unit: Unit, index: int, own: Tensor) -> Tensor:
        """Assemble a parameter that tensor-parallel ranks divide. Collective."""
        slot = unit.layout.slots[index]
        if slot.region is None:
            return own
        whole = torch.zeros(slot.region.shape, dtype=own.dtype, device="cpu")
        cut(whole, own.shape, slot.region).copy_(own)
        whole = whole.to(self._device)
        self._context.ranks.assemble(whole)
        return whole.cpu()

    def _place(self, parameter: nn.Parameter) -> tuple[Unit, int]:
        place = self._places.get(parameter)
        if place is None:
            raise ConfigError(
                f"This is no parameter of the prepared model: {type(parameter).__name__} {tuple(parameter.shape)}. "
                "Pass one of model.parameters()."
            )
        return place

    def _trained_place(self, parameter: nn.Parameter) -> tuple[Unit, int, TrainingState]:
        unit, index = self._place(parameter)
        if unit.trained is None:
            raise ConfigError(
                f"Parameter '{unit.spec.names[index]}' is frozen: it has no gradient and no optimizer state. "
                "Only full_param and set_full_param work on it."
            )
        return unit, index, unit.trained

    def _shapes(self, unit: Unit, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states that a parameter has, by their names."""
        own = unit.layout.slots[index].shape
        shapes = {spec.name: unit.rule.state_shape(spec.name, own) for spec in unit.rule.states}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def _state_of(self, unit: Unit, index: int, name: str) -> tuple[int, StateSpec, tuple[int, ...]]:
        """Return the number, the storage format and the shape of a state, by its name."""
        shapes = self._shapes(unit, index)
        for number, spec in enumerate(unit.rule.states):
            if spec.name == name and name in shapes:
                return number, spec, shapes[name]
        known = ", ".join(map(repr, (*shapes, *(name for name in self._scalar_names if name != "step"), "step")))
        raise ConfigError(f"There is no optimizer state {name!r}. This rule has {known}.")


def _tile(unit: Unit, index: int) -> tuple[int, int]:
    """Return the range of the tile of an uncut parameter in its rank's shard."""
    start = unit.layout.slots[index].start - unit.own_range[0]
    return start, start + unit.spec.whole_numel
