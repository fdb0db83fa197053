"""Loading: elements are found by parameter name and index, so the layout may be another than at the save.

1. The first rank lists the checkpoints that the path stands for. Every rank follows it, by their tokens.
2. Read the marker and the tables of the newest one, and check everything but the tiles. Nothing has changed so far. If
   the state in memory has been trained, read and verify every tile, too. A damaged checkpoint is passed over.
3. Read, verify and write each tile that holds elements of this rank's shards.
4. Restore step counts, options, buffers, loss scale, random states.

A failure in the last two steps leaves failed state (`engine/state/access.py`). Training is refused then, until a
checkpoint has been loaded.
"""

import contextlib
import logging
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.checkpoint.beside import persistent_buffers, write_buffer
from penstock.checkpoint.format import Manifest, named
from penstock.checkpoint.reader import Checkpoint, stands_for
from penstock.checkpoint.tiles import TileReader, digest, read_together
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.state.access import StateAccess, check_loadable, mark_failed, state_has_failed
from penstock.engine.state.load_plan import (
    LoadPlan,
    LoadPlanner,
    write_averages,
    write_states,
    write_weights,
)
from penstock.engine.step.context import EngineContext
from penstock.engine.step.update import Updater
from penstock.errors import CheckpointError, EngineError, PenstockError
from penstock.runtime.collectives import LocalRanks
from penstock.runtime.streams import DONE

logger = logging.getLogger("penstock")


class _DamagedError(Exception):
    """Raised on every rank if one has found the checkpoint damaged. All of them try the one before."""

    def __init__(self, flaw: CheckpointError) -> None:
        super().__init__(str(flaw))
        self.flaw = flaw


