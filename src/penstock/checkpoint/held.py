"""Folders that are held: whoever saves into one holds it, and whoever cleans one holds it alone.

The lock is the folder's own (`flock`): it needs no file, and the kernel lets go of it however a process ends. Some
network file systems have no locks of folders. There the locks of data files remain (`machine.aio.File.lock`), and that
the marker is read again before anything is removed.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import CheckpointError

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def shared(folder: Path) -> Iterator["Hold"]:
    """Hold a folder beside others that save into it. Waits for one who cleans it, which takes a moment.

    Raises:
        CheckpointError: it is not there.
    """
    with contextlib.ExitStack() as closing:
        try:
            hold = closing.enter_context(_opened(folder))
        except OSError as error:
            raise CheckpointError(f"Writing into {folder} failed: {error.strerror}.", file=str(folder)) from error
        with contextlib.suppress(OSError):  # there are no locks of folders here
            fcntl.flock(hold.descriptor, fcntl.LOCK_SH)
        yield hold


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Hold a folder that nobody else holds; gives whether that is so.

    Raises:
        OSError: it is not there.
    """
    with _opened(folder) as hold:
        yield hold.take_alone()


class Hold:
    """A folder that is held.

    Arguments:
        descriptor: of the folder.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def take_alone(self) -> bool:
        """Whether nobody else holds the folder; then nobody can until this one lets go. Else it may be let go of."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _TAKEN
        return True


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Hold]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Hold(descriptor)
    finally:
        with contextlib.suppress(
            OSError
        ):  # not by closing alone: a process that was forked meanwhile has the descriptor, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_being_written(file: Path) -> bool:
    """Whether a save holds it: data files are locked while they are written."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in _TAKEN
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(descriptor)
    return False
