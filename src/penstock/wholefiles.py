"""Files of ours that are written by name: as a whole or not at all, and never through what somebody put in their place.

A name that we choose, such as `metrics.jsonl`, can be told beforehand: in a folder that others write to, a link of that
name leads to a file of somebody's. So a file of ours is a regular one, or not there yet (`check_own`, `open_own`). What
people name themselves may be a link, a device or a pipe, and is written to as what it is (`write_whole`).
"""

import errno
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

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
    made = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
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
