"""The folders in which the nvme tier keeps its files: one for each engine, gone with it, cleaned up after a crash.

`parent/penstock-<host>-<pid>-<random>/` holds, beside the files of the tier,

    lock            a file that is locked by `flock` as long as the run lives; the kernel unlocks it however that ends
    identity.json   which run that is, for people and for the next run

Both are written while the folder is named `.penstock-...`; then it is renamed. So whoever finds a `penstock-*` with an
identity, and gets its lock, has found what a dead run left behind, never what another rank is about to make.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from penstock.errors import OPEN_FILES, NvmeError, one_line
from penstock.files import Field, parse_object, read_bytes, reader
from penstock.runtime.finalizers import at_end
from penstock.runtime.system import boot_id

LOCK = "lock"
IDENTITY = "identity.json"
_MOST_IDENTITY_BYTES = 1 << 22  # a command line is as long as the kernel takes one
UNFINISHED = re.compile(r"\.penstock-.+-\d+-[0-9a-f]{8}")
UNFINISHED_SECONDS = 3600.0
ELSEWHERE = "choose another folder with Placement(nvme_path=...)"

_logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Identity:
    """Which run a swap folder belongs to, as its identity file says."""

    pid: int
    host: str
    boot: str
    started: str
    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return one_line(f"the run with pid {self.pid} on {self.host}, started {self.started}")

    @classmethod
    def own(cls) -> "Identity":
        """Describe this process, as of now."""
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(os.getpid(), os.uname().nodename, boot_id(), started, tuple(sys.argv), VERSION)

    @classmethod
    def read(cls, folder: Path) -> "Identity | None":
        """Read the identity of a folder; `None` where it is no swap folder, or is one no longer."""
        try:
            raw = read_bytes(folder / IDENTITY, _MOST_IDENTITY_BYTES, follow=False)
            return _read_identity(Field(None, "", parse_object(raw)))
        except (OSError, ValueError):
            return None

    def same_machine(self, other: "Identity") -> bool:
        """Whether two runs see each other's locks for sure. On a network file system those of two machines may not."""
        return self.host == other.host or (self.boot == other.boot != "")


_read_identity = reader(Identity)
#: Looked up now: it takes descriptors, of which a process may have none later.
VERSION = version("penstock")


class SwapFolder:
    """A new folder for the files of one engine. What dead runs have left beside it is removed first.

    The folder goes on `close`, when the object is collected, when the interpreter exits, and on SIGTERM where its
    action is the default one and the folder is made on the main thread (Python lets no other set a handler). What
    SIGKILL leaves, the next run removes. The child of a fork has no part in the folder.

    Arguments:
        parent: an existing folder that can be written, on the file system to use.
        nbytes: how many bytes must be free there, once leftovers are gone.

    Attributes:
        path: the path of the new folder.

    Raises:
        NvmeError: `parent` is missing, no folder, cannot be written, lies in a swap folder, or has too little free
            space (then with `errno.ENOSPC`).
    """

    def __init__(self, parent: str | os.PathLike[str], nbytes: int) -> None:
        folder = existing_folder(parent)
        try:
            own = Identity.own()
            _remove_leftovers(folder, own)  # first: the room that they take is counted as free below
            _check_space(folder, nbytes)
            self.path = _create(folder, own)
        except NvmeError:
            raise
        except OSError as error:
            text = (
                f"No swap folder can be made in the nvme path {str(folder)!r} ({error.strerror}). Make it a folder "
                f"that this user can write, on a file system with locks (flock), or {ELSEWHERE}."
            )
            if error.errno in (errno.EMFILE, errno.ENFILE):
                text = f"No swap folder can be made in {str(folder)!r} ({error.strerror}). {OPEN_FILES}"
            raise NvmeError(text, file=str(folder), errno=error.errno) from error
        self._end = at_end(self, _release, self.path)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)

    def check(self) -> None:
        """Refuse to make new files in a folder that somebody has removed. Files that are open stay usable.

        Raises:
            NvmeError: the folder is gone, or another one has its name.
        """
        if not _held.holds(self.path):
            text = (
                f"The swap folder {str(self.path)!r} was removed while its run goes on, so no file can be made in it. "
                "Files that were open stay usable: save(), close() and prepare again, and keep what cleans "
                f"{str(self.path.parent)!r} (tmpwatch, systemd-tmpfiles) from penstock-*, or {ELSEWHERE}."
            )
            raise NvmeError(text, file=str(self.path), errno=errno.ENOENT)

    def close(self) -> None:
        """Remove the folder with everything in it. What cannot be removed is logged. May be called again."""
        self._end()


