"""Batches reach the device from pinned memory, read ahead, and nothing in the loop waits for the device."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.cli.training.data import feeding
from penstock.cli.training.data.feeding import on_device
from penstock.cli.training.data.sequences.batches import Batch

DEVICE = torch.device("meta")  # stands for an accelerator


def batch_of(number: int) -> Batch:
    """Make one that is packed: three of its tensors are there."""
    ids = torch.full((2, 3), number)
    return Batch(ids, ids + 100, ids + 200, None, label_count=4, token_count=6)


def numbered(count: int, read: list[str]) -> Iterator[tuple[Batch, int]]:
    for number in range(count):
        read.append(threading.current_thread().name)
        yield batch_of(number), 10 * number


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Notes what is pinned; a machine without accelerator pins nothing."""
    found: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        found.append(tensor.clone())
        return found[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(feeding, "_current", lambda device: nullcontext())
    return found


def test_on_a_cpu_batches_are_what_they_were_and_nothing_runs_beside() -> None:
    read: list[str] = []
    given = [(batch_of(number), number) for number in range(3)]
    found = list(on_device(iter(given), torch.device("cpu")))
    assert [(id(batch), about) for batch, about in found] == [(id(batch), about) for batch, about in given]
    list(on_device(numbered(2, read), torch.device("cpu")))
    assert set(read) == {threading.current_thread().name}


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
            batch, about = next(batches)
            assert about == 10 * number
            assert (batch.label_count, batch.token_count, batch.attention_mask) == (4, 6, None)
            assert batch.position_ids is not None
            assert {tensor.device for tensor in (batch.input_ids, batch.labels, batch.position_ids)} == {DEVICE}
            assert sorted(copies[-3:]) == [(number, True), (number + 100, True), (number + 200, True)]
            assert len(copies) == 3 * (number + 1)
            # The thread reads the next one meanwhile, and no other.
            deadline = threading.Event()
            while len(pinned) < 3 * (number + 2) and not deadline.wait(0.001):
                pass
            assert len(read) == number + 2
    assert all(name.startswith("penstock-batches") for name in read)
    assert not any(thread.name.startswith("penstock-batches") for thread in threading.enumerate())


@pytest.mark.usefixtures("pinned")
def test_the_end_and_an_error_of_the_data_reach_the_loop() -> None:
    found = [tuple(batch.input_ids.shape) for batch, _ in on_device(numbered(3, []), DEVICE)]
    assert found == [(2, 3)] * 3

    def broken() -> Iterator[tuple[Batch, int]]:
        yield batch_of(0), 0
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
            if "training" in path.parts:
                found[f"{path.name} {frame.f_code.co_name}"] += 1
            return read(tensor, *args, **kwargs)

        return noting

    for name in READS:
        monkeypatch.setattr(Tensor, name, watched(name))
    outcome = penstock_command(
        *("train", "--model", str(model_folder), "--data", str(text_folder), "--out", "out", "--steps", "6"),
        *("--log-every", "3", "--seq-length", "32", "--batch-size", "2", "--accumulation", "2"),
        *("--sample-tokens", "0"),
    )
    assert outcome.exit_code == 0, outcome.err
    # A report each third step; before and after the run; a clock's answer, on the host, before a step that is traced.
    assert found == {"loop.py close": 2, "evaluation.py _mean": 2, "waits.py _is_due": 1}
