"""Prepared data on disk: what is written is what is read, once, whole, and only if it is ours is it removed."""

import json
import multiprocessing
import os
import resource
import signal
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.training.data.sequences import prepared as module
from penstock.cli.training.data.sequences import writing
from penstock.cli.training.data.sequences.prepared import MARKER, discard_old, prepare
from penstock.errors import ConfigError
from tests.support import PRELOADED
from tests.unit.cli.sequences.samples import Sample, prepared_of, sample, write


def none() -> Iterator[Sample]:
    raise AssertionError("read again")
    yield


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    found = prepared_of(tmp_path, sample([1, 2, 3]), sample([], where="b.txt"), sample([4]), vocab_size=1 << 16)
    assert found.ids.tolist() == [1, 2, 3, 4]
    assert (found.ids.dtype, found.offsets.dtype) == (np.uint16, np.int64)
    assert found.offsets.tolist() == [0, 3, 3, 4]
    assert found.lengths.tolist() == [3, 0, 1]
    assert found.row_count == 3
    assert found.trained is None
    again = prepare(tmp_path, "f0", none, vocab_size=1 << 16)
    assert again.ids.tolist() == [1, 2, 3, 4]


def test_wide_ids_take_four_bytes(tmp_path: Path) -> None:
    found = prepared_of(tmp_path, sample([1, 1 << 16]), vocab_size=(1 << 16) + 1)
    assert found.ids.dtype == np.uint32
    assert found.ids.tolist() == [1, 1 << 16]


def test_pieces_of_a_row_are_one_row(tmp_path: Path) -> None:
    pieces = [sample([1, 2], ends_row=False, where="a.txt"), sample([3], ends_row=False), sample([4]), sample([5])]
    found = prepared_of(tmp_path, *pieces)
    assert found.offsets.tolist() == [0, 4, 5]
    assert found.where(0) == "a.txt"


def test_a_row_that_is_not_ended_ends_with_the_data(tmp_path: Path) -> None:
    assert prepared_of(tmp_path, sample([1]), sample([2, 3], ends_row=False)).offsets.tolist() == [0, 1, 3]


def test_marks_begin_with_the_first_sample_that_has_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_ONES", b"\1\1\1")
    found = prepared_of(tmp_path, sample([1, 2, 3, 4]), sample([5, 6], [0, 1]), sample([7]))
    assert found.trained is not None
    assert found.trained.dtype == np.bool_
    assert found.trained.tolist() == [True, True, True, True, False, True, True]


def test_rows_know_where_they_came_from(tmp_path: Path) -> None:
    places = ["a.jsonl:1", "a.jsonl:3", "b.txt", "c:0:7", "c:0:007", "a.jsonl:9", ":5", "x:" + "9" * 30, "\udcff.csv:2"]
    found = prepared_of(tmp_path, *(sample([1], where=where) for where in places))
    assert [found.where(row) for row in range(len(places))] == places
    assert (tmp_path / "f0" / "names.bin").read_bytes().count(b"a.jsonl") == 2  # rows that follow each other share it


def test_no_rows(tmp_path: Path) -> None:
    found = prepared_of(tmp_path)
    assert (found.row_count, len(found.ids), found.lengths.tolist()) == (0, 0, [])


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    ids, marks = np.arange(100_000), np.zeros(100_000, np.int64)

    def read() -> Iterator[Sample]:
        for row in range(100):  # 30 MB
            yield sample(ids, marks, where=f"{row}.txt")

    tracemalloc.start()
    try:
        found = prepare(tmp_path, "f0", read, vocab_size=100_000)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    assert len(found.ids) == 10_000_000
    assert found.ids[-1] == 99_999


def test_many_rows_are_written(tmp_path: Path) -> None:
    rows = 10_000

    def read() -> Iterator[Sample]:
        for row in range(rows):
            yield sample(np.arange(row % 7), where=f"a.jsonl:{row + 1}")

    told: list[tuple[int, int]] = []
    found = prepare(tmp_path, "f0", read, vocab_size=100, progress=lambda *counts: told.append(counts))
    assert found.lengths.tolist() == [row % 7 for row in range(rows)]
    assert found.ids[: 1 + 2 + 3].tolist() == [0, 0, 1, 0, 1, 2]
    assert found.where(rows - 1) == f"a.jsonl:{rows}"
    assert told[-1] == (rows, len(found.ids))


