"""A configuration's file, whosever it is."""

from os import PathLike
from pathlib import Path

from penstock.files import read_mapping
from penstock.integrations.convert.accelerate import convert_accelerate
from penstock.integrations.convert.converted import Converted
from penstock.integrations.convert.deepspeed import convert_deepspeed

#: Keys that only a configuration of accelerate has.
_OF_ACCELERATE = frozenset(("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"))


def convert_file(path: str | PathLike[str]) -> Converted:
    """Convert the configuration in a file: accelerate's, in YAML or JSON, or DeepSpeed's.

    Raises:
        ConfigError: the file is not read, or a value in it is not what its key takes. The message names both.

    Example:
        >>> convert_file("ds_config.json").arguments  # doctest: +SKIP
    """
    path = Path(path)
    config = read_mapping(path)
    if _OF_ACCELERATE & config.keys():
        return convert_accelerate(config, source=str(path), folder=path.parent)
    return convert_deepspeed(config, source=str(path))
