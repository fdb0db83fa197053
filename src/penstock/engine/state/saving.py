"""Saving: the content of a checkpoint, and the thread that writes it while training goes on.

1. Draw up the table of tiles, and copy everything small: step counts, options, buffers, random states. The first rank
   makes the folder.
2. Ranks agree, and take the first one's token.
3. Write tiles, unit by unit, in forward order. An update of a unit waits until its tiles have been copied.
4. Once every rank has its files on the disk, the first one writes the marker.

Steps 3 and 4 run on a thread of their own unless the caller waits for them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from penstock.checkpoint import folder as folders
from penstock.checkpoint.beside import fingerprint, other_than, persistent_buffers, read_random, to_tensors
from penstock.checkpoint.format import Manifest, SavedGroup, SavedParameter, encode, named
from penstock.checkpoint.pretrained import describe
from penstock.checkpoint.reader import LATEST, next_serial
from penstock.checkpoint.save import Save, check_seen
from penstock.checkpoint.tables import BoxExtent, HomeTable, draw_table, kept_storages
from penstock.checkpoint.tiles import RingMemory, UnitSource
from penstock.config import MASTER, OPTIMIZER, PARAM
from penstock.engine.state.access import StateAccess
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.unit import Unit
from penstock.errors import ConfigError, EngineError
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.streams import HostEvent, HostWorker, Work, all_of
from penstock.tiers.storage import Storage

#: What a save does while another one is running.
IfBusy = Literal["wait", "raise"]


class _RunningSave(HostEvent):
    """The completion of a save that runs on a thread beside training.

    However the save ends, also if it never begins, updates no longer wait for its copies afterwards.
    """

    def __init__(self, save: Save, worker: HostWorker) -> None:
        super().__init__()
        self.save = save
        self.worker = worker

    def run_from(self, box: list[Work]) -> None:
        """Run the save, and keep its error for `finish`."""
        try:
            super().run_from(box)
        finally:
            self.settle()

    def settle(self) -> None:
        """Release the threads that wait for the save or for its copies."""
        super().settle()
        for source in self.save.sources:
            source.copied.settle()


class StateSaver:
    """Save one engine's state. One save runs at a time.

    Arguments:
        access: has the step counts, and the set of parameters with state.
        control_group: one for saves alone, as they run beside the user's thread.
    """

    def __init__(self, context: EngineContext, access: StateAccess, control_group: ControlGroup) -> None:
        self._context = context
        self._access = access
        self._control_group = control_group
        self._job: _RunningSave | None = None

    def save(
        self,
        path: str | PathLike[str],
        *,
        extra: Mapping[str, Any] | None,
        blocking: bool,
        keep: int | None,
        if_busy: IfBusy,
        frozen: bool,
    ) -> None:
        """Save a checkpoint. Return once it is written, or once everything small is copied. Collective.

        Raises:
            ConfigError: the request cannot be met. Nothing was written.
            CheckpointError: a file could not be written. Checkpoints that were whole still are.
            EngineError: another save is running, and `if_busy="raise"`.
        """
        _check_request(path, keep, if_busy)
        if not frozen and all(unit.trained is None for unit in self._context.units):
            raise ConfigError("save(frozen=False): nothing of this model is trained, so nothing would be saved.")
        if if_busy == "raise" and self._runs_anywhere():
            raise EngineError("A checkpoint is still being saved. Wait with synchronize(), or use if_busy='wait'.")
        self.finish()  # messages of two saves would meet on the control group (ordering rule 4)
        folder, worker = Path(path), None
        with contextlib.ExitStack() as undo:
            # A rank that failed here alone would leave the others waiting for it.
            with self._control_group.together("save()"), named("Writing", folder):
                save = self._take(folder, extra or {}, keep, undo, frozen=frozen)
                if not blocking:
                    # A thread of its own: work of a stream would wait behind the disk. Started before ranks agree:
                    # otherwise the others would write, and wait for one that has no thread.
                    alone = self._context.streams.computes_on_host
                    worker = HostWorker("save", promised=f"Saving {folder}", alone=alone)
                    undo.callback(worker.close)
            save = self._agree(save)
            if worker is None:
                save.run()  # no read is noted: the caller writes no storage before it returns
            else:
                self._run_beside_training(save, worker, undo)

    def _take(
        self, folder: Path, extra: Mapping[str, Any], keep: int | None, undo: contextlib.ExitStack, *, frozen: bool
    ) -> Save:
        """Copy everything small, draw up the table of tiles, and make the folder on the first rank."""
        # Copies: training changes the originals while tiles are written.
        random = read_random(self._context.streams.device)
        buffers, tensors = to_tensors(persistent_buffers(self._context.model))
        sources = self._sources(frozen=frozen)
        # On the user's thread: pinning memory may wait for the device (ordering rule 5).
        ring = undo.enter_context(contextlib.closing(RingMemory(sources, self._context.streams.device)))
        manifest: Manifest | None = None
        made: Sequence[Path] = ()
        if self._control_group.is_first:
            manifest = self._manifest(folder, buffers, tensors, extra, frozen=frozen)
            made = folders.make_folder(folder)
            undo.callback(folders.remove_folders, made)
        return Save(
            control_group=self._control_group,
            folder=folder,
            sources=sources,
            ring=ring,
            streams=self._context.streams,
            random=random,
            manifest=manifest,
            tensors=tensors,
            made=made,
            token="" if manifest is None else manifest.token,
            keep=keep,
        )

    def _agree(self, save: Save) -> Save:
        """Take the token and the fingerprints of buffers from the first rank. Collective."""
        prints = {}
        if save.manifest is not None and self._control_group.size > 1:
            prints = {key: fingerprint(save.tensors[key]) for key in save.manifest.buffers.values()}
        # The names of a save's files begin with its token, so they never meet files that the folder has already.
        token, made, prints = self._control_group.share((save.token, [*map(str, save.made)], prints))
        check_seen(save.folder, self._control_group)
        tensors = other_than(save.tensors, prints) if save.manifest is None else save.tensors
        return replace(save, token=token, made=[*map(Path, made)], tensors=tensors)

    def _run_beside_training(self, save: Save, worker: HostWorker, undo: contextlib.ExitStack) -> None:
        """Write on a thread of its own. Later writes of a storage wait until it has been copied."""
        job = _RunningSave(save, worker)
        try:
            # Inside: after an interrupt here, updates would wait for a save that no thread ever ends.
            self._job = job
            for source in save.sources:
                for storage in source.storages:
                    # A write follows all reads: else a tile would have values of two steps (ordering rule 3).
                    storage.note_read(source.copied)  # site save.read
            worker.submit(save.run, job)
            undo.pop_all()  # the save owns the folder and the ring from here on
        except BaseException:
            self._job = None
            worker.close()  # finishes a save that was queued before the interrupt
            job.settle()
            raise

    def _runs_anywhere(self) -> bool:
        """Return True if a save is under way on any rank. Collective, over the control group of the user's thread."""
        running = self._job is not None and not self._job.done()
        return any(self._context.ranks.control_group.collect(running))

    def wait_copied(self) -> None:
        """Wait on the host until the save reads no storage any more."""
        if self._job is not None:
            for source in self._job.save.sources:
                # site save.copied
                source.copied.synchronize()  # a write follows all reads (ordering rule 3)

    def finish(self) -> None:
        """Wait for the save that is under way, and raise its error. Collective if there is one."""
        job = self._job
        if job is None:
            return
        try:
            # site save.over
            job.synchronize()  # the ring lives until the last write from it is over (ordering rule 1)
        finally:
            job.worker.close()
            job.save.ring.close()
            self._job = None  # last: after an interrupt the next call waits again

    def close(self) -> None:
        """Finish the save that is under way, and close the control group.

        Raises:
            CheckpointError: of the save that was under way.
        """
        try:
            self.finish()  # the save uses the control group until then
        finally:
            self._control_group.close()

    # What is saved

    def _sources(self, *, frozen: bool) -> list[UnitSource]:
        """List the tiles that this rank saves. Ranks that have copies of a shard divide its tiles.

        Arguments:
            frozen: include units that are frozen.
        """
        sources: list[UnitSource] = []
        offset = 0
        begun = self._context.streams.now()  # compute writes storage on the device, too
        for unit in self._context.units:
            if unit.trained is None and not frozen:
                continue
            storages = _storages(unit)
            tables = [_home_table(name, storage) for name, storage in storages.items()]
            tile_numel = unit.params.segments[0].tile_numel
            table = draw_table(unit.name, unit.layout, tables, tile_numel, self._context.ranks.grid, offset)
            if not table.checksums or not table.slots:
                continue
            offset += table.nbytes
            # A read follows the last write: the update of this step (ordering rule 3).
            # site save.compute, save.written
            ready = all_of([begun, *(storage.written for storage in storages.values())])
            sources.append(UnitSource(table, tuple(storages.values()), ready, HostEvent()))
        return sources

    def _manifest(
        self,
        folder: Path,
        buffers: Mapping[str, str],
        tensors: dict[str, Tensor],
        extra: Mapping[str, Any],
        *,
        frozen: bool,
    ) -> Manifest:
        """Describe everything but the files.

        Arguments:
            folder: the checkpoint's own.
            buffers: the keys of buffers among the tensors, by name.
            tensors: takes the tensors that `extra` and options hold.
            extra: the values that the user adds.
            frozen: True if frozen parameters are saved.
        """
        loss = self._context.gradient_scale.loss
        return Manifest.new(
            serial=next_serial(folder),
            ranks=(),
            tensors=None,
            rule=self._context.rule.name,
            states=self._context.rule.states,
            parameters=dict(self._parameters(frozen=frozen)),
            groups=tuple(self._groups(tensors)),
            buffers=buffers,
            loss_scale=loss.state() if loss is not None else None,
            model=describe(self._context.model),
            extra=encode(dict(extra), tensors, what="extra"),
        )

    def _parameters(self, *, frozen: bool) -> Iterator[tuple[str, SavedParameter]]:
        for unit in self._context.units:
            trained = unit.trained is not None
            states = tuple(state.name for state in unit.rule.states) if trained else None
            if states == tuple(state.name for state in self._context.rule.states):
                states = None
            for parameter in unit.parameters:
                yield (
                    parameter.name,
                    SavedParameter(
                        shape=BoxExtent.of(parameter.slot).shape,
                        dtype=unit.spec.dtype,
                        trained=trained,
                        step=self._access.steps()[parameter.tensor] if trained else 0,
                        scalars={name: float(value) for name, value in self._access.scalars(parameter.tensor).items()},
                        has_state=trained and self._access.has_state(parameter.tensor),
                        left_out=True if not trained and not frozen else None,
                        states=states,
                    ),
                )

    def _groups(self, tensors: dict[str, Tensor]) -> Iterator[SavedGroup]:
        names = {parameter.tensor: parameter.name for unit in self._context.units for parameter in unit.parameters}
        for number, group in enumerate(self._context.param_groups):
            options = {name: value for name, value in group.items() if name != "params"}
            encoded = encode(options, tensors, what=f"param_groups[{number}]")
            yield SavedGroup(tuple(names[p] for p in group["params"]), encoded)


