"""A file of options: its keys are the options' names, its values what is typed, or the same as numbers and lists.

A file may be anybody's: what it holds is data, of which nothing runs, and a message shows no more than a line of it.
"""

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin

from penstock.cli.options import about_of, value_of
from penstock.errors import ConfigError, shown
from penstock.files import read_mapping

#: A key that says how a file came to be, and is passed over.
ABOUT = "about"

_MOST_BITS = 64


def values_in(path: Path, options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """Read a file of options.

    Arguments:
        path: YAML, or JSON or TOML by its suffix. Paths in it are taken from the folder that one is in, as typed ones.
        options: the fields that it may have, by name. Keys are written with dashes or underscores.

    Returns:
        The values of the fields that it has. A field that is null where nothing is the default is not one of them.

    Raises:
        ConfigError: it cannot be read, has a key that is no option, or a value of another kind than the option's.
    """
    values: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in read_mapping(path).items():
        if key == ABOUT:
            continue
        name = _name(path, key, options)
        if name in seen:
            raise ConfigError(f"{path} has {_shown(key)} twice, with a dash and with an underscore. Leave one out.")
        seen.add(name)
        if value is not None or options[name].default is not None:
            values[name] = _Entry(path, str(key), options[name], value).read()
    return values


def key_value(each: Field[Any], value: Any) -> Any:
    """Write a field's value as a file has it, of texts, numbers, lists and mappings alone."""
    if value is None:
        return about_of(each).none
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _name(path: Path, key: object, options: Mapping[str, Field[Any]]) -> str:
    """Find the field that a key names."""
    if not isinstance(key, str):
        raise ConfigError(f"{path}: the key {_shown(key)} is no name of an option. See --help.")
    name = key.replace("-", "_")
    if name in options:
        return name
    for now, each in options.items():
        if any(old.partition("=")[0] == f"--{name.replace('_', '-')}" for old in about_of(each).before):
            raise ConfigError(f"{path} has no option {_shown(key)}: it is called '{now}' now.")
    near = get_close_matches(name, options, n=1)
    hint = f"Did you mean '{near[0] if key == name else near[0].replace('_', '-')}'?" if near else "See --help."
    raise ConfigError(f"{path}: there is no option {_shown(key)}. {hint}")


@dataclass(frozen=True)
class _Entry:
    """A key of a file, with its value, and the field that it is for."""

    path: Path
    key: str
    each: Field[Any]
    value: Any

    def read(self) -> Any:
        """Make the field's value."""
        about, kinds = about_of(self.each), _kinds(self.each.type)
        value = self.value
        if isinstance(value, bool) and (word := "on" if value else "off") in about.choices:
            return word  # YAML takes these words for truth values
        if about.many:
            return self._texts()
        if kinds == {bool}:
            return value if isinstance(value, bool) else self._refuse("true or false")
        if about.parse is not None:
            return self._parsed(kinds)
        if kinds & {int, float}:
            return self._number(whole=float not in kinds)
        if not isinstance(value, str):
            self._refuse(f"one of {', '.join(about.choices)}" if about.choices else "text, in quotes")
        return value

    def _texts(self) -> tuple[str, ...]:
        """Read what may be given many times: a list of texts, or one."""
        given = [self.value] if isinstance(self.value, str) else self.value
        if not isinstance(given, list):
            self._refuse("a list of texts")
        for item in given:
            if not isinstance(item, str):
                raise ConfigError(f"{self.path}: {self.key} has {_shown(item)} in its list. Use texts, in quotes.")
        return tuple(given)

    def _parsed(self, kinds: set[Any]) -> Any:
        """Read what has a parser: the text that would be typed, or numbers that say the same."""
        value: Any = self.value
        typed: Any = None
        if isinstance(self.each.default, float):
            typed = self._number(whole=False)
        elif isinstance(value, str):
            typed = value
        elif kinds & {int, float} and _is_number(value):
            typed = repr(value)
        elif tuple in kinds and isinstance(value, list) and all(map(_is_number, value)):
            typed = ",".join(map(repr, value))
        elif dict in kinds and isinstance(value, dict) and all(map(_is_number, value.values())):
            typed = ",".join(f"{name if isinstance(name, str) else '?'}={number!r}" for name, number in value.items())
        else:
            self._refuse("what is typed, as text")
        try:
            return value_of(self.each, typed)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def _number(self, *, whole: bool) -> int | float:
        """Read a number, also from the text of one: YAML takes 1e-4 for text."""
        number = None
        if isinstance(self.value, str) or _is_number(self.value):
            with suppress(ValueError, OverflowError):
                number = int(self.value) if whole else float(self.value)
        if number is None or not (isinstance(self.value, str) or number == self.value):
            self._refuse("a whole number" if whole else "a number")
        return number

    def _refuse(self, wanted: str) -> NoReturn:
        """Refuse the value, by what it is and what is wanted."""
        raise ConfigError(f"{self.path}: {self.key} is {_shown(self.value)}. Use {wanted}.")


def _kinds(annotation: Any) -> set[Any]:
    """List the types that a field may have, but for `None`."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return {get_origin(part) or part for part in parts} - {types.NoneType}


def _is_number(value: object) -> bool:
    """Tell whether a value is a number of a size that can be written."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or value.bit_length() <= _MOST_BITS


def _shown(value: object) -> str:
    """Write a value in a few characters, with the words that a file has for it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shown(value)
