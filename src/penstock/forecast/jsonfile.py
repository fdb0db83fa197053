"""JSON of files that may be anybody's: no more is read than is asked for, no key counts twice, and there is no NaN.

Texts of errors begin with what is wrong and do not name the file: whoever reads it does.
"""

import json
import os
import stat
from os import PathLike
from typing import Any, NoReturn

from penstock.errors import ConfigError, one_line
from penstock.forecast.figures import shown


def read_bytes(path: str | PathLike[str], most: int) -> bytes:
    """Read a file that may be anything.

    Arguments:
        path: where it is.
        most: how many bytes it may have.

    Raises:
        ConfigError: it is no file, or is larger.
        OSError, ValueError: it cannot be read, or the path cannot be one.
    """
    # Without waiting: opening a pipe would wait for who writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError("it is no file")
    with open(descriptor, "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ConfigError(f"it has more than {most:,} bytes")
    return raw


def parse_object(raw: bytes) -> dict[str, Any]:
    """Read a JSON object, strictly.

    Raises:
        ConfigError: it is no JSON, is nested too deep, is no object, has a key twice or a number that JSON does not.
    """
    try:
        found = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else one_line(error)
        raise ConfigError(f"it is no JSON: {why}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"it is {shown(found)} in JSON, not an object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of pairs. Of a key that is there twice nobody knows which value was meant."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigError(f"it has the key {shown(key)} twice: leave one out")
        made[key] = value
    return made


def _refuse_constant(word: str) -> NoReturn:
    raise ConfigError(f"it has {word}, which is no number of JSON: use a finite one")
