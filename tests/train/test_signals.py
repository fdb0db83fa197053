"""A run that is asked to end by a signal: between steps, in an evaluation, twice, too early, on one rank of two."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import (
    CPU,
    NVME,
    assert_same_weights,
    checkpoints,
    command,
    ours,
    run_child,
    run_ranks,
    saved,
    steps_of,
    written,
)
from tests.train.test_as_trl import ASSISTANT, settings_of
from tests.train.test_resume import killing, run_on_rank


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
    settings = settings_of(made, "chats", **ASSISTANT)
    whole = ours(settings, tmp_path / "whole", penstock=CPU)
    out = tmp_path / "parts"
    capfd.readouterr()
    ended = ours(settings, out, penstock=CPU, hook=killing("step ends", 3, signal.SIGTERM))
    said = capfd.readouterr()
    assert ended.status == 75
    assert checkpoints(out) == ["checkpoint-3"]
    assert not saved(out), "no trained model"
    last = said.out.strip().splitlines()[-1]
    assert "penstock" in last, "the command that goes on"
    assert str(out) in last
    found = ours(settings, out, penstock=CPU)
    assert found.status == 0
    assert steps_of(ended.logs) + steps_of(found.logs) == steps_of(whole.logs)
    assert_same_weights(found.weights, whole.weights, 0)


def test_an_evaluation_does_not_keep_it(made: Path, tmp_path: Path) -> None:
    """It is asked while it evaluates, before the next step: the checkpoint has the steps that were made."""
    settings = settings_of(made, "texts", eval_strategy="steps", eval_steps=2)
    whole = ours(settings, tmp_path / "whole", penstock=CPU)
    out = tmp_path / "parts"
    ended = ours(settings, out, penstock=CPU, hook=killing("evaluates", 2, signal.SIGTERM))
    assert ended.status == 75
    assert checkpoints(out)[-1] in ("checkpoint-2", "checkpoint-3")
    found = ours(settings, out, penstock=CPU)
    assert_same_weights(found.weights, whole.weights, 0)


def test_one_rank_of_two_is_asked_and_both_save(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "texts", per_device_train_batch_size=1)
    ends = {"when": "step begins", "step": 2, "number": signal.SIGINT, "rank": 1}
    assert [each.status for each in run_ranks(run_on_rank, 2, settings, tmp_path / "out", NVME, ends)] == [75, 75]
    assert checkpoints(tmp_path / "out") == ["checkpoint-3"]


# What ends a process at once


def listen_to_signals(folder: Path) -> None:
    """Set signals and environment as a shell's child has them."""
    os.environ.update(CI="1", HF_HUB_OFFLINE="1")
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def asked_at_once(settings: dict[str, Any], folder: Path) -> None:
    listen_to_signals(folder)
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal ends it before this")

    datasets.load_dataset = load
    file = written(settings, folder, "run")
    raise SystemExit(command(["--config", str(file), "--output_dir", str(folder / "out")]))


def test_before_the_first_step_a_signal_ends_it_and_harms_nothing(made: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("of an earlier run")
    status = run_child(asked_at_once, settings_of(made, "texts"), tmp_path)
    assert status in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "of an earlier run"
    assert not saved(tmp_path / "out")
    assert not checkpoints(tmp_path / "out")
