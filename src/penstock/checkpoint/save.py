"""One save: every rank writes its files, all agree that they are on the disk, the first one writes the marker.

There is no other way in which a checkpoint becomes complete: what is imported is saved as well.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from penstock.checkpoint.fields import to_bytes
from penstock.checkpoint.folder import (
    Hold,
    commit,
    file_name,
    named,
    prune,
    remove_file,
    remove_folders,
    settle,
    sync_folder,
    write_file,
)
from penstock.checkpoint.manifest import FileEntry, Manifest, RankFiles
from penstock.checkpoint.tables import RankTable, UnitTable
from penstock.checkpoint.tensorfiles import tensors_to_bytes
from penstock.checkpoint.tiles import RingMemory, TileWriter, UnitSource
from penstock.errors import CheckpointError
from penstock.machine.council import Council
from penstock.machine.streams import Streams
from penstock.typedfiles import Field, reader


@dataclass(frozen=True)
class Target:
    """Where a save goes.

    Attributes:
        folder: the checkpoint's folder; it is there already.
        made: the folder and those above it, as far as they were made for this save.
        token: what file names begin with.
        keep: how many checkpoints stay, with this one; `None` for all.
    """

    folder: Path
    made: Sequence[Path]
    token: str
    keep: int | None


_read_files = reader(RankFiles)


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save that ranks have agreed on. Runs on any thread.

    Attributes:
        council: the ranks.
        target: where it goes.
        sources: this rank's tiles.
        ring: the buffers that they pass.
        streams: those that copy what is on the device.
        random: states of this rank's generators.
        manifest: on the first rank, the marker; its files are filled in.
        tensors: those beside the marker; on another rank, those of its buffers that are not the first one's.
    """

    council: Council
    target: Target
    sources: Sequence[UnitSource]
    ring: RingMemory
    streams: Streams
    random: object
    manifest: Manifest | None
    tensors: Mapping[str, Tensor]

    def run(self) -> None:
        """Write everything. Collective.

        1. Every rank writes its files and waits until the disk has them.
        2. All ranks agree that they are there. From here on nothing is taken back unless the marker cannot be written.
        3. The first rank writes the marker.
        4. It waits until the disk has the marker's name, and removes what is not kept.

        Raises:
            CheckpointError: this checkpoint does not exist, and those before it are whole.
        """
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as undo:
            undo.callback(remove_folders, self.target.made)  # by every rank: the last one finds them empty
            written, failure, hold = None, None, None
            try:
                with named("Writing", self.target.folder):
                    if self.manifest is not None:
                        # Before the first file is there: whoever cleans the folder would take it for a dead save's.
                        hold = closing.enter_context(Hold(self.target.folder))
                        hold.share()
                    written = self._write(closing, undo)
            except BaseException as error:  # an interrupt too: the other ranks wait for this one's word
                failure = error
            # The barrier between data and marker: without it the marker could name what another rank has not written.
            self.council.agree(failure)
            everyone = self.council.collect(json.loads(to_bytes(written)))
            done = undo.pop_all()  # the marker may name the files from now on
            # The others wait to hear what became of the marker: else they would say that there is a checkpoint.
            refused = self.council.share(self._commit(everyone))
            if refused is not None:
                done.close()
                raise CheckpointError(refused)
            unsure = self.council.share(self._settle(hold))
            if unsure is not None:
                raise CheckpointError(unsure)

    def _write(self, closing: contextlib.ExitStack, undo: contextlib.ExitStack) -> RankFiles:
        """Write this rank's files; `tensors` of the first rank are those of the whole checkpoint.

        Arguments:
            closing: gives up what is held until the marker is there.
            undo: removes the files again.
        """
        rank, token = self.council.rank, self.target.token
        tables: Sequence[UnitTable] = []
        data: FileEntry | None = None
        if self.sources:
            file = self.target.folder / file_name(token, ".tiles", rank)
            writer = TileWriter(file, self.sources, self.ring.buffers, self.streams)
            # Closed after the marker is there: until then the lock of the open file keeps others from cleaning it away.
            closing.callback(writer.close)
            undo.callback(remove_file, file)
            data, tables = writer.write()
        content = to_bytes(RankTable(tuple(tables), self.random))
        table = self._write_file(file_name(token, ".json", rank), content, undo)
        tensors = None
        if self.tensors:
            name = file_name(token, ".safetensors", None if self.council.is_first else rank)
            tensors = self._write_file(name, tensors_to_bytes(self.tensors), undo)
        sync_folder(self.target.folder)  # the names; what is in the files is on the disk already
        return RankFiles(data, table, tensors)

    def _write_file(self, name: str, content: bytes, undo: contextlib.ExitStack) -> FileEntry:
        entry = write_file(self.target.folder / name, content)
        undo.callback(remove_file, self.target.folder / name)
        return entry

    def _commit(self, everyone: Sequence[object]) -> str | None:
        """Write the marker; returns why that was not possible, for ranks that wait to hear.

        Arguments:
            everyone: what each rank has written, as it said.
        """
        if self.manifest is None:
            return None
        try:
            first, *others = (
                _read_files(Field(self.target.folder, f"what rank {rank} wrote", said))
                for rank, said in enumerate(everyone)
            )
            ranks = (replace(first, tensors=None), *others)
            commit(self.target.folder, replace(self.manifest, ranks=ranks, tensors=first.tensors))
        except Exception as error:
            return str(error) or f"Writing the marker of {self.target.folder} failed: {type(error).__name__}."
        return None

    def _settle(self, hold: Hold | None) -> str | None:
        """Have the marker on the disk and remove what is not kept; returns what is unsure."""
        try:
            if hold is not None:
                settle(self.target.folder, hold)
                if self.target.keep is not None:
                    prune(self.target.folder, self.target.keep)
        except Exception as error:  # whatever it is: the other ranks wait to hear of it
            return f"{error} The checkpoint is whole, but may be gone after a power failure. Save again."
        return None
