"""A plan as a file: JSON that a person can read and edit, and that somebody else may have written.

Its keys are the fields of `Answer`. A placement and options are rebuilt by their own constructors, so that a file can
ask for nothing that an argument could not.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from penstock.boundedfiles import parse_object, read_bytes, without_removed
from penstock.config import Options, Placement
from penstock.errors import ConfigError, one_line, shown
from penstock.forecast import values
from penstock.forecast.answer import Answer, Lack, WhatIf, Why

KIND, VERSION = "plan", 1
MOST_BYTES = 4 << 20
_NAME_ANOTHER = "Name a file that penstock plan wrote."

_LISTS: Mapping[str, type] = {"what_ifs": WhatIf, "why": Why, "lacks": Lack}


def to_json(answer: Answer) -> str:
    """Write a plan as JSON with sorted keys: equal plans give equal texts."""
    content = {member.name: getattr(answer, member.name) for member in fields(answer)}
    for name in ("placement", "options"):
        content[name] = asdict(content[name])
    for name in _LISTS:
        content[name] = [asdict(item) for item in content[name]]
    return json.dumps({"penstock": KIND, "version": VERSION, **content}, sort_keys=True, indent=2, allow_nan=False)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of a plan from a file.

    Returns:
        The arguments of `Answer`, which checks them.

    Raises:
        ConfigError: it is no file, is too large, is no JSON, is of another kind or version, or has a key that is
            unknown, missing or there twice; or its placement, options or reasons are refused.
    """
    return parse(read_bytes(path, MOST_BYTES))


def parse(text: bytes) -> dict[str, Any]:
    """Read the fields of a plan from what is in its file, as `read` does.

    Raises:
        ConfigError: as for `read`.
    """
    try:
        content = parse_object(text)
    except ConfigError as error:
        raise ConfigError(f"{error}. {_NAME_ANOTHER}") from error
    kind, version = content.pop("penstock", None), content.pop("version", None)
    if kind != KIND:
        raise ConfigError(f"it is no plan. {_NAME_ANOTHER}")
    if type(version) is not int or version != VERSION:
        raise ConfigError(
            f"it is a plan of version {shown(version)}, and version {VERSION} is read: plan again with penstock plan."
        )
    content = without_removed(content)
    _check_keys(content, Answer, "")
    content["placement"] = _placement(content["placement"])
    content["options"] = Options(**_members(content["options"], Options, "options"))
    for name, of in _LISTS.items():
        if name in content:
            given = values.items(name, content[name], dict)
            content[name] = [of(**_members(item, of, f"{name}[{number}]")) for number, item in enumerate(given)]
    return content


def naming(path: str | os.PathLike[str], error: Exception) -> ConfigError:
    """Make the error of a file of what is wrong with it; the caller raises it."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    what = str(error) if isinstance(error, ConfigError) else f"it cannot be read: {why}. {_NAME_ANOTHER}"
    return ConfigError(f"{one_line(str(path), 200)}: {one_line(what, 500)}")


def _placement(given: object) -> Placement:
    content = _members(given, Placement, "placement")
    folders = content.get("nvme_path")
    if isinstance(folders, list):
        content["nvme_path"] = values.items("placement.nvme_path", folders, str)
    elif folders is not None and not isinstance(folders, str):
        raise values.refuse("placement.nvme_path", folders, "a folder, a list of folders, or null")
    return Placement(**content)


def _members(given: object, kind: type, where: str) -> dict[str, Any]:
    """Check that an object has keys of a class, and all that the class needs."""
    if not isinstance(given, dict):
        raise values.refuse(where, given, "an object")
    _check_keys(given, kind, f"{where}.")
    return dict(given)


def _check_keys(content: Mapping[str, Any], kind: Any, where: str) -> None:
    known = {member.name: member for member in fields(kind)}
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key[:100], known, 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{shown(where + key)} is no key of a plan.{meant} Correct it, or leave it out.")
    for name, member in known.items():
        if _is_needed(member) and name not in content:
            raise ConfigError(f"{where + name!r} is missing. Add it, or plan again with penstock plan.")


def _is_needed(member: Field[Any]) -> bool:
    return member.default is MISSING and member.default_factory is MISSING
