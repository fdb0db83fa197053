"""Loading: the tiles of a checkpoint find their way by parameter name and element, whatever the layout is now.

1. The first rank says which checkpoints the path stands for; every rank goes by their tokens.
2. Of the newest, read the marker and the tables; everything that can be wrong is found here, and nothing has changed.
   Where the state in memory is worth it, read and verify every tile, too. One that is damaged gives way to the next.
3. For each tile that holds anything of this rank's: read it, verify it, and write what it has into the homes.
4. Step counts, options, buffers, loss scale, random states.

What fails in the last two steps leaves the state in parts (`engine/state/access.py`). Training is refused then, until a
checkpoint has been loaded.
"""

import contextlib
import logging
from collections.abc import Generator
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from penstock.checkpoint.beside import persistent_buffers, write_buffer, write_random
from penstock.checkpoint.folder import named
from penstock.checkpoint.format import Manifest, SavedParameter
from penstock.checkpoint.reader import Checkpoint
from penstock.checkpoint.shared import digest, read_together
from penstock.checkpoint.tiles import Tile, TileReader
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.state.access import StateAccess, check_loadable, state_has_failed, tear
from penstock.engine.state.load_plan import (
    FoundCheckpoint,
    LoadPlan,
    LoadPlanner,
    choose,
    spread,
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


class StateLoader:
    """Puts checkpoints into one engine.

    Arguments:
        access: sets step counts, and waits for what is under way.
        gatherer: hears that parameters have other values.
        reducer: drops the gradients of before.
        updater: says which options of a param group the rule has.
    """

    def __init__(
        self, context: EngineContext, access: StateAccess, gatherer: Gatherer, reducer: Reducer, updater: Updater
    ) -> None:
        self._context = context
        self._access = access
        self._gatherer = gatherer
        self._reducer = reducer
        self._taker = LoadPlanner(context, updater)

    def load(self, path: str | PathLike[str], *, verify: bool | None) -> dict[str, Any]:
        """Load a checkpoint, and return its `extra`. Collective.

        Arguments:
            path: a checkpoint, or what stands for the newest one.
            verify: whether to read everything before the first write; `None`: where the state in memory is worth it.

        Raises:
            CheckpointError: there is none, it is damaged or does not fit.
        """
        failure: Exception | None = None
        try:
            check_loadable(self._context.units)
            if not state_has_failed(self._context.units):
                self._access.finish()  # an update that is under way would write over what is loaded
        except Exception as error:
            failure = error  # told to all in `choose`: raised here, it would leave the other ranks waiting there
        candidates = choose(Path(path), self._context.ranks, failure)
        verify = self._was_trained() if verify is None else verify
        for candidate in candidates:
            with contextlib.ExitStack() as closing:
                flaw, taken = self._examine(candidate, closing, verify=verify)
                if taken is not None:
                    flaw = self._write(taken)
                    if flaw is None:
                        return taken.extra
            assert flaw is not None
            if candidate is candidates[-1]:
                raise flaw
            logger.warning("%s is passed over. %s", candidate.folder, flaw)
        raise AssertionError("there is at least one candidate")

    def _was_trained(self) -> bool:
        """Whether the state in memory is worth more than one read of a checkpoint."""
        return not state_has_failed(self._context.units) and any(map(self._access.has_state, self._access.steps()))

    # Nothing has changed yet

    def _examine(
        self, candidate: FoundCheckpoint, closing: contextlib.ExitStack, *, verify: bool
    ) -> tuple[PenstockError | None, LoadPlan | None]:
        """Find out what is to be written, or why the checkpoint is damaged, on this rank or another one.

        Arguments:
            candidate: the checkpoint.
            closing: is closed when nothing more is read of it.
            verify: whether to read every tile.

        Raises:
            CheckpointError: it is whole, as far as is known, and does not fit.
        """
        taken: LoadPlan | None = None
        damage: Exception | None = None
        failure: Exception | None = None
        try:
            with named("Reading", candidate.folder):
                checkpoint = Checkpoint.read(candidate.folder)
                candidate.check(checkpoint.manifest.token)
                own = (
                    checkpoint.own_tensors(self._context.ranks.number) if self._is_of_as_many_ranks(checkpoint) else {}
                )
        except CheckpointError as error:
            damage = error
        except Exception as error:
            failure = error
        else:
            try:
                self._check_left_out(checkpoint)
                taken = self._taker.take(checkpoint, own)
            except Exception as error:
                failure = error
        self._find_readers(taken, closing)
        if verify and taken is not None:
            try:
                self._verify(taken)
            except CheckpointError as error:
                damage = error
            except Exception as error:
                failure = error
        # No rank writes before all have found theirs good: else some would hold this checkpoint, and others would not.
        flaw = self._agree(failure, damage)
        if flaw is not None:
            return flaw, None
        assert taken is not None
        self._tell_of_buffers(taken)
        self._tell_of_averages(taken.checkpoint)
        return None, taken

    def _check_left_out(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that has not the values of a unit which are in parts: those that it leaves out stay."""
        saved = checkpoint.manifest.parameters
        kept = [u for u in self._context.units if any(n in saved and saved[n].left_out for n in u.spec.names)]
        if state_has_failed(kept):
            raise checkpoint.fail(
                "parameters",
                "leaves out frozen ones, and their state is in parts. Load one that was saved whole, or prepare the "
                "model again.",
            )

    def _agree(self, failure: Exception | None, damage: Exception | None) -> PenstockError | None:
        """Raise where any rank has failed; return what any rank has found damaged. Collective."""
        # Both on every rank, whatever each has found: one that left after the first would be waited for at the second.
        self._context.ranks.control_group.agree(failure)
        try:
            self._context.ranks.control_group.agree(damage)
        except CheckpointError as error:
            return error
        except PenstockError as error:  # of another rank
            return CheckpointError(str(error))
        return None

    def _find_readers(self, taken: LoadPlan | None, closing: contextlib.ExitStack) -> None:
        """Find the ranks of this host that read the same tiles: copies of the same shard. Collective."""
        self._readers: LocalRanks | None = None
        if self._context.ranks.replicas == 1:
            return
        what = "" if taken is None else digest([key for key, _ in taken.plan])
        self._readers = LocalRanks.that_read(what, self._context.ranks, self._context.streams.device, whole=False)
        if self._readers is not None:
            closing.callback(self._readers.close)

    def _tiles(self, reader: TileReader, taken: LoadPlan) -> Generator[Tile]:
        """Read what is to be written, in order."""
        keys = [key for key, _ in taken.plan]
        if self._readers is None:
            yield from reader.read(keys)
        else:
            yield from read_together(reader, keys, self._readers)

    def _verify(self, taken: LoadPlan) -> None:
        with TileReader() as reader:
            for _ in self._tiles(reader, taken):
                pass

    def _is_of_as_many_ranks(self, checkpoint: Checkpoint) -> bool:
        return len(checkpoint.manifest.ranks) == self._context.ranks.world_size

    def _tell_of_buffers(self, taken: LoadPlan) -> None:
        """Say which buffers get another shape, and where those of single ranks cannot go back to them."""
        checkpoint = taken.checkpoint
        ranks = checkpoint.manifest.ranks
        apart = sum(files.tensors is not None for files in ranks)
        if self._context.ranks.number != 0:
            return
        for name, buffer in persistent_buffers(self._context.model).items():
            shape = tuple(taken.buffers[name].shape)
            if shape != buffer.shape:
                logger.warning(
                    "%s has the buffer '%s' in shape %s, not %s: it takes that shape. If that is not meant, build the "
                    "model as it was when it was saved.",
                    checkpoint.folder,
                    name,
                    shape,
                    tuple(buffer.shape),
                )
        if apart and not self._is_of_as_many_ranks(checkpoint):
            logger.warning(
                "%s was saved by %d ranks, %d of which had buffers of their own (such as statistics of batches). All "
                "%d ranks take those of the first one.",
                checkpoint.folder,
                len(ranks),
                apart,
                self._context.ranks.world_size,
            )

    def _tell_of_averages(self, checkpoint: Checkpoint) -> None:
        """Say which averages of the parameters are here and not there, or there and not here."""
        here = {kind for unit in self._context.units if unit.trained is not None for kind in unit.trained.averages}
        there = checkpoint.averages
        if self._context.ranks.number != 0:
            return
        for kind in sorted(here - there):
            logger.warning("%s has no average '%s': it begins with the parameters.", checkpoint.folder, kind)
        for kind in sorted(there - here):
            logger.warning(
                "%s has an average '%s', which is not loaded: nobody has it here. Make the penstock.EMA before load().",
                checkpoint.folder,
                kind,
            )

    # Changes

    def _write(self, taken: LoadPlan) -> PenstockError | None:
        """Write everything; return why the checkpoint is damaged after all. The state is in parts then.

        Raises:
            Exception: something else failed. The state is in parts then, too.
        """
        failure: Exception | None = None
        damage: Exception | None = None
        try:
            with named("Reading", taken.checkpoint.folder):
                self._read_tiles(taken)
        except CheckpointError as error:
            damage = error
        except Exception as error:
            failure = error
        except BaseException as interrupt:  # the other ranks are to hear of it
            failure = EngineError(f"Loading was interrupted ({type(interrupt).__name__}).")
            failure.__cause__ = interrupt
        try:
            # Before anything counts as written: a rank whose tiles failed would train on beside ranks that have theirs.
            flaw = self._agree(failure, damage)
            if flaw is None:
                self._count_as_written(taken.checkpoint.manifest)
                self._replace(taken)
                return None
        except BaseException as error:
            torn = self._tear(error, taken.checkpoint)
            cause = error.__cause__
            if failure is not None and cause is not None and not isinstance(cause, Exception):
                raise cause from None  # the interrupt
            if torn is error or not isinstance(error, Exception):
                raise
            raise torn from error
        self._tear(flaw, taken.checkpoint)  # on every rank: those that found no damage have tiles of it too
        return flaw

    def _tear(self, error: BaseException, checkpoint: Checkpoint) -> BaseException:
        """Have whoever needs a unit get an error: writing has failed in the middle. Returns that error."""
        if not isinstance(error, CheckpointError):
            torn = CheckpointError(
                f"The state is in parts: loading {checkpoint.folder} failed in the middle. Load a checkpoint, or close "
                f"the optimizer with keep_params=False. ({str(error) or type(error).__name__})",
                file=str(checkpoint.folder),
            )
            torn.__cause__ = error
            error = torn
        # What the checkpoint leaves out nothing has written: another one that leaves it out too can still be loaded.
        saved = checkpoint.manifest.parameters
        tear((u for u in self._context.units if not all(saved[name].left_out for name in u.spec.names)), error)
        return error

    def _read_tiles(self, taken: LoadPlan) -> None:
        states = {state.name: state for state in taken.checkpoint.manifest.states}
        with TileReader() as reader, contextlib.closing(self._tiles(reader, taken)) as tiles:
            for tile, (_, runs) in zip(tiles, taken.plan, strict=True):
                for run in spread(runs):
                    write_weights(tile, run)
                    if run.unit.trained is not None:
                        write_states(tile, run, states, run.unit.rule.states)
                        write_averages(tile, run)

    def _replace(self, taken: LoadPlan) -> None:
        """Replace what is no tile: options, buffers, loss scale, random states."""
        for group, options in zip(self._context.param_groups, taken.groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(options, params=parameters)
        for name, buffer in persistent_buffers(self._context.model).items():
            write_buffer(buffer, taken.buffers[name])
        manifest = taken.checkpoint.manifest
        if self._context.gradient_scale.loss is not None and manifest.loss_scale is not None:
            self._context.gradient_scale.loss.restore(manifest.loss_scale)
        if taken.random is not None:
            write_random(taken.random, self._context.streams.device)

    def _count_as_written(self, manifest: Manifest) -> None:
        """Let what is in the homes count: the rest of the engine takes note of it."""
        for unit in self._context.units:
            averages = unit.trained.averages.values() if unit.trained is not None else ()
            for home in (*unit.updated_homes, *averages):
                home.note_write(DONE)  # in place of the error of a torn state, which everybody would meet
            unit.count_writes()  # a graph from before reads other weights: its backward is refused
            # Each rank has written its own part of a replica: those of the others are old until they are gathered.
            unit.outdate_parts()
            if unit.trained is not None:
                for parameter in unit.parameters:
                    self._restore_counts(parameter.tensor, manifest.parameters[parameter.name])
            self._gatherer.outdate(unit)
            if unit.resident:  # on every rank in this order: it may be a collective
                self._gatherer.acquire(unit)
        self._reducer.zero()  # gradients of other weights; waits for work that still writes them
        self._context.gradient_scale.renew()

    def _restore_counts(self, parameter: nn.Parameter, saved: SavedParameter) -> None:
        self._access.restore_counts(
            parameter, step=saved.step, scalars=saved.scalars, has_state=saved.has_state and saved.step == 0
        )
