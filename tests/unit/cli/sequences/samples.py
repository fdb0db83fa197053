"""Samples and prepared rows for tests."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.cli.training.data.sequences.prepared import Prepared, prepare
from penstock.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None = None
    ends_row: bool = True
    where: str = "chat.jsonl:1"


def sample(ids: Sequence[int], trained: Sequence[int] | None = None, **others: object) -> Sample:
    marks = None if trained is None else np.array(trained, np.bool_)
    return Sample(np.array(ids, np.int64), marks, **others)  # type: ignore[arg-type]


def prepared_of(folder: Path, *samples: Sample, vocab_size: int = 1000, fingerprint: str = "f0") -> Prepared:
    def read() -> Iterator[Sample]:
        yield from samples

    return prepare(folder, fingerprint, read, vocab_size=vocab_size)


def write(folder: Path, number: int, what: str, count: int) -> None:
    """Prepare the same data as the other processes at the same time, and leave in files what came of it."""

    def read() -> Iterator[Sample]:
        (folder / f"read-{number}").touch()
        for row in range(10):
            yield sample([row, number])
            time.sleep(0.02)
            if what == "dies" and row == 5:
                (folder / "reached").touch()
                time.sleep(60)
            if what == "fails" and row == 5:
                raise ConfigError(f"chat.jsonl:6 is not JSON, said {number}")

    (folder / f"ready-{number}").touch()
    while len(list(folder.glob("ready-*"))) < count:
        time.sleep(0.005)
    try:
        found = str(prepare(folder / "kept", "f0", read, vocab_size=100).ids.tolist())
    except ConfigError as error:
        found = str(error)
    (folder / f"result-{number}").write_text(found)
