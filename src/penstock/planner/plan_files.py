"""A plan as a file: JSON that a person can read and edit, and that somebody else may have written.

Its keys are the fields of `Answer`. A placement and options are rebuilt by their own constructors, so that a file can
ask for nothing that an argument could not.
"""

import json
import os
from dataclasses import asdict
from typing import TypeVar

from penstock.errors import ConfigError, one_line
from penstock.files import Field, of_kind, parse_object, read_bytes, reader, without_removed
from penstock.planner.plan_fields import Answer

KIND, VERSION = "plan", 1
MOST_BYTES = 4 << 20
#: Fields of 0.2 that nothing reads any more.
_DROPPED = ("gap", "lower_bound_s")
_NAME_ANOTHER = "Name a file that penstock plan wrote."

AnAnswer = TypeVar("AnAnswer", bound=Answer)


def to_json(answer: Answer) -> str:
    """Write a plan as JSON with sorted keys: equal plans give equal texts."""
    content = {"penstock": KIND, "version": VERSION, **asdict(answer)}
    return json.dumps(content, sort_keys=True, indent=2, allow_nan=False)


def read(path: str | os.PathLike[str], kind: type[AnAnswer]) -> AnAnswer:
    """Read a plan from a file.

    Raises:
        ConfigError: it is no file, is too large, is no JSON, is of another kind or version, or has a key that is
            unknown, missing or there twice; or a value is refused.
    """
    return parse(read_bytes(path, MOST_BYTES), kind)


def parse(text: bytes, kind: type[AnAnswer]) -> AnAnswer:
    """Read a plan from what is in its file, as `read` does.

    Raises:
        ConfigError: as for `read`.
    """
    try:
        content = of_kind(parse_object(text), KIND, VERSION)
    except ConfigError as error:
        raise ConfigError(f"{error}. {_NAME_ANOTHER}") from error
    kept = {key: value for key, value in without_removed(content).items() if key not in _DROPPED}
    return reader(kind)(Field(None, "", kept))


def naming(path: str | os.PathLike[str], error: Exception) -> ConfigError:
    """Make the error of a file of what is wrong with it; the caller raises it."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    what = str(error) if isinstance(error, ConfigError) else f"it cannot be read: {why}. {_NAME_ANOTHER}"
    return ConfigError(f"{one_line(str(path), 200)}: {one_line(what, 500)}")
