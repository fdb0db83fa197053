"""Files of machines: JSON that people write by hand, and that may be anybody's.

    {"penstock": "machine", "version": 1, "name": "...", "device": "cuda", "probed": false, "fingerprint": {...},
     "figures": {"disk_read": {"value": 7e9, "low": 6.8e9, "high": 7.1e9, "how": "..."}, "disk_write": 5e9, ...}}

What is wrong with one is a `ConfigError` of one line. No more of it is read than a machine can have.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, of_kind, parse_object, read_bytes, reader, write_whole
from penstock.planner.rates import STATED, Rate

KIND, VERSION = "machine", 1
SUFFIX = ".json"
T = TypeVar("T")

_MOST_BYTES = 1 << 20
_MOST_EXACT = 1 << 53
_FOLDER = "machines"


def shipped() -> list[str]:
    """List the names of the machines that come with the package."""
    folder = resources.files("penstock.planner") / _FOLDER
    return sorted(each.name.removesuffix(SUFFIX) for each in folder.iterdir() if each.name.endswith(SUFFIX))


def read(path_or_name: str | PathLike[str], kind: type[T]) -> T:
    """Read a machine of a file, or one that comes with the package.

    Arguments:
        path_or_name: the file, or the machine's name.
        kind: the class of machines.

    Raises:
        ConfigError: there is none, or it is no machine.
    """
    given = os.fspath(path_or_name)
    if not isinstance(given, str):
        raise ConfigError(f"{shown(given)} is no path of a machine's file. Use a text.")
    names = shipped()
    # A path object is a file, always; a text is a name first: what a folder happens to hold does not change it.
    if isinstance(path_or_name, str) and given in names:
        raw = (resources.files("penstock.planner") / _FOLDER / (given + SUFFIX)).read_bytes()
        return _parse(f"The machine {given}", raw, kind)
    if not os.path.lexists(given) and isinstance(path_or_name, str) and not _like_a_path(given):
        near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4) if len(given) <= 99 else []
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"There is no machine {shown(given)}, and no such file.{hint} Those that come along: {', '.join(names)}."
        )
    return _parse(one_line(given), _bytes_of(given), kind)


def _like_a_path(given: str) -> bool:
    return "/" in given or given.endswith(SUFFIX) or "\0" in given or not given


def _bytes_of(path: str) -> bytes:
    """Read a file that may be anything, as far as a machine's can go."""
    try:
        return read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise ConfigError(
            f"The machine's file {shown(path)} cannot be read: {why}. Name another one, or one that comes along."
        ) from error


def _parse(where: str, raw: bytes, kind: type[T]) -> T:
    """Make a machine of what is in its file."""
    try:
        return reader(kind)(Field(None, "", of_kind(parse_object(raw), KIND, VERSION)))
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).rstrip('.')}. Mend it, or name another file.") from error


def figure(field: Field) -> Rate:
    """Read a figure: an object, or a number alone."""
    if isinstance(field.value, Rate):
        return field.value
    row = _Row(field.number()) if not isinstance(field.value, dict) else _read_row(field)
    try:
        low, high = (row.value if each is None else each for each in (row.low, row.high))
        return Rate(row.value, low, high, row.how)
    except ConfigError as error:
        raise field.fail(f"is no figure: {error}") from error


@dataclass(frozen=True)
class _Row:
    value: float
    low: float | None = None
    high: float | None = None
    how: str = STATED


_read_row = reader(_Row)


def content(parts: Mapping[str, Any], figures: Mapping[str, Rate]) -> dict[str, Any]:
    """Make the JSON object of a machine.

    Arguments:
        parts: what it is made of but its figures.
        figures: its figures, by name.
    """
    rows = {
        name: {"value": _plain(each.value), "low": _plain(each.low), "high": _plain(each.high), "how": each.how}
        for name, each in figures.items()
    }
    return {"penstock": KIND, "version": VERSION, **parts, "figures": rows}


def _plain(value: float) -> float:
    """Write a whole number without a point, where a reader gets the same number of it."""
    return int(value) if value.is_integer() and value < _MOST_EXACT else value


def _lines(content: Mapping[str, Any]) -> str:
    """Write JSON for people: a line for each key, and for each figure."""
    lines = []
    for key, value in content.items():
        if key == "figures" and value:
            rows = [f"  {json.dumps(name)}: {json.dumps(figure, allow_nan=False)}" for name, figure in value.items()]
            lines.append(' "figures": {\n' + ",\n".join(rows) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object into a file, as a whole or not at all.

    Raises:
        ConfigError: it cannot be written, or is larger than what is read.
    """
    text = _lines(content)
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{one_line(str(path))} would have {len(text):,} bytes. Shorten what its figures say.")
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise ConfigError(f"{one_line(str(path))} cannot be written: {why}. Name another file.") from error
