"""Loading: the tiles of a checkpoint find their way by parameter name and element, whatever the layout is now.

1. Read the marker and the tables; everything that can be wrong is found here, and nothing has changed.
2. For each tile that holds anything of this rank's: read it, verify it, and write what it has into the homes.
3. Step counts, options, buffers, loss scale, random states.

A tile that turns out to be damaged in the second step leaves the state in parts. Training is refused then, until
another checkpoint has been loaded.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.checkpoint.beside import persistent_buffers
from penstock.checkpoint.fields import Field
from penstock.checkpoint.manifest import Manifest, SavedParameter
from penstock.checkpoint.opened import Checkpoint
from penstock.checkpoint.randomness import RandomStates, decode_random, write_random
from penstock.checkpoint.reading import Tile, TileKey, TileReader
from penstock.checkpoint.tables import pieces
from penstock.engine.access import Access
from penstock.engine.gather import Gatherer
from penstock.engine.reduce import Reducer
from penstock.engine.scale import GradientScale
from penstock.engine.unit import Unit, Weights
from penstock.engine.update import Updater
from penstock.errors import ConfigError
from penstock.kinds import MASTER, OPTIMIZER, PARAM
from penstock.layout import ALIGNMENT_NUMEL
from penstock.machine.collectives import Ranks
from penstock.machine.streams import DONE, FailedEvent, Streams
from penstock.rules.master import read_master, write_master
from penstock.rules.rule import BLOCK_NUMEL, Rule, StateSpec
from penstock.rules.storage import read_state, write_state

_MOST_NAMED = 8


class Run(NamedTuple):
    """Elements `start` to `stop` of a unit's shard, which a tile holds from its element `inside` on."""

    unit: Unit
    start: int
    stop: int
    inside: int


#: What is read, in order, and where it goes.
Plan = list[tuple[TileKey, list[Run]]]


