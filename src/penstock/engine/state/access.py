"""Looking at training state and changing it, by parameter, wherever it lives.

Every call is collective: all ranks make it, in the same order. Values are fp32 on the cpu, in the parameter's shape.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock.engine.passes.gather import Gatherer
from penstock.engine.passes.reduce import Reducer
from penstock.engine.state.torn import torn_on_failure
from penstock.engine.state.values import among_zeros, check_value, flat_part, greater
from penstock.engine.units.unit import Gradient, Trained, Unit
from penstock.engine.updates.rig import Rig
from penstock.engine.updates.update import Updater
from penstock.errors import ConfigError, EngineError, NvmeError
from penstock.layout import Piece
from penstock.rules.rule import Scalars
from penstock.rules.storage import read_state, write_state

#: Values of a range of this rank's shard, piece by piece: first element, one past the last, values.
Pieces = Iterator[tuple[int, int, Tensor]]


class Access:
    """Reads and writes the cells of single parameters.

    Arguments:
        gatherer: hears of parameters that were written.
        reducer: measures gradients that are set.
        updater: knows how often each parameter was updated.
    """

    def __init__(
        self,
        rig: Rig,
        gatherer: Gatherer,
        reducer: Reducer,
        updater: Updater,
    ) -> None:
        self._units = rig.units
        self._ranks = rig.ranks
        self._gatherer = gatherer
        self._reducer = reducer
        self._states = rig.rule.states
        self._scalar_names = rig.rule.scalar_names
        self._steps = updater.steps
        self._scalars = updater.scalars
        self._gradient_scale = rig.gradient_scale
        self._device = rig.streams.device
        self._places = {p: (unit, index) for unit in rig.units for index, p in enumerate(unit.spec.parameters)}
        self._given_state: set[nn.Parameter] = set()  # by `set_state`: they have state before their first update

    def go_on_from(self, other: "Access") -> None:
        """Go on with what another one knows of the parameters: step counts, scalars, and who has state."""
        self._steps.update(other._steps)
        self._scalars.update(other._scalars)
        self._given_state |= other._given_state

    def finish(self) -> None:
        """Wait on the host until everything that was written has reached its home."""
        for unit in self._units:
            for home in unit.homes.values():
                home.written.synchronize()

    def param(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter at master precision, in fp32."""
        return self.exact_param(parameter).float()

    def exact_param(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter at master precision; a frozen one in its own dtype."""
        return self._assembled(*self._place(parameter), self.own_param(parameter))

    def own_param(self, parameter: nn.Parameter) -> Tensor:
        """Return the same, of one that ranks divide this rank's elements alone."""
        self.finish()  # an update that is under way writes what is read here
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
            for first, last, (values,) in gradient.home.visit(start, stop):
                yield first, last, values.float() * self._gradient_scale.value

        return self._whole(unit, index, read)

    def grad_norms(self, norm_type: float) -> list[float]:
        """Take the norm of each trained parameter's gradient so far, over ranks, by unit and slot. Collective.

        `norm_type` is above 0, infinity too, as in `torch.linalg.vector_norm`; without a gradient the norm is 0.
        """
        self.finish()
        greatest = math.isinf(norm_type)
        totals: list[float] = []
        for unit in self._units:
            gradient = unit.trained.gradient if unit.trained else None
            if gradient is None:
                continue
            of_unit = [0.0] * len(unit.layout.slots)
            for index, start, stop in unit.parts():
                if index not in gradient.held:
                    continue
                counts = float(unit.parameters[index].counts)  # else other ranks have it alike, and one counts
                for _, _, (values,) in gradient.home.visit(start, stop):
                    norm = counts * float(torch.linalg.vector_norm(values, norm_type, dtype=torch.float64))
                    of_unit[index] = greater(of_unit[index], norm) if greatest else of_unit[index] + norm**norm_type
            totals += of_unit
        if self._ranks.world_size > 1:
            summed = torch.tensor(totals, dtype=torch.float64, device=self._device)
            if greatest:
                self._ranks.all_reduce_max(summed)
            else:
                self._ranks.all_reduce(summed)
                summed /= self._ranks.replicas
            totals = summed.tolist()
        return [(total if greatest else total ** (1 / norm_type)) * self._gradient_scale.size for total in totals]

    def state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return an optimizer state by its name; `"step"` is the count of updates."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        if name == "step":
            return torch.tensor(float(self._steps[parameter]), dtype=torch.float32, device="cpu")
        if name in self._scalar_names:
            number = float(self._scalars.get(parameter, {}).get(name, 0.0))
            return torch.tensor(number, dtype=torch.float32, device="cpu")
        state = self._state_index(name)

        def read(start: int, stop: int) -> Pieces:
            for first, last, views in trained.optimizer.visit(start, stop):
                states, scales = trained.fields.name(views)
                yield first, last, read_state(self._states[state], states[state], scales[state])

        return self._whole(unit, index, read)

    def set_param(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the parameter and its master weights."""
        self.finish()
        self.check_param(parameter, value)
        unit, index = self._place(parameter)
        found = self._own_part(unit, index, value)
        with torn_on_failure([unit], f"Setting parameter '{unit.spec.names[index]}'"):
            if found is not None:
                start, stop, values = found
                for first, last, weights in unit.visit(start, stop, modify=True):
                    part = values[first - start : last - start]
                    if unit.trained:
                        weights.write(part)
                    else:
                        weights.param.copy_(part)
            unit.count_writes([index])
            unit.stale = unit.replica is not None and unit.layout.shards > 1
            self._gatherer.outdate(unit)
            if unit.resident:
                self._gatherer.acquire(unit)

    def set_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the accumulated gradient."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        self.check_grad(parameter, value)
        found = self._own_part(unit, index, value)
        if found is not None:
            start, stop, values = found
            self._write_grad(trained.gradient, Piece(index, start, stop), values / self._gradient_scale.value)
        self._reducer.changes += 1
        trained.gradient.present.add(index)
        trained.gradient.held.add(index)

    def scale_grad(self, parameter: nn.Parameter, factor: float) -> None:
        """Multiply the accumulated gradient, in its home and in its dtype. Not collective: each rank does its shard."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        for part in unit.parts():
            if part.slot == index and index in (gradient := trained.gradient).held:
                values = torch.empty(part.stop - part.start, dtype=torch.float32, device="cpu")
                for first, last, (kept,) in gradient.home.visit(part.start, part.stop):
                    values[first - part.start : last - part.start] = kept
                self._write_grad(gradient, part, values * factor)
        self._reducer.changes += 1

    def _write_grad(self, gradient: Gradient, part: Piece, values: Tensor) -> None:
        """Write a part of a gradient as its home keeps it, and measure it."""
        rounded = values.to(gradient.home.plans[0].cells[0].dtype)
        for first, last, (kept,) in gradient.home.visit(part.start, part.stop, modify=True):
            kept.copy_(rounded[first - part.start : last - part.start])
        gradient.squared_norms[part.slot] = self._reducer.squared_norm(rounded)
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
        state = self._state_index(name)
        spec = self._states[state]
        if spec.begins_with_update:
            self._steps[parameter] = max(1, self._steps[parameter])
        found = self._own_part(unit, index, value)
        if found is None:
            return
        start, stop, new = found
        with torn_on_failure([unit], f"Setting '{name}' of '{unit.spec.names[index]}'"):
            for first, last, views in trained.optimizer.visit(start, stop, modify=True):
                states, scales = trained.fields.name(views)
                kept = states[state]
                write_state(spec, kept, scales[state], new[first - start : last - start].to(kept.device))

    def check_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Refuse what `set_state` would refuse."""
        unit, index, _ = self._trained_place(parameter)
        if self.check_name(parameter, name):
            check_value(unit.spec.names[index], unit.layout.slots[index], value)
        elif value.numel() != 1 or value.is_complex() or not math.isfinite(value.item()):
            raise ConfigError(f"'{name}' of '{unit.spec.names[index]}' is {value}: give one finite number.")

    def check_name(self, parameter: nn.Parameter, name: str) -> bool:
        """Refuse a state that there is not; return whether it has the parameter's shape."""
        self._trained_place(parameter)
        is_whole = name != "step" and name not in self._scalar_names
        if is_whole:
            self._state_index(name)
        return is_whole

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
        zeros = torch.zeros(unit.parameters[index].whole_shape, dtype=torch.float32, device="cpu")
        for spec in self._states:
            self.set_state(parameter, spec.name, zeros)
        self._scalars.pop(parameter, None)
        self._steps[parameter] = 0
        self._given_state.discard(parameter)

    def restore_counts(self, parameter: nn.Parameter, *, step: int, scalars: Scalars, has_state: bool) -> None:
        """Restore what is known of a parameter beside the elements of its states, which are written elsewhere."""
        self._steps[parameter] = step
        self._scalars.pop(parameter, None)
        if scalars:
            self._scalars[parameter] = dict(scalars)
        self._given_state.discard(parameter)
        if has_state:
            self._given_state.add(parameter)

    def scalars(self, parameter: nn.Parameter) -> Scalars:
        """Return the parameter's own scalars, where the rule has some."""
        return self._scalars.get(parameter, {})

    def has_state(self, parameter: nn.Parameter) -> bool:
        """Whether it was updated, or its state was set."""
        return self._steps[parameter] > 0 or parameter in self._given_state

    @property
    def state_names(self) -> tuple[str, ...]:
        """What `state` knows beside `"step"`."""
        return (*(spec.name for spec in self._states), *(name for name in self._scalar_names if name != "step"))

    def steps(self) -> Mapping[nn.Parameter, int]:
        """Count the updates of each trained parameter."""
        return self._steps

    def is_trained(self, parameter: Tensor) -> bool:
        """Whether it is a parameter that has optimizer state, or will."""
        place = self._places.get(parameter)  # type: ignore[call-overload] # what is no parameter is not there
        return place is not None and place[0].trained is not None

    def unit_of(self, parameter: nn.Parameter) -> Unit:
        """Find the unit that a parameter is in."""
        return self._place(parameter)[0]

    # Helpers

    def _place(self, parameter: nn.Parameter) -> tuple[Unit, int]:
        place = self._places.get(parameter)
        if place is None:
            raise ConfigError(
                f"This is no parameter of the prepared model: {type(parameter).__name__} {tuple(parameter.shape)}. "
                "Pass one of model.parameters()."
            )
        return place

    def _trained_place(self, parameter: nn.Parameter) -> tuple[Unit, int, Trained]:
        unit, index = self._place(parameter)
        if unit.trained is None:
            raise ConfigError(
                f"Parameter '{unit.spec.names[index]}' is frozen: it has no gradient and no optimizer state. "
                "Only full_param and set_full_param work on it."
            )
        return unit, index, unit.trained

    def _state_index(self, name: str) -> int:
        names = [spec.name for spec in self._states]
        if name not in names:
            known = ", ".join(map(repr, (*self.state_names, "step")))
            raise ConfigError(f"There is no optimizer state {name!r}. This rule has {known}.")
        return names.index(name)

    def _whole(self, unit: Unit, index: int, read: Callable[[int, int], Pieces]) -> Tensor:
        """Put the parts of all ranks together, in fp32. Collective."""
        return self._assembled(unit, index, self._own(unit, index, read))

    def _assembled(self, unit: Unit, index: int, own: Tensor) -> Tensor:
        """Put together what ranks have of a parameter that they divide. Collective."""
        slot = unit.layout.slots[index]
        if slot.region is None:
            return own
        whole = among_zeros(own, slot.region).to(self._device)
        self._ranks.assemble(whole)
        return whole.cpu()

    def _own(
        self, unit: Unit, index: int, read: Callable[[int, int], Pieces], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Put the parts of all shards together. `read` gives the values of a range of this rank's shard. Collective."""
        slot = unit.layout.slots[index]
        whole = torch.empty(slot.numel, dtype=dtype, device="cpu")
        failure: NvmeError | None = None
        for rank in range(unit.layout.shards):
            overlap = unit.layout.overlap(slot, rank)
            if overlap is None:
                continue
            start, stop = overlap
            first = unit.layout.shard_range(rank)[0]
            part = torch.empty(stop - start, dtype=dtype, device=self._device)
            if rank == unit.rank:
                try:
                    for begin, end, values in read(start - first, stop - first):
                        part[begin + first - start : end + first - start] = values
                except NvmeError as error:
                    failure = error  # raised below: the other ranks wait for this part, whatever it holds
            self._ranks.broadcast_part(part, rank)
            whole[start - slot.start : stop - slot.start] = part.cpu()
        # Only a read of a file fails on one rank alone: the others would go on with a part that is not there.
        if unit.layout.shards > 1 and any(home.in_files for home in unit.homes.values()):
            self._ranks.council.agree(failure)
        elif failure is not None:
            raise failure
        return whole.view(slot.shape)

    def _own_part(self, unit: Unit, index: int, value: Tensor) -> tuple[int, int, Tensor] | None:
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
        values = flat_part(value, unit.parameters[index].tensor, slot)[start - slot.start : stop - slot.start]
        return start - first, stop - first, values.float() if unit.trained else values
