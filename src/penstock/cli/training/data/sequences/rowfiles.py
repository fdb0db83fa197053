"""Files of prepared data: appended to in large pieces, mapped when read; and where each row came from."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

_PENDING_BYTES = 1 << 20
_NO_NUMBER = -1
_MOST_DIGITS = 18  # fits int64


class DataFile:
    """A file that is only appended to. What cannot be written is an error that names it.

    Arguments:
        path: where it is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.byte_count = 0
        self._pending = bytearray()
        self._file = path.open("wb", buffering=0)

    def append(self, data: bytes) -> None:
        """Append bytes, in memory until there are enough of them.

        Raises:
            ConfigError: the disk is full, or fails.
        """
        self._pending += data
        self.byte_count += len(data)
        if len(self._pending) >= _PENDING_BYTES:
            self._flush()

    def finish(self) -> None:
        """Put everything on the disk itself.

        Raises:
            ConfigError: the disk is full, or fails.
        """
        self._flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}. Use another disk.") from error

    def close(self) -> None:
        """Close the file; what is pending is lost."""
        self._file.close()

    def _flush(self) -> None:
        pending = bytes(self._pending)
        self._pending.clear()
        written = 0
        try:
            while written < len(pending):
                written += self._file.write(pending[written:])
        except OSError as error:
            missing = len(pending) - written
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; it has {self.byte_count - missing} bytes, and at "
                f"least {missing} more are missing. Free space there, or use another disk."
            ) from error


def map_file(path: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Map a file for reading. An empty one, which cannot be mapped, is an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    # A plain array over the mapping: slices of np.memmap cost several times as much.
    return np.asarray(np.memmap(path, dtype, mode="r"))


class RowPlacesWriter:
    """Notes the file and the number of each row.

    Arguments:
        folder: where its files are made.
    """

    def __init__(self, folder: Path) -> None:
        self._numbers = DataFile(folder / "numbers.bin")
        self._runs = DataFile(folder / "runs.bin")
        self._names = DataFile(folder / "names.bin")
        self.files = (self._numbers, self._runs, self._names)
        self._name: str | None = None

    def append(self, row: int, where: str) -> None:
        """Note the next row. Rows of one file that follow each other share its name."""
        name, number = _divide(where)
        self._numbers.append(np.int64(number).tobytes())
        if name != self._name:
            self._name = name
            self._runs.append(np.array([row, self._names.byte_count], np.int64).tobytes())
            self._names.append(name.encode(errors="surrogateescape"))


class RowPlaces:
    """The file and the number of each row, read when asked for.

    Arguments:
        folder: where `RowPlacesWriter` has made its files.
    """

    def __init__(self, folder: Path) -> None:
        self._numbers = map_file(folder / "numbers.bin", np.int64)
        self._runs = map_file(folder / "runs.bin", np.int64).reshape(-1, 2)  # (first row, where its name begins)
        self._names = map_file(folder / "names.bin", np.uint8)

    def where(self, row: int) -> str:
        """Name the file and the number of a row, as its sample did."""
        run = int(np.searchsorted(self._runs[:, 0], row, side="right")) - 1
        stop = int(self._runs[run + 1, 1]) if run + 1 < len(self._runs) else len(self._names)
        name = self._names[int(self._runs[run, 1]) : stop].tobytes().decode(errors="surrogateescape")
        number = int(self._numbers[row])
        return name if number == _NO_NUMBER else f"{name}:{number}"


def _divide(where: str) -> tuple[str, int]:
    """Divide `"chat.jsonl:17"` into file and number. Without one, or where that would print otherwise, all is name."""
    name, _, digits = where.rpartition(":")
    if name and digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS and str(int(digits)) == digits:
        return name, int(digits)
    return where, _NO_NUMBER
