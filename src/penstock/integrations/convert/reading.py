"""Configurations as files: those of others, read, and ours, written."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError, one_line

_MOST_BYTES = 1 << 24


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read a file of JSON, or of YAML.

    Raises:
        ConfigError: it cannot be read, or holds no mapping; or it is YAML, and PyYAML is not there.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is too large for a configuration. Name another file.")
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else _yaml(path).safe_load(text)
    except PenstockError:
        raise
    except Exception as error:  # somebody's file: whatever its reader makes of it
        raise ConfigError(
            f"{path} is not read: {one_line(error)}. Name a configuration in plain JSON or YAML."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no mapping. Name a configuration of DeepSpeed or of accelerate.")
    return content


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of YAML, which must not be there.

    Raises:
        ConfigError: it is there, or cannot be written; or PyYAML is not there.
    """
    text = _yaml(path).safe_dump(dict(content), sort_keys=False)
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already. Name another file.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file.") from error


def _yaml(path: Path) -> Any:
    """Import PyYAML, which accelerate and transformers bring."""
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(f"{path} is YAML, which needs PyYAML. Install it with: pip install pyyaml") from error
