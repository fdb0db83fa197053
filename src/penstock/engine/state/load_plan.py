"""The load plan: the tiles that a rank reads from a checkpoint, and where their elements go."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.beside import decode_random, from_tensor, persistent_buffers, why_no_fit
from penstock.checkpoint.reader import Checkpoint
from penstock.checkpoint.tables import BoxExtent, SlotPart, TileKey, UnitTable, meet
from penstock.checkpoint.tiles import Tile
from penstock.config import MASTER, OPTIMIZER, PARAM
from penstock.engine.step.context import EngineContext
from penstock.engine.step.update import Updater
from penstock.engine.unit.unit import Unit, WeightRange
from penstock.errors import CheckpointError, ConfigError
from penstock.files import Field
from penstock.layout import Slot
from penstock.rules.formats import read_master, read_state, write_state
from penstock.rules.rule import BLOCK_NUMEL, StateSpec

# ----------------------------------------------------------------------------------------------------------------------
# Planning checks everything but the tiles, and changes nothing.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_NAMED = 8


class Destination(NamedTuple):
    """Elements `start` to `stop` of a unit's shard. A tile holds them from its element `inside` on."""

    unit: Unit
    start: int
    stop: int
    inside: int


class SlotRange(NamedTuple):
    """Elements `first` to `last` of a slot in a unit's shard, where its element 0 is at element `base`."""

    unit: Unit
    slot: Slot
    first: int
    last: int
    base: int

    def runs(self, part: SlotPart) -> Iterator[Destination]:
        """Yield the runs of these elements that a tile's part of the parameter holds."""
        there, here = BoxExtent.of(part.slot), BoxExtent.of(self.slot)
        whole = [(part.start, part.stop, part.start)]
        for begin, end, at in whole if there == here else meet(there, part.start, part.stop, here):
            start, stop = max(begin, self.first), min(end, self.last)
            if start < stop:
                inside = part.inside + at - part.start + start - begin
                yield Destination(self.unit, start + self.base, stop + self.base, inside)

    def cuts_blocks(self, part: SlotPart) -> bool:
        """Return True if a block of 8-bit states here would consist of parts of several blocks there."""
        for run in self.runs(part):
            start, stop = run.start - self.base, run.stop - self.base
            there = part.start + run.inside - part.inside
            if start % BLOCK_NUMEL or there % BLOCK_NUMEL or (stop % BLOCK_NUMEL and stop != self.slot.numel):
                return True
        return False


@dataclass(frozen=True)
class LoadPlan:
    """Everything that a load writes into an engine. All of it is checked, except the bytes of the tiles.

    Attributes:
        keys: the tiles that hold elements of this rank's shards, in the order of the files.
        slots: the elements of each parameter in this rank's shards, by name.
        groups: the options of each param group.
        buffers: the values of buffers, by name.
        random: functions that set this rank's generators; empty if no states were saved for it.
        extra: the values that the user added.
    """

    checkpoint: Checkpoint
    keys: Sequence[TileKey]
    slots: Mapping[str, SlotRange]
    groups: Sequence[dict[str, Any]]
    buffers: Mapping[str, Tensor]
    random: Sequence[Callable[[], object]]
    extra: dict[str, Any]

    def runs(self, key: TileKey) -> Iterator[Destination]:
        """Yield the runs of this rank's shards that a tile holds."""
        for part in key.unit.parts(key.number):
            if part.slot.name in self.slots:
                yield from self.slots[part.slot.name].runs(part)


