"""Settings of the whole suite."""

import gc
import signal
from collections.abc import Generator

import pytest

try:
    from hypothesis import settings
except ImportError:  # a machine with a device may lack it, and the tests for it do not need it
    pass
else:
    # The suite runs on shared machines: how long one example takes says nothing.
    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")


def pytest_configure() -> None:
    """Let an interrupt be one for the children of tests, also where a shell started the suite in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Set aside what the collection made: it lives to the end, and each `gc.collect()` would walk through all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
