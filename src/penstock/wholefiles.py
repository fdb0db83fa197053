"""Files of ours that are written by name: whole or not at all, or line by line.

A name that we choose, such as `metrics.jsonl`, can be told beforehand: in a folder that others write to, a link of that
name leads to a file of somebody's. So a file of ours is a regular one, or not there yet (`check_own`, `open_own`). What
people name themselves may be a link, a device or a pipe, and is written to as what it is (`write_whole`).
"""

import errno
import fcntl
import json
import math
import os
import stat
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from penstock.errors import ConfigError, one_line

_MOST_LINKS = 40


def check_own(path: Path) -> Path:
    """Refuse a path at which something else than a file is; returns the path.

    Raises:
        OSError: there is a link, a pipe, a device or a folder, or one cannot look.
    """
    with suppress(FileNotFoundError):
        _check_mode(path, path.lstat().st_mode)
    return path


def open_own(path: str | Path, mode: str, **arguments: Any) -> IO[Any]:
    """Open a file to write to, as `open` does, that nobody else has put there. A device that is no link is taken.

    Raises:
        OSError: there is a link, a pipe or a folder, or it cannot be opened. Nothing of it has changed.
    """

    def opener(name: str, flags: int) -> int:
        try:
            # Without waiting: opening a pipe would wait for who reads from it.
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                _check_mode(Path(name), stat.S_IFLNK)
            raise
        found = os.fstat(descriptor).st_mode
        try:
            _check_mode(Path(name), stat.S_IFREG if stat.S_ISCHR(found) else found)
        except OSError:
            os.close(descriptor)
            raise
        os.set_blocking(descriptor, True)
        return descriptor

    return open(path, mode, opener=opener, **arguments)


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8: beside its place first, and put there once it is on the disk.

    A link is followed. What is there and is no file, a device or a pipe, is written to: another file in its place would
    be the end of `/dev/null` for everybody. So is what this process has open, such as `/dev/stdout`, whatever that is.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
        ValueError: the path is none, or the text has no UTF-8.
    """
    if (descriptor := _descriptor_of(path)) is not None:
        sys.stdout.flush()  # in the order in which it was written
        with open(descriptor, "w", encoding="utf-8", closefd=False) as opened:
            opened.write(text)
        return
    if path.exists() and not path.is_file():  # by the path itself: links to pipes without a name lead to no path
        path.write_text(text, encoding="utf-8")
        return
    place = Path(os.path.realpath(path))
    made = place.with_name(f".{place.name}.{os.urandom(8).hex()}")
    try:
        with open(made, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a machine that fails now may keep the name and lose the text
        os.replace(made, place)
    except BaseException:
        with suppress(OSError, ValueError):
            made.unlink()
        raise


def _descriptor_of(path: Path) -> int | None:
    """Find which descriptor of this process a path names, such as `/dev/stdout`; `None` where it names none."""
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return None
        if os.path.realpath(path.parent) == os.path.realpath("/proc/self/fd"):
            return int(path.name)
        path = path.parent / os.readlink(path)
    return None


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
            self._file = open_own(path, "ab")
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
