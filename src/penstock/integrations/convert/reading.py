"""Configurations as files: those of others, read, and ours, written."""

import importlib
import json
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError, one_line

_MOST_BYTES = 1 << 24


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read a file of JSON or TOML, as its suffix says, or of YAML.

    Raises:
        ConfigError: it cannot be read, holds no mapping, or has a key twice; or it is YAML, and PyYAML is not there.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file. Name a configuration.")  # a pipe would be waited for
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is too large for a configuration. Name another file.")
        text = path.read_text()
        content = _parse(path, text)
    except PenstockError:
        raise
    except Exception as error:  # somebody's file: whatever its reader makes of it
        raise ConfigError(
            f"{path} is not read: {one_line(error)}. Name a configuration in plain JSON, YAML or TOML."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no mapping. A configuration has names with values.")
    return content


def _parse(path: Path, text: str) -> Any:
    """Read text as the path's suffix says it is written."""
    if path.suffix == ".json":
        return json.loads(text, object_pairs_hook=partial(_without_repeats, path))
    if path.suffix == ".toml":
        return tomllib.loads(text)
    yaml = _yaml(path)

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        """Refuses what the plain one takes: a key twice, and merges, which grow a short file without bound."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            _without_repeats(path, [(key, None) for key in keys])
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: Any) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise ConfigError(f"{path} merges mappings by <<, which is not read. Write their keys out.")

    return yaml.load(text, Loader)


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of pairs. Of a key that is there twice no reader knows which value was meant."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ConfigError(f"{path} has the key {one_line(repr(key), 80)} twice. Leave one out.")
        made[key] = value
    return made


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of YAML, which must not be there.

    Raises:
        ConfigError: it is there, or cannot be written; or PyYAML is not there.
    """
    text = yaml_of(path, content)
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already. Name another file.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file.") from error


def yaml_of(path: Path, content: Mapping[str, Any]) -> str:
    """Write a mapping of plain values as YAML, for a path that messages name.

    Raises:
        ConfigError: PyYAML is not there.
    """
    text: str = _yaml(path).safe_dump(dict(content), sort_keys=False)
    return text


def _yaml(path: Path) -> Any:
    """Import PyYAML, which accelerate and transformers bring."""
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(f"{path} is YAML, which needs PyYAML. Install it with: pip install pyyaml") from error
