"""Tensors that are read ahead are those of the files, whatever is asked for, and never more than a ring of them."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from penstock.checkpoint import ahead
from penstock.checkpoint.ahead import ReadAhead, ReadSpan
from penstock.checkpoint.tensorfiles import WeightFiles
from penstock.errors import CheckpointError

PAGE = 4096


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(100, 333).bfloat16(),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "bytes": torch.randint(0, 255, (777,), dtype=torch.uint8),
        "wide": torch.randn(31, 97, dtype=torch.float64),
        "last": torch.randn(5000).half(),
    }


def write(folder: Path, *, spaces: int = 0, whole_pages: bool = False) -> dict[str, Tensor]:
    """Two files; the header of the first is longer than it has to be."""
    given = values()
    first, second = (dict(list(given.items())[part]) for part in (slice(3), slice(3, None)))
    data = save(first)
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" " * spaces
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    if whole_pages:
        second["filler"] = torch.zeros(0, dtype=torch.uint8)
        second["filler"] = torch.zeros(-len(save(second)) % PAGE, dtype=torch.uint8)
        while len(save(second)) % PAGE:  # its size is in the header too
            second["filler"] = torch.zeros(second["filler"].numel() + -len(save(second)) % PAGE, dtype=torch.uint8)
    save_file(second, folder / "b.safetensors")
    return first | second


def collect(reader: ReadAhead, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    found, at = torch.full((stop - start,), 1, dtype=dtype), start
    for first, piece in reader.pieces(name, start, stop):
        assert first == at
        found[first - start : first - start + piece.numel()] = piece
        at += piece.numel()
    assert at == stop
    return found


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("spaces", [0, 1, 4091])  # at odd bytes elements lie across pages
@pytest.mark.parametrize("whole_pages", [False, True])
@pytest.mark.parametrize("most_bytes", [1, 1 << 20])
def test_the_values_are_those_of_the_files(tmp_path, monkeypatch, cached, spaces, whole_pages, most_bytes):
    monkeypatch.setattr(ahead, "_is_cached", lambda path: cached)
    given = write(tmp_path, spaces=spaces, whole_pages=whole_pages)
    files = WeightFiles(tmp_path)
    # From the last to the first, and each in three parts, of which nobody has foreseen the second.
    cuts = {name: [0, value.numel() // 3, value.numel() // 2, value.numel()] for name, value in given.items()}
    foreseen = [ReadSpan(name, cuts[name][part], cuts[name][part + 1]) for name in reversed(given) for part in (0, 2)]
    reader = ReadAhead(files, foreseen, most_bytes)
    for name, value in reversed(given.items()):
        for start, stop in zip(cuts[name], cuts[name][1:], strict=False):
            found = collect(reader, name, start, stop, value.dtype)
            assert torch.equal(found.view(torch.uint8), value.view(-1)[start:stop].view(torch.uint8)), name
    reader.close()
    files.close()


def test_reads_are_in_flight_before_anything_is_asked_for_and_take_no_more_than_they_may(tmp_path):
    zeros = torch.zeros(1 << 20, dtype=torch.uint8)
    save_file({"one": zeros}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    files, most_bytes = WeightFiles(tmp_path), 10 * ahead.SLOTS * PAGE
    reader = ReadAhead(files, [ReadSpan("one", 0, 1 << 20)], most_bytes)
    slots = {request.slot.data_ptr(): request.slot.nbytes for request in reader._flying}
    assert len(slots) == ahead.SLOTS
    assert sum(slots.values()) <= most_bytes
    seen = {piece.data_ptr() // PAGE for _, piece in reader.pieces("one", 0, 1 << 20)}
    assert seen <= {slot // PAGE for slot in slots}
    assert files.read_bytes == 1 << 20
    reader.close()


@pytest.mark.parametrize("kept_bytes", [5 * PAGE, 80_050])  # within a request; behind the last whole page
def test_a_file_that_ends_before_its_tensors(tmp_path, monkeypatch, kept_bytes):
    save_file({"large": torch.zeros(40_000, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    files, existing = WeightFiles(tmp_path), ahead.File.existing

    def shortened(*arguments: Any, **named: Any) -> ahead.File:
        file = existing(*arguments, **named)
        os.truncate(tmp_path / "a.safetensors", kept_bytes)
        return file

    def read() -> None:
        with contextlib.closing(ReadAhead(files, [ReadSpan("large", 0, 40_000)], 1 << 20)) as reader:
            list(reader.pieces("large", 0, 40_000))

    monkeypatch.setattr(ahead.File, "existing", shortened)
    with pytest.raises(CheckpointError, match=r"a\.safetensors failed: it ends before its tensors do"):
        read()
