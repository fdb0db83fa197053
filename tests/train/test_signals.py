"""A run that is asked to end by a signal: in an evaluation, or too early."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import CPU, assert_same_weights, checkpoints, command, ours, saved, steps_of, written
from tests.train.test_as_trl import settings_of
from tests.train.test_resume import killing


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """A run hears signals, and not its caller, whose they are again whatever it has done."""

    def reached(number: int, _: Any) -> None:
        raise AssertionError(f"signal {number} reached the caller of the run")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, reached) for number in numbers}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert all(handler is reached for handler in after.values())


def test_it_saves_and_goes_on_to_the_same_weights(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is asked while it evaluates, before the next step: the checkpoint has the steps that were made."""
    settings = settings_of(made, "texts", eval_strategy="steps", eval_steps=2)
    whole = ours(settings, tmp_path / "whole", penstock=CPU)
    out = tmp_path / "parts"
    capfd.readouterr()
    ended = ours(settings, out, penstock=CPU, hook=killing("evaluates", 2, signal.SIGTERM))
    last = capfd.readouterr().out.strip().splitlines()[-1]
    assert ended.status == 75
    assert checkpoints(out)[-1] in ("checkpoint-2", "checkpoint-3")
    assert not saved(out), "no trained model"
    assert "penstock" in last, "the command that goes on"
    assert str(out) in last
    found = ours(settings, out, penstock=CPU)
    assert found.status == 0
    assert steps_of(ended.logs) + steps_of(found.logs) == steps_of(whole.logs)
    assert_same_weights(found.weights, whole.weights, 0)


def test_before_the_first_step_a_signal_ends_it_and_harms_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal ends it before this")

    monkeypatch.setattr("datasets.load_dataset", load)
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("of an earlier run")
    file = written(settings_of(made, "texts"), tmp_path, "run")
    assert command(["--config", str(file), "--output_dir", str(out)]) == 128 + signal.SIGTERM
    assert (out / "metrics.jsonl").read_text() == "of an earlier run"
    assert not saved(out)
    assert not checkpoints(out)