class Loader:
    """Puts checkpoints into one engine."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        ranks: Ranks,
        streams: Streams,
        access: Access,
        gatherer: Gatherer,
        reducer: Reducer,
        updater: Updater,
        *,
        rule: Rule,
        gradient_scale: GradientScale,
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        self._model = model
        self._units = units
        self._ranks = ranks
        self._streams = streams
        self._access = access
        self._gatherer = gatherer
        self._reducer = reducer
        self._updater = updater
        self._rule = rule
        self._gradient_scale = gradient_scale
        self._param_groups = param_groups
        self._torn = False

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint; returns its `extra`. Collective.

        Raises:
            CheckpointError: it is none, is damaged or does not fit.
        """
        failure: Exception | None = None
        try:
            checkpoint = Checkpoint.open(path)
            self._check_parameters(checkpoint)
            self._check_states(checkpoint)
            groups = self._read_groups(checkpoint)
            buffers = self._read_buffers(checkpoint)
            extra: dict[str, Any] = checkpoint.value("extra", checkpoint.manifest.extra)
            if not isinstance(extra, dict):
                raise checkpoint.fail("extra", "is not an object.")
            plan = self._plan(checkpoint)
            random = self._read_random(checkpoint)
        except Exception as error:
            failure = error
        self._ranks.council.agree(failure)

        if not self._torn:
            self._access.finish()
        try:
            self._read_tiles(checkpoint, plan)
        except Exception as error:
            failure = error
        try:
            self._ranks.council.agree(failure)
        except Exception as error:
            self._tear(error)
            raise
        self._settle(checkpoint.manifest)
        for group, options in zip(self._param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(options, params=parameters)
        for name, buffer in persistent_buffers(self._model).items():
            buffer.copy_(buffers[name])
        if self._gradient_scale.loss is not None and checkpoint.manifest.loss_scale is not None:
            self._gradient_scale.loss.restore(checkpoint.manifest.loss_scale)
        if random is not None:
            write_random(random, self._streams.device)
        return extra

    # Checks: nothing has changed yet

    def _check_parameters(self, checkpoint: Checkpoint) -> None:
        """Names, shapes and kinds of dtypes."""
        saved = checkpoint.manifest.parameters
        own = {
            slot.name: (slot.shape, unit.spec.dtype.is_floating_point)
            for unit in self._units
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
        """Those of the rule, where there are any, and the loss scale."""
        manifest = checkpoint.manifest
        here, there = ({state.name for state in states} for states in (self._rule.states, manifest.states))
        if here != there and any(saved.has_state for saved in manifest.parameters.values()):
            raise checkpoint.fail(
                "states",
                f"are {sorted(there)} of {manifest.rule}, and {self._rule.name} has {sorted(here)}. Prepare "
                "with the optimizer that it was saved from.",
            )
        for name, saved in manifest.parameters.items():
            if saved.scalars and saved.scalars.keys() != set(self._rule.scalar_names):
                raise checkpoint.fail(f"parameters.{name}.scalars", f"are not those of {self._rule.name}.")
        loss = self._gradient_scale.loss
        if loss is not None and manifest.loss_scale is not None:
            if manifest.loss_scale.keys() != loss.state().keys():
                raise checkpoint.fail("loss_scale", f"has {sorted(manifest.loss_scale)}.")
            if min(manifest.loss_scale["value"], manifest.loss_scale["next"]) <= 0:
                raise checkpoint.fail("loss_scale", "is not above 0.")

    def _read_groups(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """The options of each param group."""
        pairs = [pair for unit in self._units for pair in zip(unit.spec.parameters, unit.spec.names, strict=True)]
        names = dict(pairs)
        here = [{names[p] for p in group["params"]} for group in self._param_groups]
        if here != [set(group.parameters) for group in checkpoint.manifest.groups]:
            raise checkpoint.fail("groups", "divides the parameters otherwise. Build the param groups alike.")
        options = []
        for number, (own, group) in enumerate(zip(self._param_groups, checkpoint.manifest.groups, strict=True)):
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

    def _read_buffers(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The values of every buffer of the model's state."""
        values = {}
        for name, buffer in persistent_buffers(self._model).items():
            key = checkpoint.manifest.buffers.get(name)
            value = checkpoint.tensors.get(key) if key is not None else None
            if value is None:
                raise checkpoint.fail(f"buffers.{name}", "is missing.")
            if value.shape != buffer.shape:
                raise checkpoint.fail(f"buffers.{name}", f"has shape {tuple(value.shape)}, not {tuple(buffer.shape)}.")
            values[name] = value
        return values

    def _read_random(self, checkpoint: Checkpoint) -> RandomStates | None:
        """Those of the same rank; one that was not there, or has saved none, goes on with what it has."""
        rank = self._ranks.shard_rank + self._ranks.shards * self._ranks.replica_rank
        if rank >= len(checkpoint.tables) or checkpoint.tables[rank].random is None:
            return None
        file = checkpoint.folder / checkpoint.manifest.ranks[rank].table.name
        return decode_random(Field(file, "random", checkpoint.tables[rank].random), self._streams.device)

    def _plan(self, checkpoint: Checkpoint) -> Plan:
        """What of each tile goes where. Every element of this rank's shards comes from one place."""
        places: dict[str, tuple[Unit, int, int, int]] = {}  # by name: unit, own elements, and where the slot begins
        for unit in self._units:
            for index, start, stop in unit.parts():
                slot = unit.layout.slots[index]
                base = slot.start - unit.own_range[0]
                places[slot.name] = unit, start - base, stop - base, base
        plan: Plan = []
        covered: dict[str, list[tuple[int, int]]] = {name: [] for name in places}
        for key in checkpoint.tiles():
            runs: list[Run] = []
            for piece in pieces(key.unit, key.number):
                if piece.name not in places:
                    continue
                unit, first, last, base = places[piece.name]
                start, stop = max(piece.start, first), min(piece.stop, last)
                if start < stop:
                    covered[piece.name].append((start, stop))
                    _append(runs, Run(unit, start + base, stop + base, piece.inside + start - piece.start))
            if runs:
                plan.append((key, runs))
        for name, (_, first, last, _) in places.items():
            checkpoint.check_covered(name, covered[name], first, last)
        self._check_kinds(checkpoint, plan)
        return plan

    def _check_kinds(self, checkpoint: Checkpoint, plan: Plan) -> None:
        """Each tile has the kinds that its parameters need, in the dtypes that they can have."""
        for unit in {id(key.unit): key.unit for key, _ in plan}.values():
            checkpoint.check_kinds(unit)

    # Changes

    def _read_tiles(self, checkpoint: Checkpoint, plan: Plan) -> None:
        states = {state.name: state for state in checkpoint.manifest.states}
        with TileReader() as reader:
            for tile, (_, runs) in zip(reader.read([key for key, _ in plan]), plan, strict=True):
                for run in runs:
                    _write_weights(tile, run)
                    if run.unit.trained is not None:
                        self._write_states(tile, run, states)

    def _write_states(self, tile: Tile, run: Run, saved: Mapping[str, StateSpec]) -> None:
        trained = run.unit.trained
        assert trained is not None
        there = tile.homes.get(OPTIMIZER, {})
        for first, last, views in trained.optimizer.visit(run.start, run.stop, modify=True):
            inside = slice(run.inside + first - run.start, run.inside + last - run.start)
            blocks = slice(inside.start // BLOCK_NUMEL, -(-inside.stop // BLOCK_NUMEL))
            states, scales = trained.fields.name(views)
            for spec, values, scale in zip(self._rule.states, states, scales, strict=True):
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

    def _tear(self, error: Exception) -> None:
        """The state is in parts: whoever needs a unit gets the error."""
        self._torn = True
        for unit in self._units:
            unit.published = FailedEvent(error)
            if unit.trained is not None:
                unit.trained.updated = FailedEvent(error)

    def _settle(self, manifest: Manifest) -> None:
        """What is in the homes is whole: the rest of the engine takes note."""
        self._torn = False
        for unit in self._units:
            unit.published = DONE
            unit.count_writes(range(len(unit.layout.slots)))
            unit.stale = unit.replica is not None and unit.layout.shards > 1
            if unit.trained is not None:
                unit.trained.updated = DONE
                for parameter, name in zip(unit.spec.parameters, unit.spec.names, strict=True):
                    self._restore_counts(parameter, manifest.parameters[name])
            self._gatherer.outdate(unit)
            if unit.resident:
                self._gatherer.acquire(unit)
        self._reducer.zero(self._units)
        self._gradient_scale.renew()

    def _restore_counts(self, parameter: nn.Parameter, saved: SavedParameter) -> None:
        self._access.restore_counts(
            parameter, step=saved.step, scalars=saved.scalars, has_state=saved.has_state and saved.step == 0
        )


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, or make the last one longer: between neighbouring slots is a gap that holds zeros in every layout."""
    if runs:
        last = runs[-1]
        gap = run.start - last.stop
        alike = run.unit is last.unit and run.start - run.inside == last.start - last.inside
        if alike and 0 <= gap < ALIGNMENT_NUMEL:
            runs[-1] = last._replace(stop=run.stop)
            return
    runs.append(run)


def _write_weights(tile: Tile, run: Run) -> None:
    """Parameters and master, whatever form they had."""
    param, master = tile.homes.get(PARAM, {}).get(PARAM), tile.homes.get(MASTER, {}).get(MASTER)
    for first, last, weights in run.unit.visit(run.start, run.stop, modify=True):
        inside = slice(run.inside + first - run.start, run.inside + last - run.start)
        _write_piece(weights, None if param is None else param[inside], None if master is None else master[inside])


def _write_piece(weights: Weights, param: Tensor | None, master: Tensor | None) -> None:
    written = weights.param if weights.shadow is None else weights.shadow
    if param is not None and param.dtype == written.dtype and _alike(weights.master, master):
        written.copy_(param)
        if weights.master is not None and master is not None:
            weights.master.copy_(master)
    elif param is not None and not written.dtype.is_floating_point:
        written.copy_(param)
    else:
        value = master if master is not None and master.dtype == torch.float32 else read_master(_some(param), master)
        write_master(written, weights.master, value.to(written.device))
    if weights.shadow is not None:
        weights.param.copy_(written)


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None and other is None) or (one is not None and other is not None and one.dtype == other.dtype)


def _some(param: Tensor | None) -> Tensor:
    assert param is not None
    return param
