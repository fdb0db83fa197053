"""Values of options that typer has no type for: each function is the `parser=` of an option or an argument.

Beside them what commands share: the check of a file to write, and a line of what is done now.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer

from penstock.errors import ConfigError

_UNIT_BYTES = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
)
_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
#: No file and no memory is larger, and every reader of a number takes it.
_MOST_BYTES = 1 << 62


def path(text: str | Path) -> Path:
    """Read a path. An empty one is refused: it would be the current folder.

    Raises:
        typer.BadParameter: it is empty, or holds a character that no path has.
    """
    if not str(text) or "\0" in str(text):
        raise typer.BadParameter(f"{str(text)[:80]!r} is no path. Name a file or a folder.")
    return Path(text)


def size(text: str) -> int:
    """Read a size: a number of bytes, or a number with a suffix (`64MiB` is 2**26, `64MB` is 64 million).

    Raises:
        typer.BadParameter: not a size, or not a whole number of bytes.

    Example:
        >>> size("64MiB")
        67108864
    """
    match = _SIZE.fullmatch(text)
    unit = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{text[:80]!r} is not a size. Write bytes, or a number with KiB, MiB, GiB or TiB.")
    nbytes = int(match[1]) * unit if match[1].isdigit() else float(match[1]) * unit
    if nbytes != int(nbytes) or nbytes > _MOST_BYTES:
        raise typer.BadParameter(f"{text[:80]!r} is {nbytes:g} bytes. Write a whole number, of at most 4096 PiB.")
    return int(nbytes)


def storage(text: str) -> str | dict[str, float]:
    """Read where a kind of state lives: a tier (`cpu`), or tiers with their fractions (`device=0.6,cpu=0.4`).

    The library checks which tiers there are.

    Raises:
        typer.BadParameter: a fraction is not a number, or a tier is named twice.

    Example:
        >>> storage("device=0.6,cpu=0.4")
        {'device': 0.6, 'cpu': 0.4}
    """
    return pairs(text, number, "device=0.6,cpu=0.4") if "=" in text else text.strip()


def pairs(text: str, read: Callable[[str], Any], example: str) -> dict[str, Any]:
    """Read names with values, `a=1,b=2`.

    Arguments:
        text: the pairs.
        read: reads a value; raises `ValueError` if it is none.
        example: how to write them, for the message.

    Raises:
        typer.BadParameter: a pair has no name or no value, or a name is there twice.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            if not name or name in found:
                raise ValueError
            found[name] = read(value)
        except ValueError:
            raise typer.BadParameter(f"{text[:80]!r}: write each name once with its value, like {example}.") from None
    return found


def number(text: str) -> float:
    """Read a finite number.

    Raises:
        ValueError: it is none.
    """
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:80]!r} is not finite")
    return found


def seconds(text: str) -> float:
    """Read a time above 0.

    Raises:
        typer.BadParameter: it is none.
    """
    return _above_0(text, "is no time. Use seconds above 0.")


def terabytes(text: str) -> float:
    """Read the endurance of a disk, in TB, above 0.

    Raises:
        typer.BadParameter: it is none.
    """
    return _above_0(text, "is no endurance. Use TB above 0, such as 600.")


def _above_0(text: str, refused: str) -> float:
    try:
        found = number(text)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise typer.BadParameter(f"{text[:80]!r} {refused}")
    return found


def check_target(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Raises:
        ConfigError: it is something else than a file, or its folder is none or cannot be written.
    """
    folder, why = path.absolute().parent, ""
    try:
        is_file = path.is_file()
        if os.path.lexists(path) and not is_file:
            why = "it is no file"
        elif not (folder.is_dir() and os.access(path if is_file else folder, os.W_OK)):
            why = "its folder is none, or not writable"
        elif not is_file:
            TemporaryFile(dir=folder).close()  # permissions do not tell: the root user may write to /proc, and cannot
    except OSError as error:  # a name that is too long, or a folder that takes no files
        why = error.strerror or "it is no path"
    if why:
        raise ConfigError(f"{option} {str(path)!r} cannot be written: {why}. Name another file.")


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Show what is done now on one line of standard error, if that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("", refresh_per_second=2) as shown:
        yield shown.update
