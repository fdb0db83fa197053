"""What `--data` and `--eval-data` name: files, saved data sets, data sets of the Hugging Face hub, with weights."""

import glob
import math
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cli.training.data.reading.formats import COMPRESSIONS, SUFFIXES, Format, format_of, is_known
from penstock.cli.training.data.reading.hub import Split, is_saved, saved_split
from penstock.cli.training.data.reading.text import shown
from penstock.errors import ConfigError, one_line
from penstock.integrations.hub import is_hub_name

_NOT_LIBRARY_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_OPTIONS: dict[Split, str] = {"train": "--data", "eval": "--eval-data"}


@dataclass(frozen=True)
class Source:
    """What one pattern names.

    Attributes:
        name: the pattern, without its weight.
        weight: its share of the sequences, against the weights of other sources; `None` where none has one.
        files: in order, each once; none of a data set.
        dataset: the folder that `Dataset.save_to_disk` wrote, or the hub's `owner/name`; `None` for files.
        split: which split of a hub's data set is wanted.
        passed_over: files of text that a folder or a glob has beside tables: what is said of those, and the code that
            made them, more often than what is to be learned.
    """

    name: str
    weight: float | None
    files: tuple[Path, ...]
    dataset: str | None
    split: Split = "train"
    passed_over: tuple[Path, ...] = ()

    @property
    def note(self) -> str:
        """Say what is passed over, for people; nothing where nothing is."""
        if not self.passed_over:
            return ""
        count = len(self.passed_over)
        these = "1 file of text is" if count == 1 else f"{count:,} files of text are"
        return (
            f"{one_line(self.name)} has tables: {these} passed over ({shown(self.passed_over[0])}"
            f"{', ...' if count > 1 else ''}). Name text of its own to read it too"
        )


def find_sources(patterns: Iterable[str], *, split: Split, without: Iterable[Path] = ()) -> list[Source]:
    """Find what the patterns name, in their order. A file that several of them name comes with the first.

    A pattern is a file (of any suffix: an unknown one is read as text), a folder (its files of known suffixes at any
    depth, hidden ones left out), a glob (`**` crosses folders; the same suffixes), a folder that `save_to_disk` of the
    library datasets wrote, or the hub's `owner/name`, which is not looked up before it is read. A weight may follow:
    `PATH:0.7`, unless there is a file of that name. Text beside tables, or JSON, of a folder or a glob is passed over.

    Arguments:
        patterns: what the user wrote.
        split: which split of a data set is wanted; it also says of which option an error speaks.
        without: folders that are passed over in folders and globs: what a run itself writes is no data.

    Raises:
        ConfigError: a pattern names nothing, or nothing that can be read; weights that are not finite and positive, or
            that only some have; a file that two weighted patterns name.

    Example:
        >>> [source.weight for source in find_sources(["code/:3", "chat.jsonl:1"], split="train")]
        [3.0, 1.0]
    """
    sources = []
    own = [folder.absolute() for folder in without]
    for pattern in patterns:
        try:
            sources.append(_source(pattern, split, own))
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # a name too long, with NUL, or of an unknown home
            why = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(f"{_OPTIONS[split]} {pattern!r} cannot be read: {why}. Check it.") from error
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = ", ".join(repr(source.name) for source in sources if source.weight is None)
        raise ConfigError(f"{_OPTIONS[split]} {one_line(bare)} has no weight, and others have. Give all one, or none.")
    return _each_once(sources, _OPTIONS[split])


