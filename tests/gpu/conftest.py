"""The device under test: the accelerator where there is one, else the cpu with simulated streams in its place."""

from collections.abc import Callable

import pytest
import torch

from penstock.rules import device as device_rules
from penstock.runtime.accelerator import streams_for
from penstock.runtime.hardware import default_device
from penstock.runtime.streams import Streams
from tests.lib.streams import simulated


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The accelerator, or the cpu."""
    return default_device()


@pytest.fixture(scope="session")
def make_streams(device: torch.device) -> Callable[[], Streams]:
    """New asynchronous streams of the device."""
    return (lambda: simulated()) if device.type == "cpu" else (lambda: streams_for(device))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device updates by the reference: the host's bits, and no seconds for the compiler."""
    monkeypatch.setattr(device_rules, "has_compiler", lambda device: False)
