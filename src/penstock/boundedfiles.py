"""Reading files that may be anybody's: regular files alone, within bounds of size, depth and digits.

One reader for everything that is configured: run files, plans, machines, configurations of models and of other
libraries, in JSON, YAML or TOML. Texts of errors begin with what is wrong and do not name the file: whoever reads does.
"""

import errno
import importlib
import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from penstock.errors import ConfigError, one_line, shown

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
    """Open a regular file to read it, without waiting: opening a pipe would wait for who writes into it.

    Arguments:
        path: the file.
        follow: whether it may be a symbolic link.

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
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size) if size <= most else b""
        # A file of the kernel says that its size is 0. Pieces, as a read takes the memory it was asked for at once.
        while size <= most and (piece := file.read(_PIECE_BYTES)):
            data += piece
            size = len(data)
        if size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
        return data


def parse_object(raw: bytes, suffix: str = ".json", *, is_strict: bool = True) -> dict[str, Any]:
    """Parse a mapping.

    Arguments:
        raw: what is in the file.
        suffix: `.json` or `.toml`; all else is YAML.
        is_strict: refuse keys that are there twice, and NaN and infinity in JSON, which other libraries write.

    Raises:
        ConfigError: it is none, has a value beyond the bounds, or an alias of YAML: a few of them make a kilobyte more
            than any memory holds.
    """
    name = {".json": "JSON", ".toml": "TOML"}.get(suffix, "YAML")
    try:
        found = _PARSERS.get(suffix, _yaml)(raw.decode("utf-8-sig"), is_strict)
        _check_bounds(found)
    except ConfigError:
        raise
    except Exception as error:  # whatever a parser makes of somebody's file
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
    try:
        return parse_object(read_bytes(path), path.suffix)
    except (ConfigError, OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{one_line(str(path))} is not read: {why}. Mend it, or name another file.") from error


def without_removed(content: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Leave out arguments of `prepare` that were removed, where the file has them at their default.

    Arguments:
        content: what the file has.
        where: what messages write before a key.

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


def _json(text: str, is_strict: bool) -> Any:
    if not is_strict:
        return json.loads(text)
    return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)


def _yaml(text: str, is_strict: bool) -> Any:
    del is_strict
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


_PARSERS: dict[str, Callable[[str, bool], Any]] = {".json": _json, ".toml": lambda text, _: tomllib.loads(text)}


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of pairs. Of a key that is there twice nobody knows which value was meant."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigError(f"it has the key {shown(key)} twice: leave one out")
        made[key] = value
    return made


def _refuse_constant(word: str) -> NoReturn:
    raise ConfigError(f"it has {word}, which is no number of JSON: use a finite one")


def _check_bounds(value: Any) -> None:
    """Refuse what is nested deeper, or has a larger whole number, than anything that is meant."""
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
