"""Runs of `penstock train` in this process: a small model, its words, rows of them."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.train import main

#: What every run here is told: few steps of fp32, nothing to a tracker.
COMMON = ("--bf16", "false", "--use_cpu", "--max_length", "16", "--report_to", "none", "--logging_steps", "1")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Leave nothing to the next test of what libraries keep in a process: the environment, accelerate's state."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    for state in (GradientState, AcceleratorState, PartialState):
        state._reset_state()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of two layers, with a tokenizer of 64 words and a chat template."""
    from tests.integrations.trl_cases import causal, folder_of

    return Path(folder_of(causal(), tmp_path_factory.mktemp("train") / "model"))


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 24 rows of text."""
    from tests.integrations.trl_cases import texts

    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(24)))
    return path


@pytest.fixture
def train(model: Path, rows: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the command, in `tmp_path / "out"`."""

    def call(*words: Any, steps: int = 4, out: Path | None = None) -> int:
        given = ["--model", model, "--data", rows, "--out", out or tmp_path / "out", "--max_steps", steps]
        return main([str(word) for word in (*given, *COMMON, *words)])

    return call