class StateLoader:
    """Load checkpoints into one engine.

    Arguments:
        access: sets step counts, and waits for pending updates.
        gatherer: is told that parameters have other values.
        reducer: drops the gradients of the state before.
        updater: checks the options of param groups.
    """

    def __init__(
        self, context: EngineContext, access: StateAccess, gatherer: Gatherer, reducer: Reducer, updater: Updater
    ) -> None:
        self._context = context
        self._access = access
        self._gatherer = gatherer
        self._reducer = reducer
        self._planner = LoadPlanner(context, updater)

    def load(self, path: str | PathLike[str], *, verify: bool | None) -> dict[str, Any]:
        """Load a checkpoint, and return its `extra`. Collective.

        Arguments:
            path: a checkpoint, a folder of some, or `latest` in it.
            verify: read everything before the first write. `None`: if the state in memory has been trained.

        Raises:
            CheckpointError: there is none, it is damaged or does not fit.
        """
        path, control_group = Path(path), self._context.ranks.control_group
        with control_group.together("load()"):
            check_loadable(self._context.units)
            if not state_has_failed(self._context.units):
                self._access.finish()  # a pending update would write over loaded values (ordering rule 3)
            parent, found = stands_for(path) if control_group.is_first else (path, [])
        # Ranks could see different newest ones: a save ends at another time on each, and file systems show new files
        # late.
        beside, found = control_group.share([parent != path, found])
        verify = self._was_trained() if verify is None else verify
        for number, (name, token) in enumerate(found, 1):
            folder = (path.parent if beside else path) / name
            try:
                return self._load(folder, token, verify=verify)
            except _DamagedError as damaged:
                flaw = damaged.flaw
            if number == len(found):
                raise flaw
            logger.warning("%s is passed over. %s", folder, flaw)
        raise AssertionError("there is at least one checkpoint")

    def _was_trained(self) -> bool:
        """Return True if the state in memory is whole and has been trained."""
        return not state_has_failed(self._context.units) and any(map(self._access.has_state, self._access.steps()))

    def _load(self, folder: Path, token: str, *, verify: bool) -> dict[str, Any]:
        """Load the checkpoint that has this token on the first rank. No rank writes before all have checked it."""
        with self._finding_damage(), named("Reading", folder):
            checkpoint = Checkpoint.read(folder)
            if checkpoint.manifest.token != token:
                raise CheckpointError(
                    f"{folder} is another checkpoint on this rank ({checkpoint.manifest.token}) than on the first "
                    f"({token}). Give all ranks the path of one checkpoint, on a file system that they share.",
                    file=str(folder),
                    field="token",
                )
            own = checkpoint.own_tensors(self._context.ranks.number) if self._is_of_as_many_ranks(checkpoint) else {}
        with self._context.ranks.control_group.together("load()"):
            self._check_left_out(checkpoint)
            taken = self._planner.take(checkpoint, own)
        with contextlib.ExitStack() as closing:
            readers = self._find_readers(taken, closing)
            if verify:
                with self._finding_damage():
                    self._verify(taken, readers)
            if self._context.ranks.number == 0:
                self._warn_of_buffers(taken)
                self._warn_of_averages(checkpoint)
            self._write(taken, readers)
        return taken.extra

    @contextlib.contextmanager
    def _finding_damage(self) -> Iterator[None]:
        """Stop every rank at the end of a block where one fails in it. Collective.

        Raises:
            _DamagedError: a rank has found the checkpoint damaged.
        """
        control_group, damage = self._context.ranks.control_group, None
        with control_group.together("load()"):
            try:
                yield
            except CheckpointError as error:
                damage = error
        try:
            control_group.agree(damage)
        except PenstockError as error:
            raise _DamagedError(error if isinstance(error, CheckpointError) else CheckpointError(str(error))) from error

    def _check_left_out(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that leaves out the values of a unit whose state has failed."""
        saved = checkpoint.manifest.parameters
        kept = [u for u in self._context.units if any(n in saved and saved[n].left_out for n in u.spec.names)]
        if state_has_failed(kept):
            raise checkpoint.fail(
                "parameters",
                "leaves out frozen ones, and their state is in parts. Load one that was saved whole, or prepare the "
                "model again.",
            )

    def _find_readers(self, taken: LoadPlan, closing: contextlib.ExitStack) -> LocalRanks | None:
        """Find the ranks of this host that read the same tiles, as they have copies of one shard. Collective."""
        if self._context.ranks.replicas == 1:
            return None
        device = self._context.streams.device
        readers = LocalRanks.that_read(digest(taken.keys), self._context.ranks, device, whole=False)
        if readers is not None:
            closing.callback(readers.close)
        return readers

    def _verify(self, taken: LoadPlan, readers: LocalRanks | None) -> None:
        with TileReader() as reader:
            for _ in read_together(reader, taken.keys, readers):
                pass

    def _is_of_as_many_ranks(self, checkpoint: Checkpoint) -> bool:
        return len(checkpoint.manifest.ranks) == self._context.ranks.world_size

    def _warn_of_buffers(self, taken: LoadPlan) -> None:
        """Warn about buffers that get another shape, and buffers of single ranks that cannot return to them."""
        checkpoint = taken.checkpoint
        ranks = checkpoint.manifest.ranks
        apart = sum(files.tensors is not None for files in ranks)
        for name, buffer in persistent_buffers(self._context.model).items():
            shape = tuple(taken.buffers[name].shape)
            if shape != buffer.shape:
                logger.warning(
                    f"{checkpoint.folder} has the buffer '{name}' in shape {shape}, not {tuple(buffer.shape)}: it "
                    "takes that shape. If that is not meant, build the model as it was when it was saved."
                )
        if apart and not self._is_of_as_many_ranks(checkpoint):
            logger.warning(
                f"{checkpoint.folder} was saved by {len(ranks)} ranks, {apart} of which had buffers of their own (such "
                f"as statistics of batches). All {self._context.ranks.world_size} ranks take those of the first one."
            )

    def _warn_of_averages(self, checkpoint: Checkpoint) -> None:
        """Warn about averages of the parameters that only the engine has, or only the checkpoint."""
        here = {kind for unit in self._context.units if unit.trained is not None for kind in unit.trained.averages}
        there = checkpoint.averages
        for kind in sorted(here - there):
            logger.warning(f"{checkpoint.folder} has no average '{kind}': it begins with the parameters.")
        for kind in sorted(there - here):
            logger.warning(
                f"{checkpoint.folder} has an average '{kind}', which is not loaded: nobody has it here. Make the "
                "penstock.EMA before load()."
            )

    # Changes

    def _write(self, taken: LoadPlan, readers: LocalRanks | None) -> None:
        """Write everything.

        Raises:
            _DamagedError: a tile is damaged. The state has failed then.
            Exception: something else failed. The state has failed then, too.
        """
        interrupt: BaseException | None = None
        try:
            with self._finding_damage(), named("Reading", taken.checkpoint.folder):
                try:
                    self._read_tiles(taken, readers)
                except Exception:
                    raise
                except BaseException as error:  # an interrupt, which the other ranks are told of
                    interrupt = error
                    raise EngineError(f"Loading was interrupted ({type(error).__name__}).") from error
            # After all ranks have read theirs: otherwise some would train on with the state of before.
            self._count_as_written(taken.checkpoint.manifest)
            self._replace(taken)
        except BaseException as error:
            # On every rank: those that found no damage have written tiles of the checkpoint too.
            torn = self._tear(error.flaw if isinstance(error, _DamagedError) else error, taken.checkpoint)
            if interrupt is not None:
                raise interrupt from None
            if torn is error or isinstance(error, _DamagedError) or not isinstance(error, Exception):
                raise
            raise torn from error

    def _tear(self, error: BaseException, checkpoint: Checkpoint) -> BaseException:
        """Mark the state as failed, because writing has stopped in the middle. Return the error of its later uses."""
        if not isinstance(error, CheckpointError):
            torn = CheckpointError(
                f"The state is in parts: loading {checkpoint.folder} failed in the middle. Load a checkpoint, or close "
                f"the optimizer with keep_params=False. ({str(error) or type(error).__name__})",
                file=str(checkpoint.folder),
            )
            torn.__cause__ = error
            error = torn
        # Units that the checkpoint leaves out were not written: one that leaves them out too can still be loaded.
        saved = checkpoint.manifest.parameters
        mark_failed((u for u in self._context.units if not all(saved[name].left_out for name in u.spec.names)), error)
        return error

    def _read_tiles(self, taken: LoadPlan, readers: LocalRanks | None) -> None:
        states = {state.name: state for state in taken.checkpoint.manifest.states}
        with TileReader() as reader, contextlib.closing(read_together(reader, taken.keys, readers)) as tiles:
            for tile in tiles:
                for run in taken.runs(tile.key):
                    write_weights(tile, run)
                    if run.unit.trained is not None:
                        write_states(tile, run, states, run.unit.rule.states)
                        write_averages(tile, run)

    def _replace(self, taken: LoadPlan) -> None:
        """Replace the state that is in no tile: options, buffers, loss scale, random states."""
        for group, options in zip(self._context.param_groups, taken.groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(options, params=parameters)
        for name, buffer in persistent_buffers(self._context.model).items():
            write_buffer(buffer, taken.buffers[name])
        manifest = taken.checkpoint.manifest
        if self._context.gradient_scale.loss is not None and manifest.loss_scale is not None:
            self._context.gradient_scale.loss.restore(manifest.loss_scale)
        for set_generator in taken.random:
            set_generator()

    def _count_as_written(self, manifest: Manifest) -> None:
        """Tell the rest of the engine that all storages have new values."""
        for unit in self._context.units:
            averages = unit.trained.averages.values() if unit.trained is not None else ()
            for storage in (*unit.updated_storages, *averages):
                storage.note_write(DONE)  # in place of the error of failed state, which every use would raise
            unit.count_writes()  # refuses the backward of a graph that has read other weights
            # Each rank has written its own shard of a replica: the others are outdated until they are gathered.
            unit.outdate_parts()
            if unit.trained is not None:
                for parameter in unit.parameters:
                    self._access.restore_counts(parameter.tensor, manifest.parameters[parameter.name])
            self._gatherer.outdate(unit)
            if unit.resident:  # on every rank in this order: it may be a collective (ordering rule 4)
                self._gatherer.acquire(unit)
        self._reducer.zero()  # of the weights before; waits for work that still writes them
        self._context.gradient_scale.renew()
