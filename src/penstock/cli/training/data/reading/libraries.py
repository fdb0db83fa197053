"""Libraries that only some data needs, imported when it is met."""

import importlib
from typing import Any

from penstock.errors import ConfigError, one_line


def library(name: str) -> Any:
    """Import a module of pyarrow or datasets.

    Raises:
        ConfigError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        package = name.partition(".")[0]
        why = one_line(error)
        raise ConfigError(f"This data needs {package}: {why}. Install it: pip install 'penstock[train]'.") from error
