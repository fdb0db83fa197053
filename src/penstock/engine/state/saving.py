"""Saving: what a checkpoint is made of, and the thread that writes it while training goes on.

1. Ranks agree on the request. The first one makes the folder.
2. The table of tiles is drawn up, and everything small is copied: step counts, options, buffers, random states.
3. Tiles are written, unit by unit, in forward order; an update of a unit waits until its tiles have been copied.
4. Every rank has its files on the disk: the first one puts the marker in its place.

Steps 3 and 4 run on a thread of their own unless the caller waits for them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.checkpoint import folder as folders
from penstock.checkpoint.beside import fingerprint, other_than, persistent_buffers, read_random, to_tensors
from penstock.checkpoint.format import Manifest, SavedGroup, SavedParameter, encode, named
from penstock.checkpoint.pretrained import describe
from penstock.checkpoint.reader import LATEST, next_serial
from penstock.checkpoint.save import Save, check_seen
from penstock.checkpoint.tables import BoxExtent, HomeTable, draw_table, kept_homes
from penstock.checkpoint.tiles import RingMemory, UnitSource
from penstock.config import MASTER, OPTIMIZER, PARAM
from penstock.engine.state.access import StateAccess
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.unit import Unit
from penstock.errors import ConfigError, EngineError
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.streams import HostEvent, HostWorker, Work, all_of
from penstock.tiers.storage import Storage

#: What becomes of a save while another one is running.
IfBusy = Literal["wait", "raise"]


class _RunningSave(HostEvent):
    """A save beside training, and its completion.

    However the save ends, and also if it never begins, training no longer waits for its copies afterwards.
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
    """Saves one engine's state. One save at a time.

    Arguments:
        access: knows step counts and which parameters have state.
        control_group: one of saves alone: they go on beside what the user's thread does.
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
        """Save a checkpoint; return once it is written, or once everything small is copied. Collective.

        Raises:
            ConfigError: the request cannot be met; nothing was written.
            CheckpointError: something could not be written. What was there before is whole.
            EngineError: another save is running, and `if_busy="raise"`.
        """
        _check_request(path, keep, if_busy)
        if not frozen and all(unit.trained is None for unit in self._context.units):
            raise ConfigError("save(frozen=False): nothing of this model is trained, so nothing would be saved.")
        if if_busy == "raise" and self._runs_anywhere():
            raise EngineError("A checkpoint is still being saved. Wait with synchronize(), or use if_busy='wait'.")
        self.finish()  # two saves at once would answer each other on the control group
        folder, worker = Path(path), None
        with contextlib.ExitStack() as undo:
            # A rank that went on alone would wait for the others for ever.
            with self._control_group.together("save()"), named("Writing", folder):
                save = self._take(folder, extra or {}, keep, undo, frozen=frozen)
                if not blocking:
                    # A thread of its own: one that also served a stream would hold training up behind a disk. Started
                    # before ranks agree: the others would write, and wait for one that has no thread.
                    alone = self._context.streams.computes_on_host
                    worker = HostWorker("save", promised=f"Saving {folder}", alone=alone)
                    undo.callback(worker.close)
            save = self._agree(save)
            if worker is None:
                save.run()  # nothing is noted in the homes: the caller writes none of them before it returns
            else:
                self._run_beside_training(save, worker, undo)

    def _take(
        self, folder: Path, extra: Mapping[str, Any], keep: int | None, undo: contextlib.ExitStack, *, frozen: bool
    ) -> Save:
        """Copy everything small as it is now, draw up the table of tiles, and make the folder on the first rank."""
        # Copies: the user's thread goes on to change what they are of while tiles are written.
        random = read_random(self._context.streams.device)
        buffers, tensors = to_tensors(persistent_buffers(self._context.model))
        sources = self._sources(frozen=frozen)
        # Here, before training goes on: to pin memory may have the device finish its work first.
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
        """Hear from the first rank what the checkpoint is called, and which buffers it has already. Collective."""
        prints = {}
        if save.manifest is not None and self._control_group.size > 1:
            prints = {key: fingerprint(save.tensors[key]) for key in save.manifest.buffers.values()}
        # One token on every rank: names of this save's files begin with it, beside files that the folder has already.
        token, made, prints = self._control_group.share((save.token, [*map(str, save.made)], prints))
        check_seen(save.folder, self._control_group)
        tensors = other_than(save.tensors, prints) if save.manifest is None else save.tensors
        return replace(save, token=token, made=[*map(Path, made)], tensors=tensors)

    def _run_beside_training(self, save: Save, worker: HostWorker, undo: contextlib.ExitStack) -> None:
        """Write on a thread of its own, and have what comes next wait for what has to be copied first."""
        job = _RunningSave(save, worker)
        try:
            # Inside: noted and then interrupted, it would be waited for without a thread that ever ends it.
            self._job = job
            for source in save.sources:
                for home in source.homes:
                    # Else an update would write what is still being copied, and the tile would be of two steps.
                    home.note_read(source.copied)  # site save.read
            worker.submit(save.run, job)
            undo.pop_all()  # the folder and the ring are the save's now: given back here, they would go under it
        except BaseException:
            self._job = None
            worker.close()  # an interrupt may come when the save is queued: it is finished then
            job.settle()
            raise

    def _runs_anywhere(self) -> bool:
        """Whether a save is under way on any rank. Not over the control group, which that one uses on its thread."""
        running = self._job is not None and not self._job.done()
        found = torch.tensor(int(running), dtype=torch.int64, device=self._context.streams.device)
        self._context.ranks.all_reduce_max(found)
        return bool(found)

    def wait_copied(self) -> None:
        """Wait on the host until nothing reads the homes any more."""
        if self._job is not None:
            for source in self._job.save.sources:
                # site save.copied
                source.copied.synchronize()  # else some values would be from before a change, and some from after it

    def finish(self) -> None:
        """Wait until the save that is under way is over; raise its error. Collective where there is one."""
        job = self._job
        if job is None:
            return
        try:
            # site save.over
            job.synchronize()  # before the ring goes: a tile may still be on its way through it to the disk
        finally:
            job.worker.close()
            job.save.ring.close()
            self._job = None  # last: after an interrupt the next call goes on, and no two saves are under way

    def close(self) -> None:
        """Finish what is under way and end the thread.

        Raises:
            CheckpointError: of the save that was under way.
        """
        try:
            self.finish()  # the save speaks on the control group until then
        finally:
            self._control_group.close()

    # What is saved

    def _sources(self, *, frozen: bool) -> list[UnitSource]:
        """Draw up the tiles of this rank. Copies of a shard are divided among the ranks that have them.

        Arguments:
            frozen: whether those of units that nothing trains are among them.
        """
        sources: list[UnitSource] = []
        offset = 0
        begun = self._context.streams.now()  # here, where compute is: it writes homes on the device too
        for unit in self._context.units:
            if unit.trained is None and not frozen:
                continue
            homes = _homes(unit)
            tables = [_home_table(name, home) for name, home in homes.items()]
            tile_numel = unit.params.sections[0].tile_numel
            table = draw_table(unit.name, unit.layout, tables, tile_numel, self._context.ranks.grid, offset)
            if not table.checksums or not table.slots:
                continue
            offset += table.nbytes
            # Else a tile would be saved before the update of this step has written it, or in the middle of that.
            ready = all_of([begun, *(home.written for home in homes.values())])  # site save.compute, save.written
            sources.append(UnitSource(table, tuple(homes.values()), ready, HostEvent()))
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
        """Describe everything but the files, as it is now.

        Arguments:
            folder: the checkpoint's own.
            buffers: the keys of buffers among the tensors, by name.
            tensors: takes the tensors that `extra` and options hold.
            extra: what the user adds.
            frozen: whether parameters that nothing trains are saved.
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
    """Refuse what cannot be, before any rank does anything."""
    if keep is not None and keep < 1:
        raise ConfigError(f"save(keep={keep!r}): use a whole number of checkpoints, 1 or more, or None for all.")
    if if_busy not in ("wait", "raise"):
        raise ConfigError(f"save(if_busy={if_busy!r}): use 'wait' or 'raise'.")
    if Path(path).name in ("", LATEST):
        raise ConfigError(f"save({str(path)!r}): name the checkpoint; 'latest' stands for the newest one.")


def _homes(unit: Unit) -> dict[str, Storage]:
    """Choose the homes that a checkpoint keeps of a unit."""
    homes = {PARAM: unit.params}
    if unit.trained is None:
        return homes
    homes |= {MASTER: unit.trained.master, OPTIMIZER: unit.trained.optimizer, **unit.trained.averages}
    return {name: homes[name] for name in kept_homes({name: home.plans[0].cells for name, home in homes.items()})}


def _home_table(name: str, home: Storage) -> HomeTable:
    tiers: dict[str, int] = {}
    for plan in home.plans:
        tiers[plan.tier.value] = tiers.get(plan.tier.value, 0) + sum(cell.nbytes for cell in plan.cells)
    return HomeTable(name, home.plans[0].cells, tuple(tiers.items()))
