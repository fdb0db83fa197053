"""Small text files that are written as a whole or not at all, and files that are whole up to their last line."""

import fcntl
import json
import math
import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, one_line


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8: beside its place first, and put there once it is on the disk.

    A link is followed. What is there and is no file, a device or a pipe, is written to: another file in its place would
    be the end of `/dev/null` for everybody.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
        ValueError: the path is none, or the text has no UTF-8.
    """
    if path.exists() and not path.is_file():  # by the path itself: links to pipes without a name lead to no path
        path.write_text(text, encoding="utf-8")
        return
    place = Path(os.path.realpath(path))
    made = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with open(made, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a machine that fails now may keep the name and lose the text
        os.replace(made, place)
    except BaseException:
        with suppress(OSError, ValueError):
            made.unlink()
        raise


class Lines:
    """Appends objects to a file, each at once, so that others can follow it. One process writes it at a time.

    A disk that refuses a line ends the file there, with a warning: what is written is not what training is for.

    Arguments:
        path: the file. Its folder is made where it is missing.

    Raises:
        ConfigError: it cannot be written, or another process is writing it. Nothing in it has changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # people log from threads of their own
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}. Give a folder on a disk with space, that you can write."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"{path} is being written by another recorder. Give each a folder of its own, or close that one first."
            ) from error
        except OSError:  # a file system without locks
            pass

    def begin(self, *, goes_on: bool) -> None:
        """Begin the file anew, or go on behind what is there: a last line that was torn gets its end."""
        try:
            if not goes_on:
                self._file.truncate(0)
            elif _is_torn(self._path):
                self._file.write(b"\n")
        except OSError as error:
            self._give_up(error)

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append an object. A number that is not finite is null; what JSON does not have is written as text."""
        text = json.dumps(to_json({"event": event, **values}), allow_nan=False)
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(text.encode() + b"\n")
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the file; `write` does nothing from here on."""
        with self._lock:
            self._file.close()

    def _give_up(self, error: OSError) -> None:
        try:
            self._file.close()  # tries to write what is left once more
        except OSError:
            os.close(self._file.fileno()) if not self._file.closed else None
        warnings.warn(f"{self._path} ends here: {one_line(error)}. Training goes on without it.", stacklevel=3)


def to_json(value: Any) -> Any:
    """Make a value JSON-like: what is not finite is null, keys are text, and so is what JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): to_json(of_name) for name, of_name in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _is_torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
