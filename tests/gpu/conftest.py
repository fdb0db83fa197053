"""The device under test: the accelerator where there is one, else the cpu with simulated streams in its place."""

from collections.abc import Callable

import pytest
import torch

from penstock.machine.accelerator import streams_for
from penstock.machine.devices import default_device
from penstock.machine.streams import Streams
from tests.support import simulated


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The accelerator, or the cpu."""
    return default_device()


@pytest.fixture(scope="session")
def make_streams(device: torch.device) -> Callable[[], Streams]:
    """New asynchronous streams of the device."""
    return (lambda: simulated()) if device.type == "cpu" else (lambda: streams_for(device))