@pytest.mark.parametrize("bad", [[1, 100], [-1, 2]])
def test_ids_outside_of_the_vocabulary(tmp_path: Path, bad: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"^chat.jsonl:4: the tokenizer made ids outside of the 100 of the model.$"):
        prepared_of(tmp_path, sample([99]), sample(bad, where="chat.jsonl:4"), vocab_size=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0.failed", "f0.lock"]


def test_data_that_cannot_be_read_is_not_taken_for_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    def read() -> Iterator[Sample]:
        yield sample([1])
        raise OSError(5, "Input/output error", "a.jsonl")

    message = r"^The files of --data cannot be read: .*Input/output error: 'a.jsonl' \(OSError\). Check them.$"
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path, "f0", read, vocab_size=10)


def test_where_locks_do_not_hold_the_first_one_counts(tmp_path: Path) -> None:
    def read() -> Iterator[Sample]:
        yield sample([1])
        prepared_of(tmp_path / "other", sample([2]))
        (tmp_path / "other" / "f0").rename(tmp_path / "f0")

    assert prepare(tmp_path, "f0", read, vocab_size=10).ids.tolist() == [2]
    assert names(tmp_path) == ["f0", "other"]


def test_marks_of_another_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^chat.jsonl:1: 2 tokens have 3 marks of what is trained.$"):
        prepared_of(tmp_path, sample([1, 2], [1, 0, 1]))


# Damage


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "trained.bin", MARKER])
def test_what_is_damaged_is_written_again(tmp_path: Path, name: str) -> None:
    rows = [sample([1, 2, 3], [0, 1, 1]), sample([4], [1])]
    prepared_of(tmp_path, *rows)
    file = tmp_path / "f0" / name
    file.write_bytes(file.read_bytes()[:-1])
    prepared_of(tmp_path, *rows)
    found = prepare(tmp_path, "f0", none, vocab_size=1000)
    assert (found.ids.tolist(), found.lengths.tolist()) == ([1, 2, 3, 4], [3, 1])
    assert found.trained is not None
    assert found.trained.tolist() == [False, True, True, True]


@pytest.mark.parametrize("text", ["[]", "{}", '{"sizes": 3}', "[" * 5000, '{"format": 1, "fingerprint": "f0"}'])
def test_a_marker_may_say_anything(tmp_path: Path, text: str) -> None:
    prepared_of(tmp_path, sample([1]))
    (tmp_path / "f0" / MARKER).write_text(text)
    assert prepared_of(tmp_path, sample([2])).ids.tolist() == [2]


def test_data_of_another_version_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared_of(tmp_path, sample([1]))
    monkeypatch.setattr(module, "_FORMAT", module._FORMAT + 1)
    assert prepared_of(tmp_path, sample([2])).ids.tolist() == [2]


def test_a_folder_that_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "f0").mkdir()
    (tmp_path / "f0" / "ids.bin").write_text("mine")
    with pytest.raises(ConfigError, match="is in the way of prepared data, and none of it"):
        prepared_of(tmp_path, sample([1]))
    assert (tmp_path / "f0" / "ids.bin").read_text() == "mine"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    prepared_of(tmp_path, sample([1]), fingerprint="other")
    (tmp_path / "other" / MARKER).unlink()
    (tmp_path / "f0").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="is in the way"):
        prepared_of(tmp_path, sample([1]))
    assert (tmp_path / "other" / "ids.bin").exists()