class LoadPlanner:
    """Check checkpoints against one engine, and plan their loading.

    Arguments:
        updater: checks the options of param groups.
    """

    def __init__(self, context: EngineContext, updater: Updater) -> None:
        self._context = context
        self._updater = updater
        self._device = context.streams.device

    def take(self, checkpoint: Checkpoint, own: Mapping[str, Tensor]) -> LoadPlan:
        """Plan what this rank reads from a checkpoint, and check it.

        Arguments:
            checkpoint: one that was opened.
            own: the buffers of this rank that differ from the first one's, by key.

        Raises:
            CheckpointError: it does not fit; names the field.
            ConfigError: there is an option that the rule does not have.
        """
        self._check_parameters(checkpoint)
        groups: list[dict[str, Any]] = []
        if self._context.trains:  # without an optimizer only parameters are loaded
            self._check_states(checkpoint)
            groups = self._read_groups(checkpoint)
        buffers = self._read_buffers(checkpoint, own)
        extra: dict[str, Any] = checkpoint.value("extra", checkpoint.manifest.extra)
        if not isinstance(extra, dict):
            raise checkpoint.fail("extra", "is not an object.")
        slots = self._slots()
        keys = self._keys(checkpoint, slots)
        return LoadPlan(checkpoint, keys, slots, groups, buffers, self._read_random(checkpoint), extra)

    def _check_parameters(self, checkpoint: Checkpoint) -> None:
        """Check that the parameters have the model's names, shapes and kinds of dtypes."""
        saved = checkpoint.manifest.parameters
        own = {
            slot.name: (BoxExtent.of(slot).shape, unit.spec.dtype.is_floating_point)
            for unit in self._context.units
            for slot in unit.layout.slots
        }
        wrong = [f"it lacks '{name}'" for name in own if name not in saved]
        wrong += [f"it has '{name}', which the model has not" for name in saved if name not in own]
        for name, (shape, floats) in own.items():
            if name in saved and saved[name].shape != shape:
                wrong.append(f"'{name}' has shape {saved[name].shape} there and {shape} here")
            elif name in saved and saved[name].dtype.is_floating_point != floats:
                wrong.append(f"'{name}' is {saved[name].dtype} there")
        if wrong:
            more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
            raise checkpoint.fail(
                "parameters", f"is not of this model: {'; '.join(wrong[:_MOST_NAMED])}{more}. Build the model it was."
            )

    def _check_states(self, checkpoint: Checkpoint) -> None:
        """Check that the states are those of the rule, where there are any, and that the loss scale is one."""
        manifest = checkpoint.manifest
        for unit in (unit for unit in self._context.units if unit.trained is not None):
            for name in unit.spec.names:
                here, there = ({s.name for s in states} for states in (unit.rule.states, manifest.states_of(name)))
                if here != there and manifest.parameters[name].has_state:
                    raise checkpoint.fail(
                        f"parameters.{name}.states",
                        f"are {sorted(there)} of {manifest.rule}, and {unit.rule.name} has {sorted(here)}. Prepare "
                        "with the optimizer that it was saved from.",
                    )
        for name, saved in manifest.parameters.items():
            # The count of steps is stored with the parameter. A rule may keep it among its scalars as well.
            if saved.scalars and saved.scalars.keys() - {"step"} != {*self._context.rule.scalar_names} - {"step"}:
                raise checkpoint.fail(f"parameters.{name}.scalars", f"are not those of {self._context.rule.name}.")
        loss = self._context.gradient_scale.loss
        if loss is not None and manifest.loss_scale is not None:
            if manifest.loss_scale.keys() != loss.state().keys():
                raise checkpoint.fail("loss_scale", f"has {sorted(manifest.loss_scale)}.")
            if min(manifest.loss_scale["value"], manifest.loss_scale["next"]) <= 0:
                raise checkpoint.fail("loss_scale", "is not above 0.")

    def _read_groups(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """Read the options of each param group."""
        names = {parameter.tensor: parameter.name for unit in self._context.units for parameter in unit.parameters}
        here = [{names[p] for p in group["params"]} for group in self._context.param_groups]
        if not checkpoint.manifest.groups:
            raise checkpoint.fail(
                "groups",
                "are none: it was saved by prepare(model, None), without an optimizer. Make weights of it with "
                "penstock.export(), and train from those: prepare(weights=...).",
            )
        if here != [set(group.parameters) for group in checkpoint.manifest.groups]:
            raise checkpoint.fail("groups", "divides the parameters otherwise. Build the param groups alike.")
        options = []
        for number, (own, group) in enumerate(zip(self._context.param_groups, checkpoint.manifest.groups, strict=True)):
            loaded = checkpoint.value(f"groups[{number}].options", group.options)
            if not isinstance(loaded, dict):
                raise checkpoint.fail(f"groups[{number}].options", "is not an object.")
            options.append({name: value for name, value in own.items() if name != "params"} | loaded)
        try:
            self._updater.check_groups(options)
        except ConfigError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            raise checkpoint.fail("groups", f"has an option that cannot be ({error}). Load another one.") from error
        return options

    def _read_buffers(self, checkpoint: Checkpoint, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read the values of every buffer of the model's state."""
        values = {}
        shapes: dict[Tensor, torch.Size] = {}
        for name, buffer in persistent_buffers(self._context.model).items():
            key = checkpoint.manifest.buffers.get(name, "")
            value = own.get(key, checkpoint.tensors.get(key))
            if value is None:
                raise checkpoint.fail(f"buffers.{name}", "is missing.")
            values[name] = from_tensor(key, value)
            why = why_no_fit(buffer, values[name])
            if why is None and values[name].shape != buffer.shape and self._shares_memory(buffer):
                shapes_of = f"has shape {tuple(values[name].shape)}, not {tuple(buffer.shape)}"
                why = f"{shapes_of}, and the buffer shares its memory with another tensor of the model"
            if shapes.setdefault(buffer, values[name].shape) != values[name].shape:
                why = (
                    f"has shape {tuple(values[name].shape)}, and is the same tensor here as one of another shape there"
                )
            if why is not None:
                raise checkpoint.fail(f"buffers.{name}", f"{why}. Load it into the model that it was saved of.")
            if values[name].shape != buffer.shape:  # allocated before anything changes
                values[name] = values[name].to(buffer.device, buffer.dtype, copy=True)
        return values

    def _shares_memory(self, buffer: Tensor) -> bool:
        """Return True if another parameter or buffer shares a buffer's memory."""
        tensors = itertools.chain(self._context.model.parameters(), self._context.model.buffers())
        storages = (t.untyped_storage() for t in tensors if t is not buffer and t.layout == torch.strided)
        own = buffer.untyped_storage().data_ptr()
        return own != 0 and any(storage.data_ptr() == own for storage in storages)

    def _read_random(self, checkpoint: Checkpoint) -> Sequence[Callable[[], object]]:
        """Read the random states of the same rank. A rank without saved states keeps its own.

        So does a model without an optimizer: the states belong to the run of another model.
        """
        rank = self._context.ranks.number
        if not self._context.trains or rank >= len(checkpoint.tables) or checkpoint.tables[rank].random is None:
            return ()
        file = checkpoint.folder / checkpoint.manifest.ranks[rank].table.name
        return decode_random(Field(file, "random", checkpoint.tables[rank].random), self._device)

    def _slots(self) -> dict[str, SlotRange]:
        """List the elements of each parameter in this rank's shards, by name."""
        slots = {}
        for unit in self._context.units:
            for index, start, stop in unit.parts():
                slot = unit.layout.slots[index]
                base = slot.start - unit.own_range[0]
                slots[slot.name] = SlotRange(unit, slot, start - base, stop - base, base)
        return slots

    def _keys(self, checkpoint: Checkpoint, slots: Mapping[str, SlotRange]) -> list[TileKey]:
        """List the tiles that hold elements of this rank's shards. Refuse those that cannot be loaded."""
        checkpoint.check_whole()
        keys = []
        for key in checkpoint.tiles():
            is_needed = False
            for part in key.unit.parts(key.number):
                here = slots.get(part.slot.name)
                if here is not None and next(here.runs(part), None) is not None:
                    is_needed = True
                    if here.unit.trained is not None:
                        self._check_blocks(checkpoint, here, part)
                        _check_grains(checkpoint, key.unit, here, part)
            if is_needed:
                keys.append(key)
        return keys

    def _check_blocks(self, checkpoint: Checkpoint, here: SlotRange, part: SlotPart) -> None:
        """Refuse 8-bit states whose blocks would be cut: codes of two scales cannot become one block exactly."""
        if all(state.scale_name is None for state in (*here.unit.rule.states, *checkpoint.manifest.states)):
            return
        if here.cuts_blocks(part):
            raise checkpoint.fail(
                f"parameters.{here.slot.name}",
                f"has 8-bit states in blocks of {BLOCK_NUMEL} elements, which would be cut when its parts change. Load "
                "it over as many tensor-parallel ranks as it was saved by.",
            )


def _check_grains(checkpoint: Checkpoint, table: UnitTable, here: SlotRange, part: SlotPart) -> None:
    """Refuse states that have fewer values in a tile than the rule reads from it."""
    unit = here.unit
    grains = {
        cell.kind: cell.grain for storage in table.storages if storage.name == OPTIMIZER for cell in storage.cells
    }
    is_whole = not part.inside and part.stop - part.start == part.slot.numel
    for state in unit.rule.states:
        if state.name not in grains:
            continue  # it was frozen there
        grain, needed = grains[state.name], unit.spec.numel_of_its_own(state.name)
        if needed is None:
            why = None if grain == 1 else f"has a value for {grain} elements, and {unit.rule.name} one for each"
        elif not is_whole or BoxExtent.of(part.slot) != BoxExtent.of(here.slot):
            why = "is cut, and its states are of whole parameters"
        elif table.tile_numel // grain < needed:
            why = f"has {table.tile_numel // grain} values, and {unit.rule.name} keeps {needed}"
        else:
            why = None
        if why is not None:
            raise CheckpointError(
                f"'{state.name}' of unit '{table.name}' of {checkpoint.folder} {why}. Load another checkpoint.",
                field="homes",
            )


# ----------------------------------------------------------------------------------------------------------------------
# Tiles of a checkpoint are written into the storage of an engine. Either may have any format.
# ----------------------------------------------------------------------------------------------------------------------


def write_weights(tile: Tile, run: Destination) -> None:
    """Write the parameters and master weights of a run, from any saved format."""
    param, master = tile.values(PARAM), tile.values(MASTER)
    for first, last, weights in run.unit.visit(run.start, run.stop, modify=True):
        inside = slice(run.inside + first - run.start, run.inside + last - run.start)
        _write_piece(weights, None if param is None else param[inside], None if master is None else master[inside])


def _write_piece(weights: WeightRange, param: Tensor | None, master: Tensor | None) -> None:
    written = weights.param if weights.param_staging is None else weights.param_staging
    # Without a master here, the saved parameter is copied: rounding the saved master again could change it.
    is_same = weights.master is None or (master is not None and master.dtype == weights.master.dtype)
    if param is not None and ((param.dtype == written.dtype and is_same) or not written.dtype.is_floating_point):
        written.copy_(param)
        if weights.master is not None and master is not None:
            weights.master.copy_(master)
        if weights.param_staging is not None:
            weights.param.copy_(written)
    elif master is not None and master.dtype == torch.float32:
        weights.write(master)
    else:
        assert param is not None  # `check_whole` has seen to it
        weights.write(read_master(param, master))


def write_averages(tile: Tile, run: Destination) -> None:
    """Write the averages of a run, after its parameters. An average that the tile lacks begins with the parameters."""
    trained = run.unit.trained
    assert trained is not None
    for kind, storage in trained.averages.items():
        saved = tile.values(kind)
        for first, last, (values,) in storage.visit(run.start, run.stop, modify=True):
            if saved is not None:
                values.copy_(saved[run.inside + first - run.start : run.inside + last - run.start])
                continue
            for begin, end, weights in run.unit.visit(first, last):
                values[begin - first : end - first].copy_(weights.read())


def write_states(tile: Tile, run: Destination, saved: Mapping[str, StateSpec], own: Sequence[StateSpec]) -> None:
    """Write the optimizer states of a run from `saved` formats to `own` ones. Parameters that were frozen get zeros."""
    trained = run.unit.trained
    assert trained is not None
    there = tile.storages.get(OPTIMIZER, {})
    of_other_shapes = {
        spec.name: numel for spec in own if (numel := run.unit.spec.numel_of_its_own(spec.name)) is not None
    }
    if of_other_shapes:
        _write_other_shapes(run, there, saved, of_other_shapes)
    for first, last, views in trained.optimizer.visit(run.start, run.stop, modify=True):
        inside = slice(run.inside + first - run.start, run.inside + last - run.start)
        blocks = slice(inside.start // BLOCK_NUMEL, -(-inside.stop // BLOCK_NUMEL))
        states, scales = trained.fields.name(views)
        for spec, values, scale in zip(own, states, scales, strict=True):
            if spec.name in of_other_shapes:
                continue
            if spec.name not in there:  # it was frozen
                values.zero_()
                if scale is not None:
                    scale.zero_()
                continue
            source, was = there[spec.name][inside], saved[spec.name]
            source_scale = there[was.scale_name][blocks] if was.scale_name is not None else None
            if was.dtype == spec.dtype and was.signed == spec.signed:
                values.copy_(source)
                if scale is not None and source_scale is not None:
                    scale.copy_(source_scale)
            else:
                write_state(spec, values, scale, read_state(was, source, source_scale).to(values.device))


def _write_other_shapes(
    run: Destination, there: Mapping[str, Tensor], saved: Mapping[str, StateSpec], numels: Mapping[str, int]
) -> None:
    """Write states without a value for each element. They are stored at the beginning of the parameter's tile."""
    unit, trained = run.unit, run.unit.trained
    assert trained is not None
    for _, _, views in trained.optimizer.visit(run.start, run.start + unit.spec.whole_numel, modify=True):
        for spec, values in zip(unit.rule.states, trained.fields.name(views)[0], strict=True):
            if spec.name in numels:
                values.zero_()
                if spec.name in there:
                    source = there[spec.name][: numels[spec.name]]
                    values[: len(source)].copy_(read_state(saved[spec.name], source, None))
