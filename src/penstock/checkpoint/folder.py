"""A checkpoint's folder on the disk: how a checkpoint appears, locks, and what is removed.

A checkpoint appears with its marker. The order is: data, fsync, every rank agrees, marker by rename. Names of files
begin with a token of the save's own, so saving into a folder that has a checkpoint leaves that whole until the new
marker takes the old one's place.

A save holds a shared lock of its folder, a cleaning an exclusive one. The lock is the folder's own (`flock`): it needs
no file, and the kernel releases it however a process ends. Some network file systems have no locks of folders. There
data files are locked (`runtime.aio.File.lock`), and the marker is read again before anything is removed.

Only files of saves are removed:

- A link is neither followed nor removed.
- A file is removed if its name has a save's token, and a data file or an unfinished marker of that token lies beside
  it. These are removed last, so that the rest of an interrupted cleaning is recognised, too.
- A folder that another save holds is left alone. The checkpoint that was just written is recognised by its inode.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from penstock.checkpoint.format import MARKER, FileEntry, Manifest, checksum, files_of, named
from penstock.checkpoint.reader import checkpoints_in, read_marker
from penstock.errors import CheckpointError, ConfigError, call_failed

_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
_OURS = re.compile(
    r"(?P<token>[0-9a-f]{8})(?:(?P<tiles>-\d{5}\.tiles)|-\d{5}\.json|-\d{5}\.safetensors|\.safetensors)"
    r"|checkpoint\.json\.(?P<unfinished>[0-9a-f]{8})"
)


def file_name(token: str, suffix: str, rank: int | None = None) -> str:
    """Name a file of a save: `.tiles` and `.json` (their table) of a rank, `.safetensors` of a rank or of all."""
    return f"{token}{suffix}" if rank is None else f"{token}-{rank:05d}{suffix}"


# How one appears


def check_free(folder: Path, verb: str) -> None:
    """Refuse a folder that is not empty.

    Arguments:
        folder: which need not exist.
        verb: what was to be done, for the message.

    Raises:
        ConfigError: it has.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already. {verb} a folder that is empty or does not exist.")


def make_folder(folder: Path) -> list[Path]:
    """Make a folder, and missing ones above it, and sync their names to the disk.

    Returns:
        The folders that were made, the deepest first, for `remove_folders`.

    Raises:
        CheckpointError: it cannot be made. None was made.
    """
    made: list[Path] = []
    try:
        for path in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
            try:
                path.mkdir()
                made.insert(0, path)
            except FileExistsError:  # by another process, meanwhile
                if not path.is_dir():
                    raise
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        remove_folders(made)
        raise call_failed("Making", folder, error) from error
    try:
        # Else a power failure can remove a folder with a whole checkpoint in it.
        for path in made:
            sync_folder(path.parent)
        if not made and os.access(folder.parent, os.R_OK):  # its maker may not have synced it
            sync_folder(folder.parent)
    except CheckpointError:
        remove_folders(made)
        raise
    return made


def remove_folders(made: Iterable[Path]) -> None:
    """Remove folders, the deepest first, until one is not empty."""
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def write_file(file: Path, data: bytes) -> FileEntry:
    """Write a new file, and sync it to the disk.

    Raises:
        CheckpointError: it cannot be written. Nothing of it is left.
    """
    try:
        with named("Writing", file), open(file, "xb") as opened:
            opened.write(data)
            opened.flush()
            # The marker names this file: without the sync, a power failure can leave it empty.
            os.fsync(opened.fileno())
    except CheckpointError:
        remove_file(file)
        raise
    return FileEntry(file.name, len(data), checksum(data))


def remove_file(file: Path) -> None:
    """Remove a file, if that is possible."""
    with contextlib.suppress(OSError):
        file.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk: `fsync` of a file does not include its name.

    Raises:
        CheckpointError: they may not be.
    """
    with named("Writing", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the marker and rename it into place. Precondition: all files that it names are on the disk.

    Raises:
        CheckpointError: what was there before is untouched.
    """
    for entry in files_of(manifest):
        file = folder / entry.name
        if not file.is_file() or file.stat().st_size != entry.nbytes:
            raise CheckpointError(
                f"{file} of another rank is not visible here. Save into a folder that all ranks share.", file=str(file)
            )
    prepared = folder / f"{MARKER}.{manifest.token}"
    # Names before the marker: else a power failure can leave a marker that names missing files.
    sync_folder(folder)
    # The marker's bytes before its name: else a power failure can replace the old marker by a part of this one.
    write_file(prepared, manifest.to_bytes())
    try:
        with named("Writing", folder / MARKER):
            # An atomic replacement: until here the old marker holds, from here on the new one.
            os.replace(prepared, folder / MARKER)
    except CheckpointError:
        remove_file(prepared)
        raise


