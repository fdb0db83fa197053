"""What can be page-locked."""

import pytest
import torch

from penstock.probe import links
from penstock.probe.links import measure_room
from penstock.probe.sampling import Deadline
from tests.lib.memory import pinning_on_cpu

CPU = torch.device("cpu")
MIB = 1 << 20


def test_memory_is_page_locked_in_steps_until_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never refused is taken for all."""
    monkeypatch.setattr(links, "PIN_STEP_BYTES", MIB)
    monkeypatch.setattr(links, "MOST_PIN_BYTES", 8 * MIB)
    monkeypatch.setattr(links, "needs_pinning", lambda device: True)
    monkeypatch.setattr(links, "can_register", lambda device: True)
    pinned = pinning_on_cpu(monkeypatch, limit=5 * MIB)
    figure = measure_room(CPU, Deadline(5))["pinnable_memory"]
    assert (figure.value, figure.low, figure.high) == (4 * MIB, 4 * MIB, 8 * MIB)
    assert "8,388,608 were refused" in figure.how
    assert pinned == {}
    pinned = pinning_on_cpu(monkeypatch)
    figures = measure_room(CPU, Deadline(5))
    assert figures["pinnable_memory"].value == figures["host_memory"].value
    assert figures["pinnable_memory"].low == 8 * MIB
    assert pinned == {}
