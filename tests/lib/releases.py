"""Runs of the same tests in two releases of the libraries whose loops Penstock takes part in."""

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import pytest


def is_before() -> bool:
    """Whether the libraries are those of the releases before the pinned ones, as `make test-integrations` has them."""
    found = find_spec("transformers")
    return found is not None and "previous" in Path(str(found.origin)).parts


def leave_out(config: pytest.Config, items: list[pytest.Item], folder: Path, files: Collection[str]) -> None:
    """Leave out some files of a folder in the releases before: what they test is the same in both."""
    if is_before():
        left = [item for item in items if item.path.parent == folder and item.path.name in files]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