def standard_library() -> Source:
    """Make a source of this interpreter's own standard library without its tests, which every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _NOT_LIBRARY_TEXT & set(path.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"Python's standard library has no .py files in {root}. Name your own text with --data.")
    return Source("Python's standard library", None, tuple(sorted(files)), None)


def _each_once(sources: list[Source], option: str) -> list[Source]:
    """Leave a file, or a data set, to the first source that names it."""
    owners: dict[str, Source] = {}
    kept = []
    for source in sources:
        names = [source.dataset] if source.dataset is not None else [str(file) for file in source.files]
        keys = {name: os.path.abspath(name) for name in names}
        again = [name for name in names if keys[name] in owners]
        if again and source.weight is not None:
            raise ConfigError(
                f"{option} names {one_line(again[0])} twice, in {owners[keys[again[0]]].name!r} and {source.name!r}, "
                "which both have weights. Name it once."
            )
        owners.update({key: source for key in keys.values() if key not in owners})
        if len(again) < len(names):
            left_out = set(again)
            kept.append(replace(source, files=tuple(file for file in source.files if str(file) not in left_out)))
    return kept


# 1. A pattern


def _source(pattern: str, split: Split, own: Sequence[Path]) -> Source:
    """Find what one pattern names, first with what looks like a weight, then without it."""
    if not _names_files(pattern):
        name, colon, weight = pattern.rpartition(":")
        if colon and name and (number := _number(weight)) is not None:
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(f"{_OPTIONS[split]} {pattern!r} has the weight {weight}. Give a finite one above 0.")
            return replace(_named(name, split, own), weight=number)
    return _named(pattern, split, own)


def _names_files(pattern: str) -> bool:
    return os.path.lexists(Path(pattern).expanduser()) or next(_glob(Path(pattern).expanduser()), None) is not None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _named(pattern: str, split: Split, own: Sequence[Path]) -> Source:
    """Find what a pattern without a weight names."""
    path = Path(pattern).expanduser()
    option = f"{_OPTIONS[split]} {pattern!r}"
    if not pattern:  # a path would take it for the current folder
        raise ConfigError(f"{option} names nothing. Name a file, a folder or a glob.")
    if os.path.lexists(path):
        if path.is_dir() and is_saved(path):
            return Source(pattern, None, (), str(saved_split(path, split)), split)
        if not path.is_dir():
            _check_regular(path, option)
            return Source(pattern, None, (path,), None, split)
        candidates = list(_walk(path, option, own))
    else:
        candidates = [file for file in _glob(path) if not _is_inside(file, own)]
        if not candidates and _is_hub_name(pattern):
            return Source(pattern, None, (), pattern, split)
    files = sorted({file for file in candidates if is_known(file)})
    if not files:
        raise _nothing(option, candidates, is_there=path.is_dir())
    for file in files:
        _check_regular(file, option)
    tables = [file for file in files if format_of(file) is not Format.TEXT]
    texts = [file for file in files if format_of(file) is Format.TEXT]
    if tables and texts:  # of a data set as hubs have them: README.md, LICENSE.txt, a script
        return Source(pattern, None, tuple(tables), None, split, tuple(texts))
    return Source(pattern, None, tuple(files), None, split)


def _is_hub_name(pattern: str) -> bool:
    """Tell whether a name that is no path may be a data set's of the hub: not a file's, and of no revision."""
    return is_hub_name(pattern) and "@" not in pattern and not is_known(Path(pattern))


def _nothing(option: str, candidates: list[Path], *, is_there: bool) -> ConfigError:
    """Make the error of a pattern that gives no file, with what it would have given."""
    known = f"{', '.join(SUFFIXES)} (or one of text with {', '.join(sorted(COMPRESSIONS))})"
    if not candidates:
        what = "is a folder without files" if is_there else "matches nothing"
        return ConfigError(f"{option} {what}. Name a file, or a folder or glob with {known}.")
    suffixes = Counter(file.suffix for file in candidates)
    counted = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes.most_common(5))
    return ConfigError(
        f"{option} holds files ({one_line(counted)}) of which none is read. Folders and globs give {known}; "
        "text of another suffix is named file by file."
    )


# 2. Files


def _check_regular(path: Path, option: str) -> None:
    """Refuse what is no file: opening a pipe would wait for someone to write to it."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{option}: {shown(path)} is a link to nothing. Mend or remove it.")
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"{option}: {shown(path)} is a pipe or device, and data is read more than once. Name a file.")


def _is_inside(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.absolute().is_relative_to(folder) for folder in folders)


def _walk(folder: Path, option: str, own: Sequence[Path]) -> Iterator[Path]:
    """List the files of a folder at any depth, without hidden ones and our own. Links to folders are not followed."""

    def refuse(error: OSError) -> None:  # else what cannot be listed would be left out in silence
        where = one_line(str(error.filename))
        raise ConfigError(f"{option}: {where} cannot be read: {error.strerror}. Check its permissions.") from error

    for root, folders, files in os.walk(folder, onerror=refuse):
        inside = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(name for name in inside if not _is_inside(Path(root, name), own))
        if Path(root) != folder and is_saved(Path(root)):
            raise ConfigError(f"{option} holds a saved data set in {shown(Path(root))}. Name that folder itself.")
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _glob(path: Path) -> Iterator[Path]:
    """List the files that a glob matches, without hidden ones that it does not name. Links to folders under `**` are
    not followed.
    """
    if not glob.has_magic(str(path)):
        return
    first = next(place for place, part in enumerate(path.parts) if glob.has_magic(part))
    root, rest = Path(*path.parts[:first]), list(path.parts[first:])
    if rest[-1] == "**":
        rest.append("*")
    for file in root.glob("/".join(rest)):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if (not hidden or any(part.startswith(".") for part in rest)) and not file.is_dir():
            yield file
