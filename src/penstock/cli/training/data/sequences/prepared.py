"""The encoded rows of one source on disk, written by one process and mapped by all.

    <folder>/<fingerprint>.lock            held by the process that writes
    <folder>/<fingerprint>.failed          why the last attempt was given up, for those that waited
    <folder>/<fingerprint>.<random>.part/  what is being written; renamed to
    <folder>/<fingerprint>/
        owner.json      that it is ours: nothing without it is ever removed
        ids.bin         token ids of all rows, one after the other: uint16 or uint32
        trained.bin     whether a token is a label: uint8; absent where all are
        offsets.bin     where each row begins in them, and the end of the last: int64
        numbers.bin, runs.bin, names.bin    the file and the number of each row
        prepared.json   how much of it there is; written last, so that half of it is never taken for the whole

Nothing here grows in memory with the data.
"""

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from penstock.cli.training.data.sequences.rowfiles import DataFile, RowPlaces, map_file
from penstock.cli.training.data.sequences.writing import ID_TYPES, Sample, SampleWriter
from penstock.errors import ConfigError, one_line
from penstock.files import check_own, parse_object, read_bytes, write_whole

#: Token ids as they lie on disk.
Tokens = npt.NDArray[np.uint16 | np.uint32]
#: Called with the rows and the tokens that are written so far.
Progress = Callable[[int, int], None]

