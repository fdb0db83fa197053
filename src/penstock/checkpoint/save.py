"""One save: every rank writes its files, all agree that they are on the disk, the first one writes the marker."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from penstock.checkpoint import held
from penstock.checkpoint.cleaning import prune, settle
from penstock.checkpoint.fields import Field, to_bytes
from penstock.checkpoint.folder import (
    commit,
    data_name,
    own_tensors_name,
    remove_file,
    remove_folders,
    sync_folder,
    table_name,
    tensors_name,
    write_file,
)
from penstock.checkpoint.manifest import FileEntry, Manifest, RankFiles, tensors_to_bytes
from penstock.checkpoint.tables import RankTable, UnitTable
from penstock.checkpoint.writing import RingMemory, TileWriter, UnitSource
from penstock.errors import CheckpointError
from penstock.machine.council import Council
from penstock.machine.streams import Streams


@dataclass(frozen=True)
class Written:
    """The files of one rank; `tensors` are the first one's."""

    files: RankFiles
    tensors: FileEntry | None

    def to_json(self) -> list[object]:
        """For the other ranks to `read`."""
        return [self.files.to_json(), None if self.tensors is None else self.tensors.to_json()]

    @classmethod
    def read(cls, field: Field) -> "Written":
        """Check and take what another rank said."""
        files, tensors = field.items(2)
        return cls(RankFiles.read(files), tensors.optional(FileEntry.read))


@dataclass(frozen=True, kw_only=True)
class Save:
    """A save that ranks have agreed on. Runs on any thread.

    Attributes:
        folder: there already.
        made: it and those above it, as far as they were made for this save.
        token: what file names begin with.
        sources: this rank's tiles.
        ring: the buffers that they pass.
        random: states of this rank's generators.
        manifest: on the first rank; files are filled in.
        tensors: beside it; on another rank, those of its buffers that are not the first one's.
        keep: how many checkpoints stay, with this one; `None` for all.
    """

    council: Council
    folder: Path
    made: Sequence[Path]
    token: str
    sources: Sequence[UnitSource]
    ring: RingMemory
    random: object
    streams: Streams
    manifest: Manifest | None
    tensors: Mapping[str, Tensor]
    keep: int | None

    def run(self) -> None:
        """Write everything. Collective.

        Raises:
            CheckpointError: this checkpoint does not exist, and those before it are whole.
        """
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as undo:
            undo.callback(remove_folders, self.made)  # by every rank: the last one finds them empty
            written, failure, hold = None, None, None
            try:
                if self.manifest is not None:
                    hold = closing.enter_context(held.shared(self.folder))
                written = self._write(closing, undo)
            except Exception as error:
                failure = error
            self.council.agree(failure)
            everyone = self.council.collect(None if written is None else written.to_json())
            done = undo.pop_all()  # the marker may name the files from now on
            manifest = self._filled(
                [
                    Written.read(Field(self.folder, f"what rank {rank} wrote", said))
                    for rank, said in enumerate(everyone)
                ]
            )
            refused = self.council.share(self._commit(manifest))
            if refused is not None:
                done.close()
                raise CheckpointError(refused)
            unsure = self.council.share(self._settle(hold))
            if unsure is not None:
                raise CheckpointError(unsure)

    def _write(self, closing: contextlib.ExitStack, undo: contextlib.ExitStack) -> Written:
        rank = self.council.rank
        tables: Sequence[UnitTable] = []
        data: FileEntry | None = None
        if self.sources:
            file = self.folder / data_name(self.token, rank)
            writer = TileWriter(file, self.sources, self.ring.buffers, self.streams)
            closing.callback(writer.close)
            undo.callback(remove_file, file)
            data, tables = writer.write()
        content = to_bytes(RankTable(tuple(tables), self.random).to_json())
        table = self._write_file(table_name(self.token, rank), content, undo)
        tensors = None
        if self.tensors:
            name = tensors_name(self.token) if self.council.is_first else own_tensors_name(self.token, rank)
            tensors = self._write_file(name, tensors_to_bytes(self.tensors), undo)
        sync_folder(self.folder)
        if self.council.is_first:
            return Written(RankFiles(data, table), tensors)
        return Written(RankFiles(data, table, tensors), None)

    def _write_file(self, name: str, content: bytes, undo: contextlib.ExitStack) -> FileEntry:
        entry = write_file(self.folder / name, content)
        undo.callback(remove_file, self.folder / name)
        return entry

    def _filled(self, everyone: Sequence[Written]) -> Manifest | None:
        """The manifest with every file; on the first rank."""
        if self.manifest is None:
            return None
        return replace(self.manifest, ranks=tuple(rank.files for rank in everyone), tensors=everyone[0].tensors)

    def _commit(self, manifest: Manifest | None) -> str | None:
        """Write the marker; returns why that was not possible, for ranks that wait to hear."""
        try:
            if manifest is not None:
                commit(self.folder, manifest)
        except Exception as error:
            return str(error)
        return None

    def _settle(self, hold: held.Hold | None) -> str | None:
        """Have the marker on the disk and remove what is not kept; returns what is unsure."""
        try:
            if hold is not None:
                settle(self.folder, hold)
                if self.keep is not None:
                    prune(self.folder, self.keep)
        except CheckpointError as error:
            return f"{error} The checkpoint is whole, but may be gone after a power failure. Save again."
        return None
