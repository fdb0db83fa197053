"""Saving a checkpoint, by ranks that may share a folder."""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from torch import Tensor

from penstock.checkpoint.folder import (
    FolderLock,
    commit,
    file_name,
    make_folder,
    prune,
    remove_file,
    remove_folders,
    settle,
    sync_folder,
    write_file,
)
from penstock.checkpoint.format import MARKER, FileEntry, Manifest, RankFiles, named, to_bytes
from penstock.checkpoint.tables import RankTable, UnitTable
from penstock.checkpoint.tensorfiles import FILE_MODE, tensors_to_bytes
from penstock.checkpoint.tiles import RingMemory, TileWriter, UnitSource
from penstock.errors import CheckpointError
from penstock.files import Field, reader
from penstock.runtime.control_group import ControlGroup, control_group_of_all
from penstock.runtime.modes import engine_entry
from penstock.runtime.streams import Streams

# ----------------------------------------------------------------------------------------------------------------------
# Check that every rank sees the folder of checkpoints: hosts may have different ones under the same name.
# ----------------------------------------------------------------------------------------------------------------------


TIMEOUT_S = 60.0
#: A file of another host is not there at once on every network file system.
_PATIENCE_S = 5.0
_PAUSE_S = 0.05
_MOST_NAMED = 8


@engine_entry
def check_shared(folder: str | PathLike[str]) -> None:
    """Refuse a folder that is not one and the same for every rank. Collective over the default process group.

    `Optimizer.save` asks the same before it writes. Ask before training, and no step is lost to it. The first rank
    writes an empty file, every rank looks for it, and it is removed again, with the folders that were made for it.
    It takes a few seconds at the most, and nothing where there is one rank.

    Arguments:
        folder: where checkpoints will be saved, or a folder above; it need not exist.

    Raises:
        CheckpointError: names the ranks that do not see it; or it cannot be written. On every rank.

    Example:
        >>> check_shared("checkpoints")
    """
    with contextlib.closing(control_group_of_all(timeout_s=TIMEOUT_S, error=CheckpointError)) as control_group:
        check_seen(Path(folder), control_group)


def check_seen(folder: Path, control_group: ControlGroup) -> None:
    """Refuse a folder that a rank of a control group does not see as the first one does. Collective.

    Raises:
        CheckpointError: names the ranks; on every rank.
    """
    if control_group.size == 1:
        return
    with contextlib.ExitStack() as undo:
        with control_group.together("save()"):
            name = _leave(folder, undo) if control_group.is_first else ""
        name = control_group.share(name)
        said = control_group.collect([_sees(folder / name), socket.gethostname()])
    blind = [f"{rank} ({host})" for rank, (sees, host) in zip(control_group.members, said, strict=True) if not sees]
    if blind:
        more = f" and {len(blind) - _MOST_NAMED} more" if len(blind) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{folder} is not one folder for all ranks: what rank {control_group.members[0]} ({said[0][1]}) writes "
            f"there is not seen by rank {', '.join(blind[:_MOST_NAMED])}{more}. Name one that all hosts share.",
            file=str(folder),
        )


def _leave(folder: Path, undo: contextlib.ExitStack) -> str:
    """Write an empty file, and return its name. `undo` removes it, and the folders that were made for it."""
    if not folder.is_dir():
        undo.callback(remove_folders, make_folder(folder))
    # The lock keeps others from cleaning the folder: the file has a name of a save's, for processes killed here.
    undo.enter_context(FolderLock(folder)).share()
    file = folder / f"{MARKER}.{secrets.token_hex(4)}"
    with named("Writing", file):
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    undo.callback(remove_file, file)
    return file.name


