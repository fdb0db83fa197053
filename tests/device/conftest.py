"""The tests of this folder run in the strict process; in this very process where `HERE` is set, as for a debugger."""

import os
import sys
from pathlib import Path

import pytest

from tests.device.building import NAME, build
from tests.device.elsewhere import Elsewhere
from tests.device.loading import HERE, load

if os.environ.get(HERE):
    from tests.device.quiet import quiet  # noqa: F401 - around every test

    if NAME not in sys.modules:
        load(build())
else:

    def pytest_configure(config: pytest.Config) -> None:
        config.pluginmanager.register(Elsewhere(config, Path(__file__).parent))
