"""The nvme tier: one preallocated file for each folder, in which homes keep their tiles as records."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.machine.aio import File, Queue
from penstock.machine.swap import SwapFolder
from penstock.tiers.home import CellPlan
from penstock.tiers.records import Place, RecordLayout, Records

FILE_NAME = "tiles"


class Extents:
    """Lays records out over the files: each goes to the one that is filled least.

    Arguments:
        files: how many.

    Attributes:
        used: bytes laid out in each.
    """

    def __init__(self, files: int) -> None:
        self.used = [0] * files

    def place(self, layout: RecordLayout) -> list[tuple[int, int, int]]:
        """The file, offset and bytes of each tile's record."""
        places = []
        for nbytes in layout.sizes:
            file = min(range(len(self.used)), key=self.used.__getitem__)
            places.append((file, self.used[file], nbytes))
            self.used[file] += nbytes
        return places


class NvmeTier:
    """Files on one disk or several.

    The folders are this run's own, locked; they are removed at close and when the process ends (`machine/swap.py`).

    Arguments:
        parents: existing folders, one for each disk.
        layouts: of all homes that will be made, in order: what the files are sized for.
        queue_depth: requests in flight per folder.
        checksums: verify what is read.

    Raises:
        NvmeError: a folder cannot be used, or has not enough space.
    """

    def __init__(
        self,
        parents: Sequence[str | os.PathLike[str]],
        layouts: Sequence[RecordLayout],
        *,
        queue_depth: int,
        checksums: bool,
    ) -> None:
        self._checksums = checksums
        self._extents = Extents(len(parents))
        self._folders: list[SwapFolder] = []
        self._queues: list[Queue] = []
        self._files: list[File] = []
        planned = Extents(len(parents))
        for layout in layouts:
            planned.place(layout)
        try:
            for parent, nbytes in zip(parents, planned.used, strict=True):
                if nbytes == 0:
                    break  # more folders than records: the first ones were filled
                self._folders.append(SwapFolder(parent, nbytes))
                self._queues.append(Queue(queue_depth))
                self._files.append(File(self._queues[-1], Path(self._folders[-1].path, FILE_NAME), nbytes))
        except BaseException:
            self.close()
            raise

    def make_home(self, plans: Sequence[CellPlan], numel: int, tile_numel: int) -> Records:
        """The next of the planned homes."""
        layout = RecordLayout(plans, numel, tile_numel)
        places = [Place(self._files[file], offset, nbytes) for file, offset, nbytes in self._extents.place(layout)]
        return Records(layout, places, checksums=self._checksums)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files so far."""
        return sum(file.bytes_read for file in self._files)

    @property
    def bytes_written(self) -> int:
        """Bytes written to the files so far."""
        return sum(file.bytes_written for file in self._files)

    def close(self) -> None:
        """Finish what is under way, and remove files and folders.

        Raises:
            NvmeError: the failure of a transfer that nobody waited for. Everything is removed all the same.
        """
        with contextlib.ExitStack() as closing:  # the last one first, each whatever the others raise
            for parts in (self._folders, self._queues, self._files):
                for part in parts:
                    closing.callback(part.close)
