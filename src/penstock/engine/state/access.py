"""Looking at training state and changing it, by parameter, wherever it lives.

Every call is collective: all ranks make it, in the same order. Values are fp32 on the cpu, in the parameter's shape.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.engine.passes.gather import Gatherer
from penstock.engine.passes.reduce import Reducer
from penstock.engine.state.parts import Parts, Pieces, own_part
from penstock.engine.state.torn import torn_on_failure
from penstock.engine.state.values import check_value, greater
from penstock.engine.units.gradient import Gradient
from penstock.engine.units.unit import Trained, Unit
from penstock.engine.updates.rig import Rig
from penstock.engine.updates.update import Updater
from penstock.errors import ConfigError, EngineError
from penstock.layout import Piece
from penstock.rules.master import as_param
from penstock.rules.rule import Scalars, StateSpec
from penstock.rules.storage import read_state, write_state


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
        self._rule = rig.rule
        self._scalar_names = rig.rule.scalar_names
        self._steps = updater.steps
        self._scalars = updater.scalars
        self._gradient_scale = rig.gradient_scale
        self._device = rig.streams.device
        self._parts = Parts(rig.ranks, rig.streams.device)
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
                home.written.synchronize()  # site access.written

    def param(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter at master precision, in fp32."""
        return self.exact_param(parameter).float()

    def exact_param(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter at master precision; a frozen one in its own dtype."""
        return self._parts.assembled(*self._place(parameter), self.own_param(parameter))

    def own_param(self, parameter: nn.Parameter) -> Tensor:
        """Return the same, of one that ranks divide this rank's elements alone."""
        self.finish()  # an update that is under way writes what is read here
        unit, index = self._place(parameter)
        dtype = torch.float32 if unit.trained else unit.spec.dtype

        def read(start: int, stop: int) -> Pieces:
            for first, last, weights in unit.visit(start, stop):
                yield first, last, weights.read() if unit.trained else weights.param

        return self._parts.own(unit, index, read, dtype)

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

        return self._parts.whole(unit, index, read)

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
        state, spec, shape = self._state_of(unit, index, name)

        def read(start: int, stop: int) -> Pieces:
            for first, last, views in trained.optimizer.visit(start, stop):
                states, scales = trained.fields.name(views)
                yield first, last, read_state(spec, states[state], scales[state])

        if shape == unit.layout.slots[index].shape:
            return self._parts.whole(unit, index, read)
        # Values of another shape stand at the beginning of the parameter's tile.
        return self._parts.of_owner(unit, index, shape, lambda: next(read(*_tile(unit, index)))[2][: math.prod(shape)])

    def set_param(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the parameter and its master weights."""
        self.finish()
        self.check_param(parameter, value)
        unit, index = self._place(parameter)
        found = own_part(unit, index, value)
        with torn_on_failure([unit], f"Setting parameter '{unit.spec.names[index]}'"):
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
        found = own_part(unit, index, value)
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
        state, spec, shape = self._state_of(unit, index, name)
        if spec.begins_with_update:
            self._steps[parameter] = max(1, self._steps[parameter])
        if shape == unit.layout.slots[index].shape:
            found = own_part(unit, index, value)
        elif unit.layout.overlap(unit.layout.slots[index], unit.rank) is None:
            found = None
        else:
            found = (*_tile(unit, index), value.detach().float().reshape(-1))
        if found is None:
            return
        start, stop, new = found
        with torn_on_failure([unit], f"Setting '{name}' of '{unit.spec.names[index]}'"):
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
        """Refuse a state that there is not; return its shape, `None` of one that is a single number."""
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

    def state_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Name what `state` knows of a parameter beside `"step"`."""
        unit, index, _ = self._trained_place(parameter)
        return (*self._shapes(unit, index), *(name for name in self._scalar_names if name != "step"))

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

    def _shapes(self, unit: Unit, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states that a parameter has, by their names."""
        own = unit.layout.slots[index].shape
        shapes = {spec.name: unit.rule.state_shape(spec.name, own) for spec in unit.rule.states}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def _state_of(self, unit: Unit, index: int, name: str) -> tuple[int, StateSpec, tuple[int, ...]]:
        """Find a state of a parameter by its name: its number, how it is stored, and its shape."""
        shapes = self._shapes(unit, index)
        for number, spec in enumerate(unit.rule.states):
            if spec.name == name and name in shapes:
                return number, spec, shapes[name]
        known = ", ".join(map(repr, (*shapes, *(name for name in self._scalar_names if name != "step"), "step")))
        raise ConfigError(f"There is no optimizer state {name!r}. This rule has {known}.")


def _tile(unit: Unit, index: int) -> tuple[int, int]:
    """Say where the tile of a whole parameter lies in its rank's shard."""
    start = unit.layout.slots[index].start - unit.own_range[0]
    return start, start + unit.spec.whole_numel
