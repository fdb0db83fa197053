"""Machines that were probed, kept in the user's cache by their fingerprint: where, and whether one is still right."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError, one_line

_logger = logging.getLogger("penstock")


class Fingerprinted(Protocol):
    """What is kept: it knows which machine it is of."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The fingerprint of the machine."""


Kept = TypeVar("Kept", bound=Fingerprinted)


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Return a fingerprint as 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:32]


def path_of(fingerprint: Mapping[str, Any]) -> Path:
    """Return where the machine of a fingerprint is kept: below `XDG_CACHE_HOME`, or `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored: they would be another folder in each run.
    base = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".cache")
    return base / "penstock" / "machines" / f"{digest(fingerprint)}.json"


def recall(fingerprint: Mapping[str, Any], read: Callable[[Path], Kept]) -> Kept | None:
    """Return what is kept for a fingerprint.

    Arguments:
        fingerprint: the machine's, as it is now.
        read: reads the file.

    Returns:
        `None` where nothing is kept, where it cannot be read, and where it is of another fingerprint.
    """
    path = path_of(fingerprint)
    if not path.exists():
        return None
    try:
        kept = read(path)
    except (PenstockError, OSError, ValueError) as error:
        _logger.warning("This machine is probed again: what was kept of it cannot be read. %s", one_line(error))
        return None
    return kept if digest(kept.fingerprint) == digest(fingerprint) else None


def keep(kept: Kept, write: Callable[[Path], None]) -> Path | None:
    """Keep a machine under its fingerprint.

    Arguments:
        kept: the machine.
        write: writes it to a file, whole or not at all.

    Returns:
        The path; `None` where the cache cannot be written, which the log says.
    """
    path = path_of(kept.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except (PenstockError, OSError) as error:
        _logger.warning("The machine is not kept for the next time: %s", one_line(error))
        return None
    return path


def recalled(
    fingerprint: Mapping[str, Any],
    *,
    read: Callable[[Path], Kept],
    make: Callable[[], Kept],
    write: Callable[[Kept, Path], None],
) -> Kept:
    """Return what is kept for a fingerprint; else make it, and keep it.

    Of several processes that ask at once one makes it, and the others wait: two that measured the same disk at the same
    time would both find half of it.

    Arguments:
        fingerprint: the machine's, as it is now.
        read: reads the file.
        make: measures the machine.
        write: writes it to a file, whole or not at all.
    """
    with _locked(path_of(fingerprint)):
        kept = recall(fingerprint, read)
        if kept is None:
            kept = make()
            keep(kept, lambda path: write(kept, path))
    return kept


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which others wait for. Go on without where none can be had."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