def _check_request(path: str | PathLike[str], keep: int | None, if_busy: str) -> None:
    """Refuse arguments that are invalid, before any rank has done anything."""
    if keep is not None and keep < 1:
        raise ConfigError(f"save(keep={keep!r}): use a whole number of checkpoints, 1 or more, or None for all.")
    if if_busy not in ("wait", "raise"):
        raise ConfigError(f"save(if_busy={if_busy!r}): use 'wait' or 'raise'.")
    if Path(path).name in ("", LATEST):
        raise ConfigError(f"save({str(path)!r}): name the checkpoint; 'latest' stands for the newest one.")


def _storages(unit: Unit) -> dict[str, Storage]:
    """Choose the storages of a unit that a checkpoint keeps."""
    storages = {PARAM: unit.params}
    if unit.trained is None:
        return storages
    storages |= {MASTER: unit.trained.master, OPTIMIZER: unit.trained.optimizer, **unit.trained.averages}
    return {
        name: storages[name]
        for name in kept_storages({name: storage.plans[0].cells for name, storage in storages.items()})
    }


def _home_table(name: str, storage: Storage) -> HomeTable:
    tiers: dict[str, int] = {}
    for plan in storage.plans:
        tiers[plan.tier.value] = tiers.get(plan.tier.value, 0) + sum(cell.nbytes for cell in plan.cells)
    return HomeTable(name, storage.plans[0].cells, tuple(tiers.items()))