def _sees(file: Path) -> bool:
    """Look for a file until it is there, for a few seconds."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            if file.name in os.listdir(file.parent) or file.exists():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_S)


# ----------------------------------------------------------------------------------------------------------------------
# One save: every rank writes its files, all agree that they are on the disk, the first one writes the marker.
#
# Imports are saved by the same function: there is no other way in which a checkpoint becomes complete.
# ----------------------------------------------------------------------------------------------------------------------


_read_files = reader(RankFiles)


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save. It runs on any thread.

    Attributes:
        control_group: the ranks.
        folder: the checkpoint's folder, which exists.
        sources: this rank's tiles.
        ring: the buffers that they pass.
        streams: copy tiles from the device.
        random: states of this rank's generators.
        manifest: on the first rank, the marker without its files.
        tensors: those beside the marker; on another rank, its buffers that differ from the first one's.
        made: the folders that were made for this save.
        token: the beginning of file names.
        keep: how many checkpoints stay, with this one; `None` for all.
    """

    control_group: ControlGroup
    folder: Path
    sources: Sequence[UnitSource]
    ring: RingMemory
    streams: Streams
    random: object
    manifest: Manifest | None
    tensors: Mapping[str, Tensor]
    made: Sequence[Path] = ()
    token: str = ""
    keep: int | None = None

    def run(self) -> None:
        """Write everything. Collective.

        1. Every rank writes its files and waits until the disk has them.
        2. All ranks agree on that. From here on files are removed only if the marker cannot be written.
        3. The first rank writes the marker.
        4. It waits until the disk has the marker's name, and removes checkpoints that are not kept.

        Raises:
            CheckpointError: this checkpoint does not exist, and those before it are whole.
        """
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as undo:
            undo.callback(remove_folders, self.made)  # on every rank: the last one finds them empty
            written, failure, hold = None, None, None
            try:
                with named("Writing", self.folder):
                    if self.manifest is not None:
                        # Before the first file: a cleaning would take it for one of a save that was killed.
                        hold = closing.enter_context(FolderLock(self.folder))
                        hold.share()
                    written = self._write(closing, undo)
                    entries = (written.data, written.table, written.tensors)
                    self.streams.saved_bytes += sum(entry.nbytes for entry in entries if entry is not None)
            except BaseException as error:  # an interrupt, too: the other ranks wait for this one's answer
                failure = error
            # The barrier between data and marker: without it the marker could name files that are not written yet.
            self.control_group.agree(failure)
            everyone = self.control_group.collect(json.loads(to_bytes(written)))
            done = undo.pop_all()  # the marker may name the files from now on
            # The others wait for the marker: else they would report a checkpoint that does not exist.
            refused = self.control_group.share(self._commit(everyone))
            if refused is not None:
                done.close()
                raise CheckpointError(refused)
            unsure = self.control_group.share(self._settle(hold))
            if unsure is not None:
                raise CheckpointError(unsure)

    def _write(self, closing: contextlib.ExitStack, undo: contextlib.ExitStack) -> RankFiles:
        """Write this rank's files. The first rank writes the tensors of the whole checkpoint.

        Arguments:
            closing: releases locks after the marker is written.
            undo: removes the files again.
        """
        rank, token = self.control_group.rank, self.token
        tables: Sequence[UnitTable] = []
        data: FileEntry | None = None
        if self.sources:
            file = self.folder / file_name(token, ".tiles", rank)
            writer = TileWriter(file, self.sources, self.ring.buffers, self.streams)
            # Closed after the marker is written: until then its lock keeps others from removing the file.
            closing.callback(writer.close)
            undo.callback(remove_file, file)
            data, tables = writer.write()
        content = to_bytes(RankTable(tuple(tables), self.random))
        table = self._write_file(file_name(token, ".json", rank), content, undo)
        tensors = None
        if self.tensors:
            name = file_name(token, ".safetensors", None if self.control_group.is_first else rank)
            tensors = self._write_file(name, tensors_to_bytes(self.tensors), undo)
        sync_folder(self.folder)  # the names: the content is on the disk already
        return RankFiles(data, table, tensors)

    def _write_file(self, name: str, content: bytes, undo: contextlib.ExitStack) -> FileEntry:
        entry = write_file(self.folder / name, content)
        undo.callback(remove_file, self.folder / name)
        return entry

    def _commit(self, everyone: Sequence[object]) -> str | None:
        """Write the marker. Return the reason if that fails, for the ranks that wait.

        Arguments:
            everyone: the files of each rank, as JSON values.
        """
        if self.manifest is None:
            return None
        try:
            first, *others = (
                _read_files(Field(self.folder, f"what rank {rank} wrote", said)) for rank, said in enumerate(everyone)
            )
            ranks = (replace(first, tensors=None), *others)
            commit(self.folder, replace(self.manifest, ranks=ranks, tensors=first.tensors))
        except Exception as error:
            return str(error) or f"Writing the marker of {self.folder} failed: {type(error).__name__}."
        return None

    def _settle(self, hold: FolderLock | None) -> str | None:
        """Flush the marker to the disk, and remove checkpoints that are not kept. Return the reason if that fails."""
        try:
            if hold is not None:
                settle(self.folder, hold)
                if self.keep is not None:
                    prune(self.folder, self.keep)
        except Exception as error:  # of any kind: the other ranks wait for the answer
            return f"{error} The checkpoint is whole, but may be gone after a power failure. Save again."
        return None
