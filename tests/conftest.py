"""Settings of the whole suite."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.costs import MEASURED, Meter, runs_integrations

# Before torch is imported: tests run beside each other, and threads of one operation would spin for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:  # a machine with a device may lack it, and the tests for it do not need it
    pass
else:
    from tests.lib.fuzz import TIMES

    # The suite runs on shared machines: how long one example takes says nothing. Every run draws the same examples, so
    # that what fails is the change at hand; `make fuzz` draws others.
    settings.register_profile("suite", deadline=None, derandomize=TIMES == 1)
    settings.load_profile("suite")


#: The file before whose tests all was set aside.
SET_ASIDE = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Measure what files cost, and let interrupts reach the children of tests.

    A shell that starts the suite in the background has it ignore SIGINT, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What a test runs in another pytest is part of what that test costs.
    if (hasattr(config, "workerinput") or MEASURED not in os.environ) and not runs_integrations(config):
        os.environ[MEASURED] = "1"
        config.pluginmanager.register(Meter(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: what the collection of tests makes lives to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set aside, before the first test of a file, what is there: a collection then walks through that file's own."""
    if item.path != item.session.stash.get(SET_ASIDE, None):
        item.session.stash[SET_ASIDE] = item.path
        gc.collect()
        gc.freeze()
