"""Samples and prepared rows for tests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.cli.training.sequences.prepared import Prepared, prepare


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
