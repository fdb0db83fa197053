"""Values of files that may be anybody's, checked against declared types before they are used.

What a file must hold is declared as types (`reader`), or asked for value by value (`Field`). Errors name the file, the
path of keys, what was found there, and what to write instead.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.boundedfiles import parse_object
from penstock.errors import CheckpointError, ConfigError, PenstockError, one_line, shown

T = TypeVar("T")

_MOST_CHARS = 500
_MOST_PATH_CHARS = 200


class Field:
    """One value of a file, and where in the file it is.

    It costs little, whatever the keys are that lead to it: its path is put together for an error.

    Arguments:
        file: the file of a checkpoint, for messages; `None` for other files, whose name their reader puts before.
        path: the key or the number that leads to the value; or its whole path, "units[3].slots".
        value: the value as it was parsed.
        holder: the field that the value is in, if it is in one.
    """

    __slots__ = ("_holder", "_path", "file", "value")

    def __init__(self, file: Path | None, path: str | int, value: object, holder: "Field | None" = None) -> None:
        self.file = file
        self.value = value
        self._path = path
        self._holder = holder

    @property
    def path(self) -> str:
        """The keys that lead to the value: "units[3].slots"."""
        parts: list[str] = []
        field: Field | None = self
        while field is not None:
            part = field._path
            parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
            field = field._holder
        return "".join(reversed(parts)).lstrip(".")

    def inside(self, path: str | int, value: object) -> "Field":
        """Make the field of a value that is in this one."""
        return Field(self.file, path, value, self)

    def fail(self, why: str) -> PenstockError:
        """Make the error that names the file and the field; the caller raises it."""
        path = one_line(self.path, _MOST_PATH_CHARS)
        text = f"'{path}' {one_line(why, _MOST_CHARS)}."
        if self.file is None:
            return ConfigError(text)
        return CheckpointError(f"{self.file}: {text}", file=str(self.file), field=path)

    def refuse(self, wanted: str) -> PenstockError:
        """Make the error of a value that cannot be there; the caller raises it."""
        return self.fail(f"is {shown(self.value)}: use {wanted}")

    def _expect(self, kinds: type | tuple[type, ...], what: str) -> Any:
        if not isinstance(self.value, kinds) or (isinstance(self.value, bool) and kinds is not bool):
            raise self.refuse(what)
        return self.value

    def string(self) -> str:
        """Read a string."""
        return str(self._expect(str, "a text"))

    def integer(self, least: int = 0, most: int = 1 << 62) -> int:
        """Read a whole number within bounds."""
        wanted = f"a whole number, {least:,} {'or more' if most == 1 << 62 else f'to {most:,}'}"
        value = int(self._expect(int, wanted))
        if not least <= value <= most:
            raise self.refuse(wanted)
        return value

    def multiple(self, of: int, least: int = 0) -> int:
        """Read a whole number that is a multiple of another."""
        value = self.integer(least)
        if value % of:
            raise self.refuse(f"a multiple of {of}")
        return value

    def number(self, least: float = -math.inf) -> float:
        """Read a finite number that is not below another."""
        wanted = "a finite number" if least == -math.inf else f"a finite number, {least:g} or more"
        value = self._expect((int, float), wanted)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or value < least:
            raise self.refuse(wanted)
        return value

    def boolean(self) -> bool:
        """Read true or false."""
        return bool(self._expect(bool, "true or false"))

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Read one of a few texts or numbers."""
        if type(self.value) not in (str, int) or self.value not in choices:
            raise self.refuse(f"one of {', '.join(map(repr, choices))}")
        return self.value

    def integers(self, count: int | None = None, *, most: int = 1 << 62) -> tuple[int, ...]:
        """Read a list of whole numbers within bounds; as `items` does, without a field for each."""
        value = self._list(count)
        for number, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= most:
                self.inside(number, item).integer(most=most)
        return tuple(value)

    def strings(self) -> tuple[str, ...]:
        """Read a list of strings; as `items` does, without a field for each."""
        value = self._list(None)
        for number, item in enumerate(value):
            if not isinstance(item, str):
                self.inside(number, item).string()
        return tuple(value)

    def items(self, count: int | None = None) -> Iterator["Field"]:
        """Go through the items of a list, which has `count` of them where that is given."""
        return (self.inside(number, item) for number, item in enumerate(self._list(count)))

    def _list(self, count: int | None) -> Sequence[Any]:
        value: Sequence[Any] = self._expect((list, tuple), "a list")
        if count is not None and len(value) != count:
            raise self.fail(f"has {len(value)} items: use {count}")
        return value

    def mapping(self) -> Mapping[str, Any]:
        """Read an object, as it was parsed."""
        value: Mapping[str, Any] = self._expect(Mapping, "an object")
        return value

    def entries(self) -> Iterator[tuple[str, "Field"]]:
        """Go through the keys and values of an object."""
        for key, item in self.mapping().items():
            yield key, self.inside(key, item)

    def only(self, names: Sequence[str]) -> None:
        """Refuse an object that has another key than these; the nearest one is named."""
        for key in self.mapping():
            if key not in names:
                near = difflib.get_close_matches(str(key)[:100], names, 1)
                hint = f"Did you mean '{near[0]}'? " if near else ""
                raise self.inside(str(key), None).fail(f"is no key that is read. {hint}Correct it, or leave it out")

    def __contains__(self, key: str) -> bool:
        """Whether an object has a key."""
        return key in self.mapping()

    def __getitem__(self, key: str) -> "Field":
        """Find a value of an object."""
        if key not in self:
            raise self.inside(key, None).fail("is missing" if self.file else "is missing: add it")
        return self.inside(key, self.mapping()[key])


