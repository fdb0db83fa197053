"""Files of a run: a YAML file of TRL's with a block `penstock:`, the `run.yaml` of a run, run files of 0.2.

Nothing of TRL is imported here: what a file names decides whether the hub is asked, before any library is.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, shown
from penstock.files import read_mapping

NAME = "run.yaml"
BLOCK = "penstock"
#: Short names of three fields, typed and in files.
SHORT: Mapping[str, str] = {"model": "model_name_or_path", "data": "dataset_name", "out": "output_dir"}
#: Options of 0.2, and what says the same now.
RENAMED: Mapping[str, str] = {
    "seq_length": "use --max_length",
    "batch_size": "use --per_device_train_batch_size",
    "accumulation": "use --gradient_accumulation_steps",
    "lr": "use --learning_rate",
    "steps": "use --max_steps",
    "epochs": "use --num_train_epochs",
}


def read_run_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of options, by field. Its block `env:` is put into the environment, as TRL does.

    Raises:
        ConfigError: it cannot be read, or says a thing twice.
    """
    content = read_mapping(Path(path))
    for name, value in _block(content, "env", path).items():
        os.environ[str(name)] = str(value)
    block = _block(content, BLOCK, path)
    placement = block.get("placement")
    if isinstance(placement, Mapping):  # as arguments of `prepare` are written
        block = {name: value for name, value in block.items() if name != "placement"} | dict(placement)
    values: dict[str, Any] = {}
    for key, value in (*content.items(), *block.items()):
        name = SHORT.get(str(key), str(key)).replace("-", "_")
        if name in values:
            raise ConfigError(f"{path} has {shown(key)} twice. Leave one of them out.")
        values[name] = value
    return values


def _block(content: dict[str, Any], name: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Take a block out of a file's content."""
    block = content.pop(name, None) or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{path}: {name} is {shown(block)}. Write a mapping below it.")
    return dict(block)


def checkpoints_of(out: Path) -> list[Path]:
    """List the checkpoints of a run, the oldest first."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in out.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, number in numbers.items() if number.isdigit()), key=lambda path: int(numbers[path]))
