"""Folders of checkpoints: which are whole, which is the newest, and how one appears and goes.

A checkpoint is a folder with a marker, `checkpoint.json`, and the files that the marker names. Their names begin with a
token of their own, so saving into a folder that has a checkpoint leaves that whole until the new marker takes the
old one's place. The order is: data, fsync, every rank agrees, marker by rename.

    checkpoints/step-200/   checkpoint.json   5e1c09aa-00000.tiles   5e1c09aa-00000.json   5e1c09aa.safetensors
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from penstock.checkpoint.manifest import (
    MARKER,
    MOST_MARKER_BYTES,
    MOST_SERIAL,
    FileEntry,
    Manifest,
    checksum,
    files_of,
)
from penstock.errors import CheckpointError, ConfigError

LATEST = "latest"

#: Of every file of a checkpoint, less what umask takes away, as torch.save has it: who may read it is for its owner.
FILE_MODE = 0o666

logger = logging.getLogger("penstock")


def data_name(token: str, rank: int) -> str:
    """A rank's tiles."""
    return f"{token}-{rank:05d}.tiles"


def table_name(token: str, rank: int) -> str:
    """A rank's table."""
    return f"{token}-{rank:05d}.json"


def tensors_name(token: str) -> str:
    """Tensors of `extra`, options and buffers."""
    return f"{token}.safetensors"


def own_tensors_name(token: str, rank: int) -> str:
    """Buffers of a rank that are not the first one's."""
    return f"{token}-{rank:05d}.safetensors"


def resolve(path: str | PathLike[str]) -> Path:
    """The checkpoint that a path stands for: itself, or the newest whole one in the folder or beside its `latest`.

    Raises:
        CheckpointError: there is none.
    """
    parent, found = stands_for(Path(path))
    return parent / found[0][0]


def stands_for(path: Path) -> tuple[Path, list[tuple[str, str]]]:
    """What a path stands for.

    Returns:
        A folder, and names and tokens of checkpoints in it, the newest first: the path with an empty name, or all
        that are whole in it or beside its `latest`.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MARKER).is_file():
        return path, [("", read_marker(path).token)]
    parent = path.parent if path.name == LATEST and not path.is_dir() else path
    found = checkpoints_in(parent)
    if found:
        return parent, [(folder.name, manifest.token) for folder, manifest in reversed(found)]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.", file=str(path))
    raise CheckpointError(
        f"{path} is no whole checkpoint: it has no {MARKER}, which is written last. Load another one.",
        file=str(path / MARKER),
    )


def checkpoints_in(parent: Path) -> list[tuple[Path, Manifest]]:
    """The whole checkpoints in a folder, the newest last. Damaged ones are passed over, with a warning."""
    found = []
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            try:
                if (folder / MARKER).is_file():
                    found.append((folder, read_manifest(folder)))
            except CheckpointError as error:
                logger.warning("%s is passed over. %s", folder, error)
    return sorted(found, key=lambda pair: (pair[1].serial, pair[0].name))


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's marker; every file that it names is there, in its size.

    Raises:
        CheckpointError: names the file and the field.
    """
    manifest = read_marker(folder)
    for entry in files_of(manifest):
        file = folder / entry.name
        try:
            nbytes = file.stat().st_size if file.is_file() else -1
        except OSError as error:
            raise _failed("reading", file, error) from error
        if nbytes != entry.nbytes:
            why = f"has {nbytes:,} bytes, not {entry.nbytes:,}" if nbytes >= 0 else "is missing"
            raise CheckpointError(f"{file} {why}: the checkpoint is damaged. Load another one.", file=str(file))
    return manifest


def read_marker(folder: Path) -> Manifest:
    """A checkpoint's marker, whatever became of the files that it names.

    Raises:
        CheckpointError: names the file and the field.
    """
    marker = folder / MARKER
    return Manifest.read(marker, _read(marker, most=MOST_MARKER_BYTES))


def read_file(folder: Path, entry: FileEntry) -> bytes:
    """A file as a whole, verified.

    Raises:
        CheckpointError: it cannot be read, or is not what was written.
    """
    file = folder / entry.name
    data = _read(file, most=entry.nbytes)
    if len(data) != entry.nbytes or checksum(data) != entry.checksum:
        raise CheckpointError(
            f"{file} is damaged: its checksum is not the one in {MARKER}. Load another checkpoint.", file=str(file)
        )
    return data


def _read(file: Path, *, most: int) -> bytes:
    try:
        if file.stat().st_size > most:
            raise CheckpointError(f"{file} has more than {most:,} bytes: it is damaged.", file=str(file))
        return file.read_bytes()
    except OSError as error:
        raise _failed("reading", file, error) from error


def write_file(file: Path, data: bytes) -> FileEntry:
    """Write a new file and have it on the disk.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    try:
        with open(file, "xb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        remove_file(file)
        raise _failed("writing", file, error) from error
    return FileEntry(file.name, len(data), checksum(data))


def check_free(folder: Path, verb: str) -> None:
    """Refuse a folder that has something in it. `verb`: what was to be done, for the message.

    Raises:
        ConfigError: it has.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already. {verb} a folder that is empty or does not exist.")


def make_folder(folder: Path) -> list[Path]:
    """Make it, and those above it, where they are missing, and have its name on the disk.

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
        raise _failed("making", folder, error) from error
    try:
        for path in made:
            sync_folder(path.parent)
        if not made and os.access(folder.parent, os.R_OK):  # whoever made it may not have waited for the disk
            sync_folder(folder.parent)
    except CheckpointError:
        remove_folders(made)
        raise
    return made


def remove_folders(made: Iterable[Path]) -> None:
    """Take back folders that were made, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def remove_file(file: Path) -> None:
    """Remove it, if that is possible."""
    with contextlib.suppress(OSError):
        file.unlink()


def sync_folder(folder: Path) -> None:
    """Have the names in it on the disk.

    Raises:
        CheckpointError: they may not be.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _failed("writing", folder, error) from error


def commit(folder: Path, manifest: Manifest) -> None:
    """Everything that the marker names is on the disk: put the marker in its place.

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
    sync_folder(folder)
    write_file(prepared, manifest.to_bytes())
    try:
        os.replace(prepared, folder / MARKER)
    except OSError as error:
        remove_file(prepared)
        raise _failed("writing", folder / MARKER, error) from error


def next_serial(folder: Path) -> int:
    """A number greater than that of every checkpoint here and beside it."""
    beside = checkpoints_in(folder.parent)
    serial = 1 + max((manifest.serial for _, manifest in beside), default=0)
    if serial > MOST_SERIAL:
        raise CheckpointError(
            f"{beside[-1][0]} says that it is the last that can be counted. Remove it, or save elsewhere.",
            file=str(beside[-1][0] / MARKER),
            field="serial",
        )
    return serial


def _failed(verb: str, file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{verb.capitalize()} {file} failed: {error.strerror or error}.", file=str(file))
