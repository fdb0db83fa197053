"""Samples, appended to the files of prepared data."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.cli.training.data.sequences.rowfiles import DataFile, RowPlacesWriter
from penstock.errors import ConfigError

#: What ids are stored as, by the bytes of one.
ID_TYPES: Mapping[int, type[np.uint16] | type[np.uint32]] = {2: np.uint16, 4: np.uint32}
_ONES = bytes([1]) * (1 << 20)


class Sample(Protocol):
    """What a row gives: all of its tokens, or a piece of them."""

    @property
    def ids(self) -> npt.NDArray[Any]: ...  # noqa: D102
    @property
    def trained(self) -> npt.NDArray[np.bool_] | None: ...  # noqa: D102
    @property
    def ends_row(self) -> bool: ...  # noqa: D102
    @property
    def where(self) -> str: ...  # noqa: D102


class SampleWriter:
    """Appends samples to the files of a folder.

    Arguments:
        folder: where they are made.
        vocab_size: what all ids are below. Up to 2**16 they take two bytes, four otherwise.

    Attributes:
        row_count: rows that are complete.
        token_count: tokens that were added.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._dtype = ID_TYPES[2 if vocab_size <= 1 << 16 else 4]
        self._ids = DataFile(folder / "ids.bin")
        self._offsets = DataFile(folder / "offsets.bin")
        self._offsets.append(np.zeros(1, np.int64).tobytes())
        self._places = RowPlacesWriter(folder)
        self._trained: DataFile | None = None
        self._inside_row = False
        self._digest = hashlib.blake2b(digest_size=16)
        self.row_count = 0
        self.token_count = 0

    def add(self, sample: Sample) -> None:
        """Append a sample to the row that is open, or begin one.

        Raises:
            ConfigError: it has ids outside of the vocabulary, or another number of marks than of ids; the disk is full.
        """
        ids = sample.ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ConfigError(f"{sample.where}: the tokenizer made ids outside of the {self._vocab_size} of the model.")
        if not self._inside_row:
            self._places.append(self.row_count, sample.where)
            self._inside_row = True
        self._add_trained(sample)
        held = ids.astype(self._dtype).tobytes()
        self._digest.update(held)
        self._ids.append(held)
        self.token_count += len(ids)
        if sample.ends_row:
            self._end_row()

    def _add_trained(self, sample: Sample) -> None:
        """Append which tokens are labels. The first sample that says so begins the file for all before it."""
        if sample.trained is not None and self._trained is None:
            self._trained = DataFile(self._folder / "trained.bin")
            for done in range(0, self.token_count, len(_ONES)):
                self._trained.append(_ONES[: self.token_count - done])
        if self._trained is not None:
            trained = np.ones(len(sample.ids), np.bool_) if sample.trained is None else sample.trained
            if trained.shape != sample.ids.shape:
                raise ConfigError(
                    f"{sample.where}: {len(sample.ids)} tokens have {len(trained)} marks of what is trained."
                )
            marks = trained.astype(np.bool_).tobytes()
            self._digest.update(marks)
            self._trained.append(marks)

    def _end_row(self) -> None:
        offset = np.int64(self.token_count).tobytes()
        self._digest.update(offset)
        self._offsets.append(offset)
        self.row_count += 1
        self._inside_row = False

    def finish(self) -> dict[str, object]:
        """Write what is pending, to the disk itself, and return how much there is."""
        if self._inside_row:
            self._end_row()
        for file in self._files():
            file.finish()
        return {
            "rows": self.row_count,
            "tokens": self.token_count,
            "digest": self._digest.hexdigest(),
            "id_bytes": self._dtype().itemsize,
            "sizes": {file.path.name: file.byte_count for file in self._files()},
        }

    def close(self) -> None:
        """Close the files, written or not."""
        for file in self._files():
            file.close()

    def _files(self) -> list[DataFile]:
        return [self._ids, self._offsets, *self._places.files, *([] if self._trained is None else [self._trained])]
