"""Files of machines: JSON that people write by hand, and that may be anybody's.

    {"penstock": "machine", "version": 1, "name": "...", "device": "cuda", "probed": false, "fingerprint": {...},
     "figures": {"disk_read": {"value": 7e9, "low": 6.8e9, "high": 7.1e9, "how": "..."}, "disk_write": 5e9, ...}}

What is wrong with one is a `ConfigError` of one line. No more of it is read than a machine can have.
"""

import difflib
import json
import os
from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.boundedfiles import parse_object, read_bytes
from penstock.errors import ConfigError, one_line, shown
from penstock.forecast.figures import STATED, Figure, check_name
from penstock.wholefiles import write_whole

KIND, VERSION = "machine", 1
SUFFIX = ".json"

_MOST_BYTES = 1 << 20
_MOST_DEPTH = 8
_MOST_EXACT = 1 << 53
_KEYS = ("penstock", "version", "name", "device", "probed", "fingerprint", "figures")
_FIGURE_KEYS = ("value", "low", "high", "how")
_FOLDER = "machines"


def shipped() -> list[str]:
    """List the names of the machines that come with the package."""
    folder = resources.files("penstock.forecast") / _FOLDER
    return sorted(each.name.removesuffix(SUFFIX) for each in folder.iterdir() if each.name.endswith(SUFFIX))


def read(path_or_name: str | PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    """Read the JSON object of a machine: of a file, or of one that comes with the package.

    Returns:
        What to call it in messages, and the object.

    Raises:
        ConfigError: there is none, or it is no JSON object.
    """
    given = os.fspath(path_or_name)
    if not isinstance(given, str):
        raise ConfigError(f"{shown(given)} is no path of a machine's file. Use a text.")
    names = shipped()
    # A path object is a file, always; a text is a name first: what a folder happens to hold does not change it.
    if isinstance(path_or_name, str) and given in names:
        raw = (resources.files("penstock.forecast") / _FOLDER / (given + SUFFIX)).read_bytes()
        return f"The machine {given}", _object(f"The machine {given}", raw)
    if not os.path.lexists(given) and isinstance(path_or_name, str) and not _like_a_path(given):
        near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4) if len(given) <= 99 else []
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"There is no machine {shown(given)}, and no such file.{hint} Those that come along: {', '.join(names)}."
        )
    return given, _object(one_line(given), _bytes_of(given))


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


def _object(where: str, raw: bytes) -> Mapping[str, Any]:
    """Read JSON strictly."""
    try:
        return parse_object(raw)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}. Mend it, or name another file.") from error


def parts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Check a machine's object; returns what `Machine` is made of.

    Raises:
        ConfigError: it is no machine's. The text names the key, not the file.
    """
    if content.get("penstock") != KIND:
        raise ConfigError(f'it has no "penstock": "{KIND}", so it is no machine\'s file. Name another one.')
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise ConfigError(f"its version is {shown(version)}, and this Penstock reads {VERSION}. Use a newer Penstock.")
    for key in content:
        _known(key, _KEYS)
    for key in ("name", "device", "figures"):
        if key not in content:
            raise ConfigError(f"it has no {shown(key)}. Add it.")
    figures = {check_name(name): _figure(name, each) for name, each in _mapping(content["figures"], "figures").items()}
    return {
        "name": content["name"],
        "device": content["device"],
        "figures": figures,
        "fingerprint": _mapping(content.get("fingerprint", {}), "fingerprint"),
        "probed": content.get("probed", False),
    }


def _figure(name: str, given: Any) -> Figure:
    """Make a figure of an object, or of a number alone."""
    try:
        if not isinstance(given, dict):
            return Figure.stated(given)
        for key in given:
            _known(key, _FIGURE_KEYS)
        if "value" not in given:
            raise ConfigError("it has no value")
        value: Any = given["value"]
        return Figure(value, given.get("low", value), given.get("high", value), given.get("how", STATED))
    except ConfigError as error:
        raise ConfigError(f"figure {name}: {str(error).rstrip('.')}. Mend it.") from error


def _known(key: str, keys: tuple[str, ...]) -> None:
    if key not in keys:
        raise ConfigError(f"it has a key {shown(key)}, which nothing reads. Keys are {', '.join(keys)}.")


def _mapping(given: Any, key: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"its {key} is {shown(given)}, not an object. Mend it.")
    return given


def plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a fingerprint as a file gives it back: lists for tuples, and texts for keys.

    Raises:
        ConfigError: it is no JSON, or nested too deep.
    """
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(fingerprint), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"A machine's fingerprint is no JSON: {one_line(error)}. Use texts and numbers.") from error
    if _depth(found, _MOST_DEPTH) > _MOST_DEPTH:
        raise ConfigError(f"A machine's fingerprint is nested deeper than {_MOST_DEPTH} levels. Leave it out.")
    return found


def _depth(value: Any, most: int) -> int:
    """Measure how deep a JSON value is nested; of what is deeper than `most`, one more than that."""
    if most < 0 or not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(each, most - 1) for each in inner), default=0)


def content(parts: Mapping[str, Any], figures: Mapping[str, Figure]) -> dict[str, Any]:
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
