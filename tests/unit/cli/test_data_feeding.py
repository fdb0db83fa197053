"""Batches reach the device from pinned memory, read ahead, and nothing in the loop waits for the device."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.cli.training import data
from penstock.cli.training.data import Ids, on_device, to_device

DEVICE = torch.device("meta")  # stands for an accelerator


def numbered(count: int, read: list[str]) -> Iterator[Ids]:
    for number in range(count):
        read.append(threading.current_thread().name)
        yield np.full((2, 3), number)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Notes what is pinned; a machine without accelerator pins nothing."""
    found: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        found.append(tensor.clone())
        return found[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(data, "_current", lambda device: nullcontext())
    return found


def test_on_a_cpu_batches_are_what_they_were_and_nothing_runs_beside() -> None:
    read: list[str] = []
    batches = [np.full((2, 3), number) for number in range(3)]
    found = list(on_device(iter(batches), torch.device("cpu")))
    assert [ids.data_ptr() for ids in found] == [batch.ctypes.data for batch in batches], "the same memory"
    list(on_device(numbered(2, read), torch.device("cpu")))
    assert set(read) == {threading.current_thread().name}
    assert to_device(batches[0], torch.device("cpu")).data_ptr() == batches[0].ctypes.data


def test_an_accelerator_gets_them_from_pinned_memory_one_ahead_without_waiting(
    pinned: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[tuple[int, Any]] = []
    to = Tensor.to

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copies.append((int(tensor[0, 0]), kwargs.get("non_blocking")))
        assert any(tensor is other for other in pinned)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", noted)
    read: list[str] = []
    with closing(on_device(numbered(6, read), DEVICE)) as batches:
        for number in range(4):
            ids = next(batches)
            assert ids.device == DEVICE
            assert copies[-1] == (number, True)
            # The thread reads the next one meanwhile, and no other.
            deadline = threading.Event()
            while len(pinned) < number + 2 and not deadline.wait(0.001):
                pass
            assert len(read) == number + 2
    assert all(name.startswith("penstock-batches") for name in read)
    assert not any(thread.name.startswith("penstock-batches") for thread in threading.enumerate())
    assert to_device(np.zeros((1, 1)), DEVICE).device == DEVICE
    assert copies[-1] == (0, True)


@pytest.mark.usefixtures("pinned")
def test_the_end_and_an_error_of_the_text_reach_the_loop() -> None:
    assert [tuple(ids.shape) for ids in on_device(numbered(3, []), DEVICE)] == [(2, 3)] * 3

    def broken() -> Iterator[Ids]:
        yield np.zeros((1, 1))
        raise OSError("the disk")

    batches = on_device(broken(), DEVICE)
    next(batches)
    with pytest.raises(OSError, match="the disk"):
        next(batches)


READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy")


def test_the_training_loop_reads_the_device_where_it_reports_and_nowhere_else(
    penstock_command: Callable[..., Any], text_folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read waits for all that the device was given."""
    found: Counter[str] = Counter()

    def watched(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            path = Path(frame.f_code.co_filename)
            if path.parent.name == "training":
                found[f"{path.name} {frame.f_code.co_name}"] += 1
            return read(tensor, *args, **kwargs)

        return noting

    for name in READS:
        monkeypatch.setattr(Tensor, name, watched(name))
    outcome = penstock_command(
        *("train", "--model", str(model_folder), "--data", str(text_folder), "--out", "out", "--steps", "6"),
        *("--log-every", "3", "--seq-length", "32", "--batch-size", "2", "--accumulation", "2"),
    )
    assert outcome.exit_code == 0, outcome.err
    found.pop("model.py sample_ids", None)
    # A report each third step; before and after the run.
    assert found == {"loop.py close": 2, "evaluation.py _mean": 2}
