"""Reading model folders: another library's failure is one line, and configurations are read within bounds.

Nothing in a folder runs without `trust_remote_code`. Weights are read from safetensors files only.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, ConfigError, PenstockError, one_line
from penstock.files import parse_object, read_bytes

TRUST_OPTION = "--trust-remote-code"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"

MOST_CONFIG_BYTES = 1 << 24


@contextlib.contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Raise errors in one line from calls that read a folder, or compute with its content.

    Arguments:
        what: the part of the folder that is read, for the message: `"tokenizer"`.
        folder: the model's folder.

    Raises:
        ConfigError: another library raised an error, or the content is damaged. Other errors of Penstock pass through.
    """
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"The {what} in {folder} cannot be read: {error}") from error
    except (PenstockError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # Rust's panics are no Exception
        raise ConfigError(
            f"The {what} in {folder} cannot be read: {one_line(error)}. Mend the folder's files, or name another one."
        ) from error


def read_json(file: Path) -> Mapping[str, Any]:
    """Read the object of a small JSON file.

    Raises:
        ConfigError: the file is too large, nested too deep, no JSON or no object.
    """
    try:
        return parse_object(read_bytes(file, MOST_CONFIG_BYTES), is_strict=False)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file.parent}: its {file.name} cannot be read: {why}. Mend it, or name another folder."
        ) from error


def check_code(name: str, config: Mapping[str, Any], *, is_native: bool) -> None:
    """Refuse a folder whose model is code of its own, or calls kernels of another repository.

    Arguments:
        name: the folder, as the user wrote it.
        config: the content of its `config.json`.
        is_native: True if transformers has a class of its own for it.

    Raises:
        ConfigError: names the code, and the option that allows it.
    """
    if "auto_map" in config and not is_native:
        raise needs_code(name, CONFIG, one_line(str(config["auto_map"]), 120))
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in json.dumps(value):
            raise needs_code(name, CONFIG, f"the kernel {one_line(json.dumps(value), 80)}")


def needs_code(name: str, file: str, what: str) -> ConfigError:
    """Return the error of a folder that needs code, with the option that allows it."""
    return ConfigError(
        f"{name!r} runs code that is not part of transformers: its {file} names {what}. Read that code first; then "
        f"allow it with {TRUST_OPTION}."
    )
