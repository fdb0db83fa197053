"""A checkpoint's folder on the disk: how one appears, who is in it meanwhile, and what goes.

A checkpoint appears with its marker. The order is: data, fsync, every rank agrees, marker by rename. Names of files
begin with a token of the save's own, so saving into a folder that has a checkpoint leaves that whole until the new
marker takes the old one's place.

Whoever saves into a folder holds it, and whoever cleans one holds it alone. The lock is the folder's own (`flock`): it
needs no file, and the kernel lets go of it however a process ends. Some network file systems have no locks of folders.
There the locks of data files remain (`machine.aio.File.lock`), and that the marker is read again before anything goes.

What goes is known to be ours, never what only looks like it:

- A link is nobody's: it is neither followed nor removed.
- A file goes when its name has a save's token, and a data file or an unfinished marker of that token lies beside it.
  These go last, so that what is left of a cleaning that was cut short is known, too.
- A folder that somebody saves into is left to him. What was just written is told by its inode, whatever its path.
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
    """Refuse a folder that has something in it.

    Arguments:
        folder: which need not exist.
        verb: what was to be done, for the message.

    Raises:
        ConfigError: it has.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already. {verb} a folder that is empty or does not exist.")


def make_folder(folder: Path) -> list[Path]:
    """Make a folder, and those above it, where they are missing, and have its name on the disk.

    Returns:
        Those that were made, the deepest first: what `remove_folders` takes back.

    Raises:
        CheckpointError: it cannot be made, and none was.
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
        # Else a power failure can take away a folder, with a checkpoint in it that was said to be whole.
        for path in made:
            sync_folder(path.parent)
        if not made and os.access(folder.parent, os.R_OK):  # whoever made it may not have waited for the disk
            sync_folder(folder.parent)
    except CheckpointError:
        remove_folders(made)
        raise
    return made


def remove_folders(made: Iterable[Path]) -> None:
    """Take back folders that were made, the deepest first, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def write_file(file: Path, data: bytes) -> FileEntry:
    """Write a new file and have it on the disk.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    try:
        with named("Writing", file), open(file, "xb") as opened:
            opened.write(data)
            opened.flush()
            # The marker will say that this file is whole: without the wait, a power failure can leave it empty.
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
    """Have the names in a folder on the disk: `fsync` of a file does not say that its name is.

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
    """Put the marker in its place. Everything that it names is on the disk.

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
    # Names before the marker: else a power failure can leave a marker that names files which are not there.
    sync_folder(folder)
    # The marker's bytes before its name: else one that was there is replaced by one that is cut short.
    write_file(prepared, manifest.to_bytes())
    try:
        with named("Writing", folder / MARKER):
            # At once, for everybody who looks: until here the old marker holds, from here on the new one.
            os.replace(prepared, folder / MARKER)
    except CheckpointError:
        remove_file(prepared)
        raise


# Who is in it


class FolderLock:
    """A folder that somebody is in: beside others (`share`), or alone. Until its block ends.

    Arguments:
        folder: the folder.

    Raises:
        CheckpointError: it is not there.
    """

    def __init__(self, folder: Path) -> None:
        with named("Writing into", folder):
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def share(self) -> None:
        """Hold the folder beside others that save into it."""
        with contextlib.suppress(OSError):  # there are no locks of folders here
            # Waits for one who cleans it, which takes a moment: he would remove files that have no marker yet.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def take_alone(self) -> bool:
        """Take the folder alone; returns whether nobody else holds it.

        Then nobody can until this one lets go. Else this one may have lost it: a lock is exchanged, not widened.
        """
        return _lock(self._descriptor)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            # Not by closing alone: a process that was forked meanwhile has the descriptor, too, and would hold it on.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _lock(descriptor: int) -> bool:
    """Lock what is open, without waiting; returns whether nobody else has it, as far as there are locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED
    return True


def _is_being_written(file: Path) -> bool:
    """Whether a save holds a file: data files are locked while they are written."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in _LOCKED
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


# What goes


def settle(folder: Path, hold: FolderLock) -> None:
    """Have the name of a marker that was just put there on the disk, then remove what it replaces.

    Arguments:
        folder: the checkpoint's.
        hold: this save's hold of it; it is not to be counted on afterwards.

    Raises:
        CheckpointError: after a power failure the one before may be there again, so its files stay, as the new ones do.
    """
    # Before anything goes: until the rename is on the disk, the files of the old marker may be needed again.
    sync_folder(folder)
    if hold.take_alone():  # else another save into this folder is under way, and cleans it
        _clean(folder)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints beside a new one, and what saves that did not end have left."""
    own = _inode(folder)
    beside = [pair for pair in checkpoints_in(folder.parent) if not pair[0].is_symlink()]
    if own not in [_inode(path) for path, _ in beside]:  # it is reached through a link
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
    """Remove the checkpoint in a folder, and the folder if nothing else is in it; nothing where it has no marker."""
    with contextlib.suppress(CheckpointError):
        _remove(folder, read_marker(folder))


def _remove(folder: Path, manifest: Manifest) -> None:
    """Remove a checkpoint, if it is still the one that was seen: another job may have saved there meanwhile."""
    marker = folder / MARKER
    with contextlib.suppress(OSError, CheckpointError), FolderLock(folder) as hold:
        if hold.take_alone() and not marker.is_symlink() and read_marker(folder).token == manifest.token:
            marker.unlink()  # from here on it is none
            with contextlib.suppress(CheckpointError):
                # Before its files go: else a power failure can bring the marker back without them.
                sync_folder(folder)
            _clean(folder)


def _clean(folder: Path) -> None:
    """Remove files of saves that have no marker, but for those that are being written; an empty folder goes.

    Nobody else holds the folder.
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
    """List the files of each save that can be told, in the order in which they go: what tells them is the last."""
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
    """Tell what a path leads to, by whatever name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