class _Lock(NamedTuple):
    """A lock that this process holds: its descriptor, and which folder it is of, whatever has that name later."""

    descriptor: int
    folder: os.stat_result


class _Held:
    """What this process holds. The one state of the module: a process has one action per signal, and forks with all.

    Attributes:
        pid: the process that this is the state of.
        locks: the locks, by the path of the folder.
        forking: the threads that are about to fork, or have just done so.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.locks: dict[Path, _Lock] = {}
        self.forking: set[int] = set()

    def holds(self, path: Path) -> bool:
        """Whether a path still is the folder that was made there, and not another one or a link to one."""
        try:
            return path in self.locks and os.path.samestat(path.lstat(), self.locks[path].folder)
        except OSError:
            return False


_held = _Held()


def existing_folder(parent: str | os.PathLike[str]) -> Path:
    """Return the path of `parent` without symlinks. Refuse one where no swap folder may be made."""
    try:
        folder = Path(os.path.realpath(parent, strict=True))
    except OSError as error:
        text = f"The nvme path {os.fspath(parent)!r} cannot be found ({error.strerror}). Create it, or {ELSEWHERE}."
        raise NvmeError(text, file=os.fspath(parent), errno=error.errno) from error
    if not folder.is_dir():
        text = f"The nvme path {str(folder)!r} is no folder. Remove that file and create a folder, or {ELSEWHERE}."
        raise NvmeError(text, file=str(folder), errno=errno.ENOTDIR)
    for above in (folder, *folder.parents):
        # Of a dead run as well: the next one would remove it, and this one's files with it.
        if above.name.startswith("penstock-") and (identity := Identity.read(above)):
            text = f"The nvme path {str(folder)!r} lies in the swap folder of {identity}. C{ELSEWHERE[1:]}."
            raise NvmeError(text, file=str(folder), errno=errno.EBUSY)
    return folder


def free_disk_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that this user can still write on a folder's file system.

    Raises:
        OSError: there is no such folder, or it cannot be looked at.
    """
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def remove_leftovers(parent: str | os.PathLike[str]) -> None:
    """Remove what dead runs have left in a folder, so that the room that they take is counted as free.

    One where no swap folder may be made is left alone: whoever makes one there is told why.
    """
    with contextlib.suppress(NvmeError, OSError):
        _remove_leftovers(existing_folder(parent), Identity.own())


def _check_space(folder: Path, nbytes: int) -> None:
    """Refuse a folder on a file system that has too little free space."""
    free_bytes = free_disk_bytes(folder)
    if nbytes > free_bytes:
        text = (
            f"The nvme tier needs {nbytes:,} bytes, and {str(folder)!r} has {free_bytes:,} bytes free. Free "
            f"{nbytes - free_bytes:,} bytes, keep less on the nvme tier, or {ELSEWHERE}."
        )
        raise NvmeError(text, file=str(folder), errno=errno.ENOSPC)