# Locks


class FolderLock:
    """A lock of a folder, shared (`share`) or exclusive (`take_alone`), until its block ends.

    Arguments:
        folder: the folder.

    Raises:
        CheckpointError: it is not there.
    """

    def __init__(self, folder: Path) -> None:
        with named("Writing into", folder):
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def share(self) -> None:
        """Lock the folder beside other saves."""
        with contextlib.suppress(OSError):  # a file system without locks of folders
            # Waits for a cleaning, which would remove files that have no marker yet.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def take_alone(self) -> bool:
        """Lock the folder exclusively. Return False if another process holds it.

        The shared lock may be lost then: the kernel exchanges a lock, and does not widen it.
        """
        return _lock(self._descriptor)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            # Closing alone is not enough: a process that was forked meanwhile has the descriptor, too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a descriptor without waiting. Return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED
    return True


def _is_being_written(file: Path) -> bool:
    """Return True if a save has locked a file: data files are locked while they are written."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in _LOCKED
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


# What is removed


def settle(folder: Path, hold: FolderLock) -> None:
    """Flush the name of a new marker to the disk, then remove the files that it replaces.

    Arguments:
        folder: the checkpoint's.
        hold: this save's lock of it, which may be lost afterwards.

    Raises:
        CheckpointError: a power failure may bring the old marker back, so the files of both stay.
    """
    # Before any removal: until the rename is on the disk, the files of the old marker may be needed again.
    sync_folder(folder)
    if hold.take_alone():  # else another save into this folder is under way, and cleans it later
        _clean(folder)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints beside a new one, and files of saves that did not end."""
    own = _inode(folder)
    beside = [pair for pair in checkpoints_in(folder.parent) if not pair[0].is_symlink()]
    if own not in [_inode(path) for path, _ in beside]:  # the new one is reached through a link
        keep -= 1
    for old, manifest in beside[: max(0, len(beside) - keep)]:
        if _inode(old) != own:
            _remove(old, manifest)
    with contextlib.suppress(OSError):
        for other in folder.parent.iterdir():
            is_folder = other.is_dir() and not other.is_symlink()
            if is_folder and _inode(other) != own and not os.path.lexists(other / MARKER):
                with contextlib.suppress(CheckpointError), FolderLock(other) as hold:
                    if hold.take_alone():
                        _clean(other)


def remove(folder: Path) -> None:
    """Remove the checkpoint in a folder, and the folder if it is empty then. Without a marker, remove nothing."""
    with contextlib.suppress(CheckpointError):
        _remove(folder, read_marker(folder))


def _remove(folder: Path, manifest: Manifest) -> None:
    """Remove a checkpoint if its token is unchanged: another job may have saved there meanwhile."""
    marker = folder / MARKER
    with contextlib.suppress(OSError, CheckpointError), FolderLock(folder) as hold:
        if hold.take_alone() and not marker.is_symlink() and read_marker(folder).token == manifest.token:
            marker.unlink()  # from here on the folder has no checkpoint
            with contextlib.suppress(CheckpointError):
                # Before its files are removed: else a power failure can bring the marker back without them.
                sync_folder(folder)
            _clean(folder)


def _clean(folder: Path) -> None:
    """Remove files of saves that have no marker and are not being written, and the folder if it is empty then.

    Precondition: the folder is locked exclusively.
    """
    with contextlib.suppress(OSError, CheckpointError):
        marked = os.path.lexists(folder / MARKER)
        kept = {entry.name for entry in files_of(read_marker(folder))} if marked else set()
        removed = False
        for files in _by_token(folder, kept):
            if not any(map(_is_being_written, files)):
                for file in files:
                    file.unlink()
                    removed = True
        if removed and not marked:
            folder.rmdir()  # unless something else is in it


def _by_token(folder: Path, kept: set[str]) -> list[list[Path]]:
    """List the files of each save that is recognised. Those that it is recognised by come last."""
    files: dict[str, list[Path]] = {}
    telling: dict[str, list[Path]] = {}
    for file in folder.iterdir():
        match = _OURS.fullmatch(file.name)
        if match is None or file.name in kept or not stat.S_ISREG(file.lstat().st_mode):
            continue
        tells = match["tiles"] or match["unfinished"]
        (telling if tells else files).setdefault(match["token"] or match["unfinished"], []).append(file)
    return [files.get(token, []) + last for token, last in telling.items()]


def _inode(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a path; `None` if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
