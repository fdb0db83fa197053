"""Arguments of `penstock.prepare` for a trainer: from a file, from the environment, from a call."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, one_line
from penstock.integrations.arguments import prepare_arguments

#: Names the file of arguments where a script names none.
VARIABLE = "PENSTOCK_CONFIG"

_MOST_BYTES = 1 << 20


def read_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON or YAML file of arguments of `penstock.prepare`.

    Arguments:
        path: a mapping of arguments by name, such as `placement: {optimizer: cpu}`.

    Raises:
        ConfigError: it cannot be read, or says something that `prepare` does not take.

    Example:
        >>> read_arguments("penstock.yaml")["stage"]  # doctest: +SKIP
        2
    """
    file = Path(path)
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{file} is larger than any file of arguments. Name another one.")
        content = _parse(file)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} cannot be read: {one_line(error)}. Mend it, or name another file.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no mapping of arguments of penstock.prepare(), such as 'stage: 2'. Mend it.")
    return prepare_arguments(content, source=str(file))


def _parse(file: Path) -> Any:
    """Read the values of a file, by its suffix."""
    if file.suffix == ".json":
        return json.loads(file.read_bytes())
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{file} is neither .json nor .yaml. Rename it.")
    import yaml  # of transformers

    try:
        return yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}. Mend it, or name another file.") from error


def arguments_for_trainer(
    given: Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    deepspeed: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Put together what a trainer prepares its model with.

    Arguments:
        given: arguments of `penstock.prepare`, which count before those of a file.
        config: a file of arguments. `None`: the one that the environment's `PENSTOCK_CONFIG` names, if any.
        deepspeed: a configuration of DeepSpeed, which takes the place of `config`.

    Raises:
        ConfigError: an argument that there is not, one that Trainer has a setting of its own for, or two files.
    """
    if deepspeed is not None and config is not None:
        raise ConfigError("trainer_class(config=, deepspeed=): each says the whole. Give one of them.")
    if deepspeed is not None:
        from penstock.integrations.convert import convert_file

        # What clips is Trainer's max_grad_norm, which replaces an "auto" there, and is compared with a number.
        told = dict(convert_file(Path(deepspeed)).arguments)
    else:
        named = os.environ.get(VARIABLE) if config is None else config
        told = read_arguments(named) if named else {}
    arguments = told | prepare_arguments(given, source="trainer_class()")
    return arguments