#: How many rows there are, by what is counted and then by its name.
Counts = Mapping[str, Mapping[str, int]]
MARKER = "prepared.json"
_OWNER = "owner.json"
_MADE_BY = "penstock train: prepared data"
_FORMAT = 2
_FILES = ("ids.bin", "trained.bin", "offsets.bin", "numbers.bin", "runs.bin", "names.bin", MARKER, _OWNER)
_PART = ".part"
_FAILED = ".failed"
_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True)
class Prepared:
    """The encoded rows of one source, memory-mapped.

    Attributes:
        ids: token ids of all rows, of shape (tokens,).
        trained: whether a token is a label, bool of shape (tokens,); `None` where all are.
        offsets: where each row begins in them, and the end of the last: int64 of shape (rows + 1,).
        places: the file and the number of each row.
        digest: names ids, labels and rows, wherever they came from.
        counts: how many rows there are of what, as it was told when they were encoded.
    """

    ids: Tokens
    trained: npt.NDArray[np.bool_] | None
    offsets: npt.NDArray[np.int64]
    places: RowPlaces
    digest: str
    counts: Counts

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens each row has, int64 of shape (rows,)."""
        return np.diff(self.offsets)

    def where(self, row: int) -> str:
        """Name the file and the number of a row, such as `"chat.jsonl:17"`."""
        return self.places.where(row)


def prepare(
    folder: Path,
    fingerprint: str,
    samples: Callable[[], Iterator[Sample]],
    *,
    vocab_size: int,
    counts: Callable[[], Counts] = dict,
    progress: Progress | None = None,
    waiting: Callable[[], None] | None = None,
) -> Prepared:
    """Map the rows that were prepared under a fingerprint, or encode and write them first.

    Of all processes that call it, on any machine that has the folder, one writes and the others wait. Where the data is
    at fault, those that waited raise what the writer raised, and do not read it all again.

    Arguments:
        folder: where prepared data is kept; made when missing.
        fingerprint: what names the result, see `fingerprints.fingerprint`: a plain file name.
        samples: encodes the rows in their order. Called by the process that writes.
        vocab_size: what all ids are below. Up to 2**16 they are stored in two bytes, in four otherwise.
        counts: tells, once all are encoded, how many there were of what; kept with them.
        progress: called now and then, and at the end, by the process that writes.
        waiting: called now and then by a process that waits for another one.

    Raises:
        ConfigError: what `samples` raises; ids outside of the vocabulary; a folder that cannot be written or is full.
    """
    place = folder / fingerprint
    if (found := _open(place, fingerprint)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failed_before = _failure(folder, fingerprint)
        with _locked(folder, fingerprint, waiting):
            if (found := _open(place, fingerprint)) is None:
                # A rank of this run came first, and met what this one would meet after the same hours.
                if (failure := _failure(folder, fingerprint)) is not None and failure != failed_before:
                    raise ConfigError(failure["message"])
                _discard_parts(folder, fingerprint)
                try:
                    _write(place, fingerprint, _given(samples), vocab_size, counts, progress)
                except ConfigError as error:
                    _note_failure(folder, fingerprint, str(error))
                    raise
                _failure_file(folder, fingerprint).unlink(missing_ok=True)
                found = _open(place, fingerprint)
    except (OSError, NotImplementedError) as error:
        raise ConfigError(
            f"Prepared data cannot be kept in {folder}: {one_line(error)}. Make it writable, or use another --cache."
        ) from error
    if found is None:
        raise ConfigError(f"{place} was changed while it was read. Start again, and let nothing else change {folder}.")
    return found


def discard_old(folder: Path, used: Collection[str], *, newest: int = 2) -> None:
    """Remove prepared data that no run has used for the longest time, and what runs that died have left.

    Arguments:
        folder: where prepared data is kept.
        used: fingerprints that this run uses; they stay.
        newest: how many others stay, those that were used last.
    """
    with contextlib.suppress(OSError):  # what cannot be removed stays, and is nobody's mistake
        finished = {entry.name: entry for entry in folder.iterdir() if _is_finished(entry)}
        others = [name for name in finished if name not in used]
        others.sort(key=lambda name: (finished[name] / MARKER).stat().st_mtime_ns, reverse=True)
        parts = {entry.name.split(".")[0] for entry in folder.glob(f"*{_PART}") if _is_ours(entry)}
        failed = {entry.stem for entry in folder.glob(f"*{_FAILED}") if _failure(folder, entry.stem) is not None}
        for name in {*others[newest:], *parts, *failed}.difference(used):
            with _free(folder, name) as is_free:
                if is_free:
                    _discard(folder, name, everything=name not in others[:newest])


def _discard(folder: Path, fingerprint: str, *, everything: bool) -> None:
    """Remove what was left of an attempt, or all of a fingerprint. Called with the lock held."""
    _discard_parts(folder, fingerprint)
    if everything and (not (folder / fingerprint).exists() or _remove(folder / fingerprint)):
        _failure_file(folder, fingerprint).unlink(missing_ok=True)
        _lock_file(folder, fingerprint).unlink(missing_ok=True)


# Writing


def _write(
    place: Path,
    fingerprint: str,
    samples: Iterator[Sample],
    vocab_size: int,
    counts: Callable[[], Counts],
    progress: Progress | None,
) -> None:
    """Write the samples beside their place, and move them there once they are complete."""
    if place.is_symlink() or (place.exists() and not _remove(place)):
        raise ConfigError(f"{place} is in the way of prepared data, and none of it. Move it, or use another folder.")
    part = place.with_name(f"{fingerprint}.{secrets.token_hex(8)}{_PART}")
    part.mkdir()
    try:
        _write_json(part / _OWNER, {"made_by": _MADE_BY, "fingerprint": fingerprint})
        writer = SampleWriter(part, vocab_size)
        try:
            _write_all(writer, samples, progress)
            held = {**writer.finish(), "counts": counts()}
        finally:
            writer.close()
        _write_json(part / MARKER, {"made_by": _MADE_BY, "format": _FORMAT, "fingerprint": fingerprint, **held})
        _sync_folder(part)
        try:
            part.rename(place)
        except OSError:
            if _open(place, fingerprint) is None:
                raise
            _remove(part)  # on a disk whose locks do not hold, another process was first
        _sync_folder(place.parent)
    except BaseException:
        _remove(part)
        raise


def _given(samples: Callable[[], Iterator[Sample]]) -> Iterator[Sample]:
    """Yield the samples. Where they fail it is the data that cannot be read, and not ours that cannot be written."""
    try:
        yield from samples()
    except OSError as error:
        raise ConfigError(f"The files of --data cannot be read: {one_line(error)}. Check them.") from error


def _write_all(writer: SampleWriter, samples: Iterator[Sample], progress: Progress | None) -> None:
    """Write sample by sample, and tell how far it is."""
    told = time.monotonic()
    for sample in samples:
        writer.add(sample)
        if progress is not None and (now := time.monotonic()) - told >= _PROGRESS_SECONDS:
            told = now
            progress(writer.row_count, writer.token_count)
    if progress is not None:
        progress(writer.row_count, writer.token_count)


# Reading


def _open(place: Path, fingerprint: str) -> Prepared | None:
    """Map what a folder holds; `None` where it is missing, of another version, or not what its marker says."""
    marker = _read_json(place / MARKER)
    try:
        if (marker["made_by"], marker["format"], marker["fingerprint"]) != (_MADE_BY, _FORMAT, fingerprint):
            return None
        sizes: Mapping[str, int] = marker["sizes"]
        if any((place / name).stat().st_size != size for name, size in sizes.items()):
            return None
        ids = map_file(place / "ids.bin", ID_TYPES[marker["id_bytes"]])
        trained = map_file(place / "trained.bin", np.bool_) if "trained.bin" in sizes else None
        offsets = map_file(place / "offsets.bin", np.int64)
        tokens = marker["tokens"]
        if len(ids) != tokens or len(offsets) != marker["rows"] + 1 or (offsets[0], offsets[-1]) != (0, tokens):
            return None
        with contextlib.suppress(OSError):  # a folder that is shared for reading only
            os.utime(place / MARKER)  # used: `discard_old` takes others first
        return Prepared(ids, trained, offsets, RowPlaces(place), str(marker["digest"]), _counts(marker["counts"]))
    except (OSError, KeyError, TypeError, AttributeError, ValueError, IndexError):
        return None


def _counts(held: Mapping[str, Mapping[str, int]]) -> Counts:
    """Check what a marker says of counts."""
    return {str(what): {str(name): int(count) for name, count in of.items()} for what, of in held.items()}


# Files beside it


def _lock_file(folder: Path, fingerprint: str) -> Path:
    return folder / f"{fingerprint}.lock"


def _failure_file(folder: Path, fingerprint: str) -> Path:
    return folder / f"{fingerprint}{_FAILED}"


def _failure(folder: Path, fingerprint: str) -> dict[str, str] | None:
    """Read why the last attempt was given up, if one was."""
    found = _read_json(_failure_file(folder, fingerprint))
    return found if found.get("made_by") == _MADE_BY and isinstance(found.get("message"), str) else None


def _note_failure(folder: Path, fingerprint: str, message: str) -> None:
    note = {"made_by": _MADE_BY, "attempt": secrets.token_hex(8), "message": message}
    with contextlib.suppress(OSError):  # on a full disk, the others find out for themselves
        write_whole(check_own(_failure_file(folder, fingerprint)), json.dumps(note))


@contextlib.contextmanager
def _locked(folder: Path, fingerprint: str, waiting: Callable[[], None] | None) -> Iterator[None]:
    """Hold the lock, however long somebody else does."""
    lock = FileLock(_lock_file(folder, fingerprint))
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_PROGRESS_SECONDS)
        except Timeout:
            if waiting is not None:
                waiting()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _free(folder: Path, fingerprint: str) -> Iterator[bool]:
    """Hold the lock if nobody does, and tell whether that is so."""
    lock = FileLock(_lock_file(folder, fingerprint))
    try:
        lock.acquire(blocking=False)
    except (Timeout, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _discard_parts(folder: Path, fingerprint: str) -> None:
    """Remove what processes that died were writing. Called with the lock held: nobody alive is writing."""
    for part in folder.glob(f"{fingerprint}.*{_PART}"):
        _remove(part)


def _is_ours(place: Path) -> bool:
    """Tell whether a folder was made here."""
    return not place.is_symlink() and _read_json(place / _OWNER).get("made_by") == _MADE_BY


def _is_finished(place: Path) -> bool:
    """Tell whether a folder was made here, and to its end."""
    return place.suffix != _PART and _is_ours(place) and (place / MARKER).is_file()


def _remove(place: Path) -> bool:
    """Remove a folder of ours, and tell whether it is gone. Files in it that are not ours stay, and the folder then."""
    if not _is_ours(place):
        return False
    # The owner last: what is left by a process that dies here is still known to be ours.
    for name in _FILES:
        with contextlib.suppress(OSError):
            (place / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        place.rmdir()
    return not place.exists()


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file; an empty one where there is none."""
    try:
        return parse_object(read_bytes(path))
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    file = DataFile(path)
    try:
        file.append(json.dumps(value).encode())
        file.finish()
    finally:
        file.close()


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk itself, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