Read = Callable[[Field], Any]
_PLAIN: Mapping[Any, Read] = {
    str: Field.string,
    int: Field.integer,
    float: Field.number,
    bool: Field.boolean,
    tuple[str, ...]: Field.strings,
    object: lambda field: field.value,
    Any: lambda field: field.value,
}


def reader(kind: type[T]) -> Callable[[Field], T]:
    """Make the function that checks a field's value, and gives it as the type that is declared.

        str, bool                 one of them
        int, float                a number that is not negative; one that is finite
        object, Any               whatever it is, as it was parsed
        Literal["a", 1]           one of the texts and numbers
        Annotated[T, read]        what `read` gives of the field
        T | None                  null, or a `T`
        another union             whatever it is: the class that it is a part of checks it
        tuple[T, ...]             a list of any length
        tuple[T, U], named tuple  a list of its parts
        Mapping[K, T]             an object with such keys, in the order of a `Literal`
        a dataclass               an object with its fields as keys, of which those with a default may be missing

    Arguments:
        kind: the type.

    Returns:
        A function of a field. It raises the error of `Field.fail` where a value is not of the type.
    """
    declared: Any = kind
    if declared in _PLAIN:
        return _PLAIN[declared]
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        read: Callable[[Field], T] = arguments[1]
        return read
    if origin is Literal:
        return lambda field: field.one_of(arguments)
    if origin is not None:
        return _generic_reader(origin, arguments)
    readers = _readers(declared)
    if issubclass(kind, tuple):
        return lambda field: kind(*_parts(field, list(readers.values())))
    needed = [each.name for each in fields(declared) if each.default is each.default_factory is MISSING]

    def read_object(field: Field) -> T:
        if isinstance(field.value, kind):
            return field.value
        field.only(list(readers))
        for name in needed:
            field[name]  # raises where it is missing
        return kind(**{name: readers[name](item) for name, item in field.entries()})

    return read_object


def _readers(kind: Any) -> Mapping[str, Read]:
    """Make the readers of what a class has."""
    return {name: reader(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _parts(field: Field, readers: Sequence[Read]) -> list[Any]:
    return [read(item) for read, item in zip(readers, field.items(len(readers)), strict=True)]


def _generic_reader(origin: Any, arguments: tuple[Any, ...]) -> Read:
    """Make the reader of a mapping, a tuple or a union, of those of what it holds."""
    if origin in (Union, UnionType):
        inner = [reader(each) for each in arguments if each is not NoneType]
        if len(inner) > 1:
            return _PLAIN[object]
        return lambda field: None if field.value is None else inner[0](field)
    readers = [reader(each) for each in arguments if each is not ...]
    if origin is tuple:
        if arguments[-1] is ...:
            return lambda field: tuple(readers[0](item) for item in field.items())
        return lambda field: tuple(_parts(field, readers))
    assert origin is Mapping, f"no file holds a {origin}"
    read_key, read = readers
    names = get_args(arguments[0])
    if get_origin(arguments[0]) is not Literal:
        return lambda field: {read_key(field.inside("a key", key)): read(item) for key, item in field.entries()}

    def read_in_order(field: Field) -> dict[Any, Any]:
        field.only(names)
        return {name: read(field[name]) for name in names if name in field}

    return read_in_order


def check_fields(value: Any) -> None:
    """Check a dataclass's own values as `reader` checks those of a file, and put them in their place.

    Raises:
        ConfigError: one is not of its type.
    """
    kind: Any = type(value)
    for name, read in _readers(kind).items():
        object.__setattr__(value, name, read(Field(None, name, getattr(value, name))))


def plain(field: Field) -> dict[str, Any]:
    """Read a mapping that JSON can hold, as JSON gives it back: lists for tuples, and texts for keys."""
    given = field.mapping()
    try:
        return parse_object(json.dumps(dict(given), allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise field.fail(f"is nothing that JSON can hold ({one_line(error)}): use texts and numbers") from error


def of_kind(content: Mapping[str, Any], kind: str, version: int) -> dict[str, Any]:
    """Check what a file says of itself, and give the rest of it.

    Arguments:
        content: what is in the file.
        kind: what its key "penstock" says.
        version: the one that is read.

    Raises:
        ConfigError: it is of another kind or version. The text ends without a full stop.
    """
    rest = dict(content)
    if rest.pop("penstock", None) != kind:
        raise ConfigError(f'it has no "penstock": "{kind}", so it is no {kind}')
    found = rest.pop("version", None)
    if type(found) is not int or found != version:
        raise ConfigError(f"its version is {shown(found)}, and this Penstock reads {version}")
    return rest


def members(value: Any) -> dict[str, object]:
    """Give the fields of a dataclass by name, in their order, without those that are `None` where nothing says so."""
    assert is_dataclass(value), f"JSON has nothing like {value!r}"
    return {
        member.name: item
        for member in fields(value)
        if (item := getattr(value, member.name)) is not None or member.default is not None
    }