def _create(parent: Path, own: Identity) -> Path:
    """Make a swap folder and lock it."""
    path = parent / f"penstock-{own.host}-{own.pid}-{secrets.token_hex(4)}"
    unfinished = path.with_name(f".{path.name}")
    lock = None
    try:
        unfinished.mkdir(mode=0o700)
        lock = os.open(unfinished / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Locked before there is an identity: a folder with an identity and without a lock is a dead run's.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (unfinished / IDENTITY).write_text(json.dumps(asdict(own), indent=2) + "\n")
        made = unfinished.lstat()
        unfinished.rename(path)  # last: under this name the next run takes it for a leftover unless it is locked
    except BaseException:
        with contextlib.suppress(OSError):
            _remove_own(unfinished)  # by name: a process without descriptors cannot list the folder
        if lock is not None:
            os.close(lock)
        raise
    _held.locks[path] = _Lock(lock, made)
    return path


def _remove_leftovers(parent: Path, own: Identity) -> None:
    """Remove the folders of runs that have ended without doing so. Other ranks may be at it at the same time."""
    for path in [*parent.glob("penstock-*"), *parent.glob(".penstock-*")]:
        with contextlib.suppress(OSError):  # gone meanwhile, or not this user's to change
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if path.name.startswith("."):
                # Who makes such a folder renames it at once, who ends one removes it at once. A run may be in between
                # just now; after an hour it was killed there.
                if UNFINISHED.fullmatch(path.name) and _now_on(parent) - found.st_mtime > UNFINISHED_SECONDS:
                    _remove_unfinished(path)
            elif identity := Identity.read(path):
                _remove_leftover(path, identity, own)


def _now_on(folder: Path) -> float:
    """Return the time by the clock that dates the files of a folder. This host's own may be hours from it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _remove_unfinished(path: Path) -> None:
    """Remove a folder that has no identity yet, or no more: only if it holds nothing but our two files.

    What else is in a folder of such a name is somebody's.
    """
    files = list(path.iterdir())
    if {file.name for file in files} <= {LOCK, IDENTITY} and all(stat.S_ISREG(f.lstat().st_mode) for f in files):
        for file in files:
            file.unlink(missing_ok=True)
        path.rmdir()


def _remove_leftover(path: Path, identity: Identity, own: Identity) -> None:
    """Remove the folder of another run, if that run is dead.

    Raises:
        OSError: the run lives and holds its lock, or the folder cannot be removed.
    """
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        # Not waited for: a live run holds it as long as it lives.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not identity.same_machine(own):
            _logger.warning("%s is of %s: another machine. Remove it if that run has ended.", path, identity)
            return
        nbytes = sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
        _remove(path)
        _logger.warning("Removed %s, left by %s: %s bytes freed.", path, identity, f"{nbytes:,}")
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a swap folder whose lock is held."""
    # 1. The data. What a kill leaves in the middle still has lock and identity, by which the next run knows it.
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in (LOCK, IDENTITY):
            entry.unlink(missing_ok=True)
    # 2. The name. Of several that remove the folder at once, one alone can rename it.
    _remove_own(path.rename(path.with_name(f".{path.name}")))


def _remove_own(path: Path) -> None:
    """Remove a folder that has nothing but our two files."""
    for name in (IDENTITY, LOCK):
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def _release(path: Path) -> None:
    """Remove a folder that this process holds, and unlock it.

    SIGTERM may come in the middle of it, and do all of it again before the process ends.
    """
    if os.getpid() != _held.pid or path not in _held.locks:  # in a child of a fork: it is the parent's
        return
    try:
        if _held.holds(path):
            _remove(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("The swap folder %s cannot be removed (%s). Remove it by hand.", path, error)
    # Unlocked after the folder is gone: whoever got the lock of one that is still there would remove it as well.
    lock = _held.locks.pop(path, None)
    if lock is not None:
        os.close(lock.descriptor)
    if not _held.locks:
        _restore_sigterm()


def _restore_sigterm() -> None:
    """Give SIGTERM its default action back, if it still has ours."""
    main = threading.current_thread() is threading.main_thread()  # elsewhere Python changes no handler
    if main and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(signum: int, frame: object) -> None:
    """Remove the folders, then do what the default action does."""
    try:
        for path in list(_held.locks):
            _release(path)
    finally:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def _before_fork() -> None:
    """Hold SIGTERM back while this thread forks."""
    # Python's handler only notes a signal, and the child begins with that note wiped: a SIGTERM that comes to the child
    # before its own state is set up would be lost, and the child would never end.
    ours = signal.getsignal(signal.SIGTERM) is _on_sigterm
    if ours and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        _held.forking.add(threading.get_ident())
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _after_fork() -> None:
    """Let SIGTERM come again, if it was held back here."""
    if threading.get_ident() in _held.forking:
        _held.forking.remove(threading.get_ident())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _after_fork_in_child() -> None:
    """Leave folders and locks to the parent."""
    locks = list(_held.locks.values())
    _held.locks.clear()
    _held.pid = os.getpid()
    # A lock lasts until every copy of its descriptor is closed: a child that outlived its parent would keep it, and the
    # parent's leftovers with it. Closed, not unlocked: that would unlock the parent's copy as well.
    for lock in locks:
        os.close(lock.descriptor)
    _restore_sigterm()  # first: a SIGTERM that was held back is to find the default action
    _after_fork()
    _held.forking.clear()  # the parent's other threads


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
