"""When a run writes samples."""

from typing import Any

import pytest

from penstock.cli.training import sampling
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.sampling import Sampler


class Told:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def samples(self, step: int, samples: object) -> None:
        self.steps.append(step)


class Nothing:
    """A tokenizer, a recipe, a model, of which nothing is asked here."""

    end_of_document = None
    seq_length = 8
    generation_config = None
    config = None

    def decode(self, ids: object) -> str:
        return ""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ([0, 5, 10, 10], [0, 5, 10]),  # the end, of what the last evaluation has continued
        ([0, 5, 10, 5], [0, 5, 10, 5]),  # back to the best: another model
    ],
)
def test_of_the_same_model_they_are_written_once(
    monkeypatch: pytest.MonkeyPatch, written: list[int], told: list[int]
) -> None:
    monkeypatch.setattr(sampling, "write_samples", lambda *_: [])
    given: Any = Nothing()
    reports: Any = Told()
    sampler = Sampler(given, given, [], given, TrainConfig(), given, given, reports)
    for step in written:
        sampler.write(step)
    assert reports.steps == told
