"""Looking at training state and changing it, by parameter, wherever it lives.

Every call is collective: all ranks make it, in the same order. Values are fp32 on the cpu, in the parameter's shape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.engine.gather import Gatherer
from penstock.engine.reduce import Reducer
from penstock.engine.unit import Trained, Unit
from penstock.errors import ConfigError, EngineError
from penstock.layout import Slot
from penstock.machine.collectives import Ranks
from penstock.machine.streams import DONE
from penstock.rules.master import read_master, write_master
from penstock.rules.rule import BLOCK_NUMEL, Rule, Scalars
from penstock.rules.storage import read_state, write_state


class Access:
    """Reads and writes the cells of single parameters.

    Arguments:
        rule: whose states there are.
        steps: how often each trained parameter was updated.
        scalars: the parameters' own scalars, where the rule has some.
        gradient_scale: what a gradient in its home is multiplied with.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        ranks: Ranks,
        gatherer: Gatherer,
        reducer: Reducer,
        *,
        rule: Rule,
        steps: dict[nn.Parameter, int],
        scalars: dict[nn.Parameter, Scalars],
        gradient_scale: float,
        device: torch.device,
    ) -> None:
        self._units = units
        self._ranks = ranks
        self._gatherer = gatherer
        self._reducer = reducer
        self._states = rule.states
        self._scalar_names = rule.scalar_names
        self._steps = steps
        self._scalars = scalars
        self._gradient_scale = gradient_scale
        self._device = device
        self._places = {p: (unit, index) for unit in units for index, p in enumerate(unit.spec.parameters)}
        self._given_state: set[nn.Parameter] = set()  # by `set_state`: they have state before their first update

    def finish(self) -> None:
        """Wait until every update has reached its home, on the host."""
        for unit in self._units:
            if unit.trained:
                unit.trained.gradient.ready.synchronize()
                unit.trained.updated.synchronize()
            unit.published.synchronize()

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter] | None, *, modify: bool) -> Iterator[None]:
        """Whole parameters for the time of a `with` block."""
        self.finish()
        wanted = [self._place(p)[0] for p in parameters] if parameters is not None else self._units
        units = sorted(dict.fromkeys(wanted), key=lambda unit: unit.index)
        for unit in units:
            unit.holds += 1
            self._gatherer.acquire(unit)
        before = {unit: (unit.full if unit.resident else unit.own).clone() for unit in units} if modify else {}
        try:
            yield
            for unit in units:
                if modify:
                    self._take_over(unit, before[unit])
                    unit.note_versions()
                elif unit.holds == 1:
                    unit.check_written()
        except BaseException:
            for unit, values in before.items():
                if unit.resident:  # what was written is in the home already
                    unit.full.copy_(values)
                unit.note_versions()
            raise
        finally:
            for unit in units:
                unit.holds -= 1
                self._gatherer.release(unit)

    def param(self, parameter: nn.Parameter) -> Tensor:
        """The parameter at master precision."""
        return self.exact_param(parameter).float()

    def exact_param(self, parameter: nn.Parameter) -> Tensor:
        """The parameter at master precision; integers and booleans in their own dtype."""
        self.finish()
        unit, index = self._place(parameter)
        dtype = torch.float32 if unit.spec.dtype.is_floating_point else unit.spec.dtype
        return self._whole(unit, index, lambda part: _read(unit, part), dtype)

    def grad(self, parameter: nn.Parameter) -> Tensor:
        """The gradient accumulated so far, over ranks and micro-batches; zeros where there is none."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        gradient = trained.gradient
        if gradient.pending is not None:
            raise EngineError(
                "Gradients of no_sync micro-batches are not reduced yet. Read them after the last backward."
            )
        if not gradient.held or (self._ranks.world_size == 1 and index not in gradient.present):
            return torch.zeros(unit.layout.slots[index].shape)
        return self._whole(unit, index, lambda part: gradient.home[part].float() * self._gradient_scale)

    def state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """An optimizer state; `"step"` is the count of updates."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        if name == "step":
            return torch.tensor(float(self._steps[parameter]))
        if name in self._scalar_names:
            return torch.tensor(float(self._scalars.get(parameter, {}).get(name, 0.0)))
        state = self._state_index(name)
        spec, values, scale = self._states[state], trained.states[state], trained.scales[state]
        return self._whole(unit, index, lambda part: read_state(spec, values[part], _scale_of(scale, part)))

    def set_param(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the parameter and its master weights."""
        self.finish()
        unit, index = self._place(parameter)
        if unit.holds or unit.users:
            raise EngineError(f"Unit '{unit.name}' is gathered. Set its parameters outside gathered() and forward.")
        found = self._own_part(unit, index, value)
        if found is not None:
            part, values = found
            _write(unit, part, values)
            if unit.trained and unit.trained.shadow is not None:
                unit.own[part].copy_(unit.trained.shadow[part])
        unit.note_version(index)
        unit.stale = unit.replicated and unit.layout.shards > 1
        unit.published = DONE
        self._gatherer.outdate(unit)
        if unit.resident:
            self._gatherer.acquire(unit)

    def set_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the accumulated gradient."""
        self.finish()
        unit, index, trained = self._trained_place(parameter)
        gradient = trained.gradient
        if gradient.pending is not None:
            raise EngineError(
                "Gradients of no_sync micro-batches are not reduced yet. Set them after the last backward."
            )
        if not gradient.held:
            gradient.home.zero_()
            gradient.held = True
        found = self._own_part(unit, index, value)
        if found is not None:
            part, values = found
            gradient.home[part].copy_(values / self._gradient_scale)
            gradient.squared_norms[index] = self._reducer.squared_norm(gradient.home[part])
        gradient.present.add(index)

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
        spec, values, scale = self._states[state], trained.states[state], trained.scales[state]
        if spec.begins_with_update:
            self._steps[parameter] = max(1, self._steps[parameter])
        found = self._own_part(unit, index, value)
        if found is not None:
            part, new = found
            write_state(spec, values[part], _scale_of(scale, part), new.to(values.device))

    def check_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Refuse what `set_state` would refuse."""
        unit, index, _ = self._trained_place(parameter)
        if name != "step" and name not in self._scalar_names:
            self._state_index(name)
            _check_shape(unit.spec.names[index], unit.layout.slots[index], value)

    def reset_state(self, parameter: nn.Parameter) -> None:
        """As before the first update."""
        unit, index, _ = self._trained_place(parameter)
        zeros = torch.zeros(unit.layout.slots[index].shape)
        for spec in self._states:
            self.set_state(parameter, spec.name, zeros)
        self._scalars.pop(parameter, None)
        self._steps[parameter] = 0
        self._given_state.discard(parameter)

    def has_state(self, parameter: nn.Parameter) -> bool:
        """Whether it was updated, or its state was set."""
        return self._steps[parameter] > 0 or parameter in self._given_state

    @property
    def state_names(self) -> tuple[str, ...]:
        """What `state` knows beside `"step"`."""
        return (*(spec.name for spec in self._states), *(name for name in self._scalar_names if name != "step"))

    def steps(self) -> Mapping[nn.Parameter, int]:
        """How often each trained parameter was updated."""
        return self._steps

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

    def _whole(
        self, unit: Unit, index: int, read: Callable[[slice], Tensor], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Put the parts of all shards together. `read` gives the values of a part of this rank's shard."""
        slot = unit.layout.slots[index]
        whole = torch.empty(slot.numel, dtype=dtype)
        for rank in range(unit.layout.shards):
            overlap = unit.layout.overlap(slot, rank)
            if overlap is None:
                continue
            start, stop = overlap
            first = unit.layout.shard_range(rank)[0]
            part = torch.empty(stop - start, dtype=dtype, device=self._device)
            if rank == unit.rank:
                part.copy_(read(slice(start - first, stop - first)))
            self._ranks.broadcast_part(part, rank)
            whole[start - slot.start : stop - slot.start] = part.cpu()
        return whole.view(slot.shape)

    def _own_part(self, unit: Unit, index: int, value: Tensor) -> tuple[slice, Tensor] | None:
        """Where this rank's shard holds a part of the slot, and that part of `value`: fp32, or integers as they are."""
        slot = unit.layout.slots[index]
        _check_shape(unit.spec.names[index], slot, value)
        overlap = unit.layout.overlap(slot, unit.rank)
        if overlap is None:
            return None
        start, stop = overlap
        first = unit.own_range[0]
        values = value.detach().reshape(-1)[start - slot.start : stop - slot.start]
        return slice(start - first, stop - first), values.float() if unit.spec.dtype.is_floating_point else values

    def _take_over(self, unit: Unit, before: Tensor) -> None:
        """The full buffer was modified: every rank takes the first rank's, masters keep what did not change."""
        self._ranks.broadcast(unit.full)
        start, stop = unit.own_range
        before = before[start:stop] if unit.resident else before
        now = unit.full[start:stop].to(before.device)
        if unit.trained is not None:
            values = _read(unit, slice(None))
            changed = (now != before).to(values.device)
            _write(unit, slice(None), torch.where(changed, now.to(values.device, torch.float32), values))
        unit.own.copy_(now)
        if unit.replicated and not unit.resident:
            unit.home.copy_(unit.full)


def _check_shape(name: str, slot: Slot, value: Tensor) -> None:
    if tuple(value.shape) != slot.shape:
        raise ConfigError(f"The value for '{name}' has shape {tuple(value.shape)}; the parameter has {slot.shape}.")


def _scale_of(scale: Tensor | None, part: slice) -> Tensor | None:
    """The scales of a part of the shard that begins on a block."""
    return None if scale is None else scale[part.start // BLOCK_NUMEL : -(-part.stop // BLOCK_NUMEL)]


def _read(unit: Unit, part: slice) -> Tensor:
    """The fp32 values of a part of this rank's shard; integers as they are."""
    if not unit.spec.dtype.is_floating_point:
        return unit.own[part]
    master = unit.trained.master if unit.trained else None
    return read_master(unit.written[part], None if master is None else master[part])


def _write(unit: Unit, part: slice, values: Tensor) -> None:
    """Write fp32 values into a part of this rank's shard, parameter and master."""
    master = unit.trained.master if unit.trained else None
    written = unit.written[part]
    write_master(written, None if master is None else master[part], values.to(written.device))
