"""Files: read within bounds and by their types, written whole or not at all."""

import dataclasses
import difflib
import errno
import fcntl
import importlib
import json
import math
import os
import stat
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Annotated, Any, BinaryIO, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.errors import CheckpointError, ConfigError, PenstockError, one_line, shown

# ----------------------------------------------------------------------------------------------------------------------
# Reading untrusted files: regular files alone, within bounds of size, depth and digits.
#
# One reader for everything that is configured: run files, plans, machines, configurations of models and of other
# libraries, in JSON, YAML or TOML. Texts of errors begin with the defect and do not name the file: the caller does.
# ----------------------------------------------------------------------------------------------------------------------


T = TypeVar("T")

#: Of a configuration.
MOST_BYTES = 1 << 20
MOST_YAML_BYTES = 1 << 18  # whose reader takes ten seconds for a megabyte
MOST_DEPTH = 100
#: Of a whole number: tokenizers write 10**30 for "no limit".
MOST_BITS = 256
_PIECE_BYTES = 1 << 16
#: Arguments of `prepare` that files of 0.2 have, each with the value that asks for what happens without it.
_REMOVED: Mapping[str, Any] = {"unit_micro_batches": 1, "batch_dim": 0}
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def open_regular(path: str | PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a regular file to read it, without waiting: opening a pipe would wait for its writer.

    Arguments:
        path: the file.
        follow: True if it may be a symbolic link.

    Raises:
        OSError, ValueError: it is something else, cannot be read, or the path cannot be one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file")
    return open(descriptor, "rb")


def read_bytes(path: str | PathLike[str], most: int = MOST_BYTES, *, follow: bool = True) -> bytes:
    """Read a regular file of so many bytes at most, as `open_regular` opens it.

    Raises:
        OSError, ValueError: it is something else, is larger, cannot be read, or the path cannot be one.
    """
    data = bytearray()
    with open_regular(path, follow=follow) as file:
        # Pieces: a read takes the memory that it was asked for at once, and files of the kernel do not say their size.
        while len(data) <= most and (piece := file.read(_PIECE_BYTES)):
            data += piece
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return bytes(data)


def parse_object(raw: bytes, suffix: str = ".json", *, is_strict: bool = True) -> dict[str, Any]:
    """Parse a mapping.

    Arguments:
        raw: the content of the file.
        suffix: `.json` or `.toml`; all else is YAML.
        is_strict: refuse keys that are there twice, and NaN and infinity in JSON, which other libraries write.

    Raises:
        ConfigError: it is none, has a value beyond the bounds, or an alias of YAML: a few of them make a kilobyte more
            than any memory holds.
    """
    name = {".json": "JSON", ".toml": "TOML"}.get(suffix, "YAML")
    try:
        text = raw.decode("utf-8-sig")
        if suffix == ".json":
            strict: dict[str, Any] = {"object_pairs_hook": _once, "parse_constant": _refuse_constant}
            found = json.loads(text, **(strict if is_strict else {}))
        else:
            found = tomllib.loads(text) if suffix == ".toml" else _yaml(text)
        _check_bounds(found)
    except ConfigError:
        raise
    except Exception as error:  # parsers raise many classes for an untrusted file
        why = "it is nested too deep" if isinstance(error, RecursionError) else one_line(error)
        raise ConfigError(f"it is no {name}: {why}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"it is {shown(found)} in {name}, not {'an object' if suffix == '.json' else 'a mapping'}")
    return found


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a configuration of JSON or TOML, as its suffix says, or of YAML.

    Raises:
        ConfigError: it is not read. The message names the file.
    """
    return read_file(path, MOST_BYTES, lambda raw: parse_object(raw, path.suffix))


def read_file(path: str | PathLike[str], most: int, parse: Callable[[bytes], T]) -> T:
    """Read a file of so many bytes at most, and parse its content.

    Raises:
        ConfigError: it is not read, or `parse` refuses it. The message names the file.
    """
    try:
        return parse(read_bytes(path, most))
    except Exception as error:  # parsers raise many classes for an untrusted file
        refused = str(error).rstrip(".") if isinstance(error, ConfigError) else one_line(error)
        why = error.strerror if isinstance(error, OSError) and error.strerror else refused
        raise ConfigError(f"{one_line(str(path))} is not read: {why}. Mend it, or name another file.") from error


def without_removed(content: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Leave out arguments of `prepare` that were removed, if the file has them at their default.

    Arguments:
        content: the content of the file.
        where: the prefix of a key in messages.

    Raises:
        ConfigError: one has another value.
    """
    for name, default in _REMOVED.items():
        if content.get(name, default) != default:
            raise ConfigError(
                f"{where}{name}={shown(content[name])} was removed: blocks run whole micro-batches. Leave it out. For "
                "fewer transfers per token use a larger micro-batch, with activation checkpointing and "
                "Placement(activations='cpu') where its activations do not fit; make a plan again with penstock plan."
            )
    return {name: value for name, value in content.items() if name not in _REMOVED}


def yaml_of(content: Mapping[str, Any]) -> str:
    """Write a mapping of plain values as YAML.

    Raises:
        ConfigError: PyYAML is not there.
    """
    text: str = _library().safe_dump(dict(content), sort_keys=False)
    return text


def _library() -> Any:
    """Import PyYAML, which accelerate and transformers bring."""
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("YAML needs PyYAML, which is not installed. Install it with: pip install pyyaml") from error


def _yaml(text: str) -> Any:
    if len(text) > MOST_YAML_BYTES:
        raise ConfigError(f"it has more than {MOST_YAML_BYTES:,} characters of YAML")
    yaml = _library()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Refuses what the plain one takes: what makes much of a short text, and a key that is there twice."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                name = one_line(self.peek_event().anchor, 40)
                raise ConfigError(f"it repeats a part by the alias *{name}: write it out")
            return super().compose_node(parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if node.tag in _NUMBERS and isinstance(node.value, str):
                if ":" in node.value:  # of any number of parts
                    raise ConfigError(f"it has {shown(node.value)}, which is a number in base 60: put it in quotes")
                if len(node.value) > MOST_BITS:
                    raise ConfigError(f"it has a number of {len(node.value):,} digits")
            return super().construct_object(node, deep)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _once((key.value, None) for key, _ in node.value if isinstance(key.value, str))
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of pairs; refuse a key that is there twice."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigError(f"it has the key {shown(key)} twice: leave one out")
        made[key] = value
    return made


def _refuse_constant(word: str) -> NoReturn:
    raise ConfigError(f"it has {word}, which is no number of JSON: use a finite one")


def _check_bounds(value: Any) -> None:
    """Refuse values that are nested too deep, or hold too large a whole number."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, int) and item.bit_length() > MOST_BITS:
                raise ConfigError(f"it has {shown(item)}")
            if isinstance(item, dict | list):
                inner += item.values() if isinstance(item, dict) else item
        if not inner:
            return
        level = inner
    raise ConfigError("it is nested too deep")


# ----------------------------------------------------------------------------------------------------------------------
# Values of untrusted files, checked against declared types before they are used.
#
# The content of a file is declared as types (`reader`), or read value by value (`Field`). Errors name the file, the
# path of keys, the value there, and what to write instead.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_CHARS = 500
_MOST_PATH_CHARS = 200


class Field:
    """One value of a file, and its place in the file.

    It is cheap to make: its path is put together only for an error.

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
        """Read a list of strings."""
        return tuple(item.string() for item in self.items())

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
        """Return True if an object has a key."""
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
    """Make the function that checks a field's value, and returns it as the declared type.

        str, bool                 one of them
        int, float                a number that is not negative; one that is finite
        object, Any               any value, as it was parsed
        Literal["a", 1]           one of the texts and numbers
        Annotated[T, read]        the value that `read` returns for the field
        T | None                  null, or a `T`
        another union             any value: the class that has the field checks it
        tuple[T, ...]             a list of any length
        tuple[T, U], named tuple  a list of its parts
        Mapping[K, T]             an object with such keys, in the order of a `Literal`
        a dataclass               an object with its fields as keys, of which those with a default may be missing; a
                                  field has another key with `metadata={"key": ...}`

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
    names = {_key(each): each.name for each in fields(declared)}
    needed = [_key(each) for each in fields(declared) if each.default is each.default_factory is MISSING]

    def read_object(field: Field) -> T:
        if isinstance(field.value, kind):
            return field.value
        field.only(list(names))
        for key in needed:
            field[key]  # raises where it is missing
        return kind(**{names[key]: readers[names[key]](item) for key, item in field.entries()})

    return read_object


def _key(member: dataclasses.Field[Any]) -> str:
    """Return the key of a dataclass field in JSON: its name, unless it has another one."""
    return str(member.metadata.get("key", member.name))


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
    """Check a dataclass's own values as `reader` checks those of a file, and set the checked ones.

    Raises:
        ConfigError: one is not of its type.
    """
    kind: Any = type(value)
    for name, read in _readers(kind).items():
        object.__setattr__(value, name, read(Field(None, name, getattr(value, name))))


def plain(field: Field) -> dict[str, Any]:
    """Read a mapping that JSON can hold, as JSON returns it: lists for tuples, and texts for keys."""
    given = field.mapping()
    try:
        return parse_object(json.dumps(dict(given), allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise field.fail(f"is nothing that JSON can hold ({one_line(error)}): use texts and numbers") from error


def read_record(raw: bytes, kind: str, version: int) -> dict[str, Any]:
    """Parse a JSON file that says its kind and version, and return the rest of it.

    Arguments:
        raw: the content of the file.
        kind: the value of its key "penstock".
        version: the version that is read.

    Raises:
        ConfigError: it is no JSON, or of another kind or version. The text ends without a full stop.
    """
    rest = parse_object(raw)
    if rest.pop("penstock", None) != kind:
        raise ConfigError(f'it has no "penstock": "{kind}", so it is no {kind}')
    found = rest.pop("version", None)
    if type(found) is not int or found != version:
        raise ConfigError(f"its version is {shown(found)}, and this Penstock reads {version}")
    return rest


def members(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass by name, in their order, without those that are `None` by default."""
    assert is_dataclass(value), f"JSON has nothing like {value!r}"
    return {
        _key(member): item
        for member in fields(value)
        if (item := getattr(value, member.name)) is not None or member.default is not None
    }


# ----------------------------------------------------------------------------------------------------------------------
# Files that are written by name: atomically, or line by line.
#
# A name that Penstock chooses, such as `metrics.jsonl`, is predictable: in a folder that others write to, a link of
# that name may lead to another user's file. So such a file is a regular one, or not there yet (`check_own`,
# `open_own`). A path that the user gives may be a link, a device or a pipe, and is written to as what it is
# (`write_whole`).
# ----------------------------------------------------------------------------------------------------------------------


def check_own(path: Path) -> Path:
    """Refuse a path at which there is something else than a regular file; return the path.

    Raises:
        OSError: there is a link, a pipe, a device or a folder, or the path cannot be read.
    """
    with suppress(FileNotFoundError):
        _check_mode(path, path.lstat().st_mode)
    return path


def open_own(path: str | Path, mode: str, **arguments: Any) -> IO[Any]:
    """Open a file to write to, as `open` does; refuse links. A device that is no link is allowed.

    Raises:
        OSError: there is a link, a pipe or a folder, or it cannot be opened. Nothing of it has changed.
    """

    def opener(name: str, flags: int) -> int:
        try:
            # Without waiting: opening a pipe would wait for its reader.
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                _check_mode(Path(name), stat.S_IFLNK)
            raise
        found = os.fstat(descriptor).st_mode
        try:
            _check_mode(Path(name), stat.S_IFREG if stat.S_ISCHR(found) else found)
        except OSError:
            os.close(descriptor)
            raise
        os.set_blocking(descriptor, True)
        return descriptor

    return open(path, mode, opener=opener, **arguments)


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8 atomically: to a file beside it, which takes its name once it is on the disk.

    A link is followed. A device or a pipe is written to: a file in its place would replace `/dev/null` for all users.
    So is the standard output or error, such as `/dev/stdout`.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
        ValueError: the path is not valid, or the text has no UTF-8.
    """
    if (descriptor := _descriptor_of(path)) is not None:
        sys.stdout.flush()  # earlier output comes first
        with open(descriptor, "w", encoding="utf-8", closefd=False) as opened:
            opened.write(text)
        return
    if path.exists() and not path.is_file():  # by the path itself: links to pipes without a name lead to no path
        path.write_text(text, encoding="utf-8")
        return
    place = Path(os.path.realpath(path))
    made = place.with_name(f".{place.name}.{os.urandom(8).hex()}")
    try:
        with open(made, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a machine that fails now may keep the name and lose the text
        os.replace(made, place)
    except BaseException:
        with suppress(OSError, ValueError):
            made.unlink()
        raise


def _descriptor_of(path: Path) -> int | None:
    """Find which of the standard output and error a path leads to, such as `/dev/stdout`; `None` for another file."""
    for descriptor in (1, 2):
        with suppress(OSError):  # there is no such path, or no such descriptor
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


class Lines:
    """Appends objects to a file, each at once, so that other processes can follow it. One process writes at a time.

    If the disk refuses a line, the file ends there with a warning: training goes on without it.

    Arguments:
        path: the file. Its folder is made where it is missing.

    Raises:
        ConfigError: it cannot be written, or another process is writing it. Nothing in it has changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # users log from several threads
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_own(path, "a+b")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}. Give a folder on a disk with space, that you can write."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"{path} is being written by another recorder. Give each a folder of its own, or close that one first."
            ) from error
        except OSError:  # a file system without locks
            pass

    def begin(self, *, goes_on: bool) -> None:
        """Truncate the file, or go on behind its content: an incomplete last line gets its end."""
        try:
            if not goes_on:
                self._file.truncate(0)
            elif self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            self._give_up(error)

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append an object. A number that is not finite is null; a value that JSON does not have is text."""
        text = json.dumps(to_json({"event": event, **values}), allow_nan=False)
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(text.encode() + b"\n")
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the file; `write` does nothing from here on."""
        with self._lock:
            self._file.close()

    def _give_up(self, error: OSError) -> None:
        try:
            self._file.close()  # tries once more to write the buffer
        except OSError:
            os.close(self._file.fileno()) if not self._file.closed else None
        warnings.warn(f"{self._path} ends here: {one_line(error)}. Training goes on without it.", stacklevel=3)


def to_json(value: Any) -> Any:
    """Make a value JSON-like: not finite numbers are null, keys are text, and so are values that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): to_json(of_name) for name, of_name in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