def test_a_full_disk_names_file_and_bytes(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))
    try:
        with pytest.raises(ConfigError) as caught:
            prepared_of(tmp_path, *(sample(np.zeros(500_000, np.int64)) for _ in range(4)), sample([1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/f0.")
    assert "/ids.bin cannot be written: File too large; it has 3000000 bytes, and at least 1000000 more" in text
    assert "\n" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0.failed", "f0.lock"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^Prepared data cannot be kept in .*/file/folder: .*Not a directory"):
        prepared_of(tmp_path / "file" / "folder", sample([1]))


# Several processes


def start(folder: Path, number: int, what: str, count: int) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")  # as tests of several ranks: torch is imported once
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=write, args=(folder, number, what, count))
    process.start()
    return process


def results_of(folder: Path, what: str, count: int) -> list[str]:
    processes = [start(folder, number, what, count) for number in range(count)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [(folder / f"result-{number}").read_text() for number in range(count)]


def test_one_process_writes_and_the_others_map(tmp_path: Path) -> None:
    results = results_of(tmp_path, "slow", 3)
    assert len(set(results)) == 1
    (reader,) = tmp_path.glob("read-*")
    ids = json.loads(results[0])
    assert ids[::2] == list(range(10))
    assert {str(number) for number in ids[1::2]} == {reader.name.removeprefix("read-")}


def test_those_that_waited_are_told_what_the_writer_met(tmp_path: Path) -> None:
    results = results_of(tmp_path, "fails", 2)
    (reader,) = tmp_path.glob("read-*")  # the other one does not read all of it once more
    number = reader.name.removeprefix("read-")
    assert results == [f"chat.jsonl:6 is not JSON, said {number}"] * 2
    # A later run may have mended the data: it reads again.
    assert prepared_of(tmp_path / "kept", sample([1])).ids.tolist() == [1]
    assert not (tmp_path / "kept" / "f0.failed").exists()


def test_a_writer_that_died_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    process = start(tmp_path, 0, "dies", 1)
    while not (tmp_path / "reached").exists():
        time.sleep(0.01)
    process.kill()
    process.join(60)
    kept = tmp_path / "kept"
    (part,) = kept.glob("*.part")
    foreign = kept / "f0.0123.part"
    foreign.mkdir()
    (foreign / "ids.bin").write_text("mine")
    assert prepared_of(kept, sample([7])).ids.tolist() == [7]
    assert not part.exists()
    assert (foreign / "ids.bin").read_text() == "mine"


# Old data


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_newest_others_stay(tmp_path: Path) -> None:
    for number in range(5):
        prepared_of(tmp_path, sample([number]), fingerprint=f"f{number}")
        os.utime(tmp_path / f"f{number}" / MARKER, (number, number))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MARKER).write_text("{}")
    discard_old(tmp_path, ["f0"], newest=2)
    assert names(tmp_path) == ["f0", "f3", "f4", "mine"]
    assert sorted(path.name for path in tmp_path.glob("*.lock")) == ["f0.lock", "f3.lock", "f4.lock"]


def test_data_that_is_used_is_new(tmp_path: Path) -> None:
    for number in range(3):
        prepared_of(tmp_path, sample([number]), fingerprint=f"f{number}")
        os.utime(tmp_path / f"f{number}" / MARKER, (number, number))
    prepare(tmp_path, "f0", none, vocab_size=1000)
    discard_old(tmp_path, [], newest=1)
    assert names(tmp_path) == ["f0"]


def test_a_link_to_prepared_data_is_not_emptied(tmp_path: Path) -> None:
    prepared_of(tmp_path / "other", sample([1]))
    (tmp_path / "linked").symlink_to(tmp_path / "other" / "f0")
    discard_old(tmp_path, [], newest=0)
    assert (tmp_path / "other" / "f0" / "ids.bin").exists()


def test_files_of_somebody_else_among_ours_stay(tmp_path: Path) -> None:
    prepared_of(tmp_path, sample([1]))
    (tmp_path / "f0" / "notes.txt").write_text("mine")
    discard_old(tmp_path, [], newest=0)
    assert [path.name for path in (tmp_path / "f0").iterdir()] == ["notes.txt"]


def test_what_dead_runs_with_other_settings_left_goes(tmp_path: Path) -> None:
    part = tmp_path / "old.0123.part"
    prepared_of(tmp_path, sample([1]), fingerprint="old")
    (tmp_path / "old").rename(part)
    prepared_of(tmp_path, sample([1]))
    with module.FileLock(tmp_path / "old.lock"):
        discard_old(tmp_path, ["f0"])
        assert names(tmp_path) == ["f0", "old.0123.part"]  # somebody is writing it
    discard_old(tmp_path, ["f0"])
    assert names(tmp_path) == ["f0"]
    assert [path.name for path in tmp_path.glob("*.lock")] == ["f0.lock"]


def test_notes_of_failures_go(tmp_path: Path) -> None:
    for name in ("f0", "f1"):
        with pytest.raises(ConfigError):
            prepared_of(tmp_path, sample([2000]), fingerprint=name)
    (tmp_path / "mine.failed").write_text("{}")
    discard_old(tmp_path, ["f0"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0.failed", "f0.lock", "mine.failed"]


def test_a_folder_that_is_not_there_has_nothing_old(tmp_path: Path) -> None:
    discard_old(tmp_path / "missing", [])
