"""Everything in this folder is run by `make test-integrations`: it needs libraries that the other tests do not."""

from pathlib import Path

import pytest

from tests.costs import runs_integrations
from tests.support import PRELOADED

HERE = Path(__file__).parent
OWN = "tests.integrations.preloaded"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the files alone where they are not asked for: importing those libraries takes longer than many tests."""
    return None if runs_integrations(config) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integrations)
            if OWN not in PRELOADED:  # for runs of these tests alone: others do without
                PRELOADED.append(OWN)
