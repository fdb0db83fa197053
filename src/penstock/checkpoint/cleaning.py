"""What goes: checkpoints that are not kept, and what saves that did not end, or were replaced, have left.

Removed is what is known to be ours, never what only looks like it:

- A link is nobody's: it is neither followed nor removed.
- A file goes when its name has a save's token, and a data file or an unfinished marker of that token lies beside it.
  These go last, so that what is left of a cleaning that was cut short is known, too.
- A folder that somebody saves into is left to him. What was just written is told by its inode, whatever its path.
"""

import contextlib
import os
import re
import stat
from pathlib import Path

from penstock.checkpoint import held
from penstock.checkpoint.folder import checkpoints_in, read_marker, sync_folder
from penstock.checkpoint.manifest import MARKER, Manifest, files_of
from penstock.errors import CheckpointError

_OURS = re.compile(
    r"(?P<token>[0-9a-f]{8})(?:(?P<tiles>-\d{5}\.tiles)|-\d{5}\.json|-\d{5}\.safetensors|\.safetensors)"
    r"|checkpoint\.json\.(?P<unfinished>[0-9a-f]{8})"
)


def settle(folder: Path, hold: held.Hold) -> None:
    """The marker is in its place: have that on the disk, then drop what it replaces.

    Arguments:
        folder: of the checkpoint.
        hold: of this save; it is not to be counted on afterwards.

    Raises:
        CheckpointError: after a power failure the one before may be there again, so its files stay, as the new ones do.
    """
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
            if _is_folder(other) and _inode(other) != own and not os.path.lexists(other / MARKER):
                _remove_leftovers(other)


def _remove(folder: Path, manifest: Manifest) -> None:
    """Remove a checkpoint, if it is still the one that was seen."""
    marker = folder / MARKER
    with contextlib.suppress(OSError, CheckpointError), held.alone(folder) as is_alone:
        if is_alone and not marker.is_symlink() and read_marker(folder).token == manifest.token:
            marker.unlink()  # from here on it is none
            with contextlib.suppress(CheckpointError):
                sync_folder(folder)
            _clean(folder)


def _remove_leftovers(folder: Path) -> None:
    with contextlib.suppress(OSError), held.alone(folder) as is_alone:
        if is_alone:
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
            if not any(held.is_being_written(file) for file in files):
                for file in files:
                    file.unlink()
                    removed = True
        if removed and not marked:
            folder.rmdir()  # unless something else is in it


def _by_token(folder: Path, kept: set[str]) -> list[list[Path]]:
    """Files of each save that can be told, in the order in which they go."""
    files: dict[str, list[Path]] = {}
    telling: dict[str, list[Path]] = {}
    for file in folder.iterdir():
        match = _OURS.fullmatch(file.name)
        if match is None or file.name in kept or not stat.S_ISREG(file.lstat().st_mode):
            continue
        tells = match["tiles"] or match["unfinished"]
        (telling if tells else files).setdefault(match["token"] or match["unfinished"], []).append(file)
    return [files.get(token, []) + last for token, last in telling.items()]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _inode(path: Path) -> tuple[int, int] | None:
    """What a path leads to, by whatever name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
