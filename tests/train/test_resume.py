"""A run that was killed at any step, or asked to end, goes on as if nothing had been, on any number of ranks."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from penstock.integrations.transformers.resuming import is_whole
from tests.train.runs import (
    CPU,
    MIXED,
    STEPS,
    Outcome,
    assert_same_weights,
    checkpoints,
    ours,
    refused,
    run_ranks,
    saved,
    steps_of,
    written,
)
from tests.train.test_as_trl import ASSISTANT, LORA, settings_of

SAVING = {"save_strategy": "steps", "save_steps": 2}


def killing(when: str, step: int, number: int, rank: int = 0) -> Any:
    """Make a hook that sends this process a signal at an event of a step."""

    def hook(event: str, state: Any) -> None:
        if event == when and state.global_step == step and os.environ.get("RANK", "0") == str(rank):
            # A checkpoint is written beside the steps that follow, and is one to go on from when it is whole.
            while number == signal.SIGKILL and not all(map(is_whole, Path.cwd().glob("*/checkpoint-*"))):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    return hook


def die_while_writing(rank: int, settings: dict[str, Any], out: Path, placement: dict[str, Any], step: int) -> Outcome:
    """The command in a process that dies while the trainer's own state is written, after Penstock's."""
    write = TrainerState.save_to_json

    def writing(self: TrainerState, path: str) -> None:
        if f"checkpoint-{step}" in path:
            Path(path).write_text("{")  # torn
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, path)

    TrainerState.save_to_json = writing
    return run_on_rank(rank, settings, out, placement)


def run_on_rank(
    rank: int, settings: dict[str, Any], out: Path, placement: dict[str, Any], ends: Mapping[str, Any] | None = None
) -> Outcome:
    """The command in this rank, which may be asked to end."""
    os.environ.update(CI="1", HF_HUB_OFFLINE="1")
    os.chdir(out.parent)
    return ours(settings, out, penstock=placement, hook=killing(**ends) if ends else None)


def last_steps(found: Outcome, expected: Outcome) -> None:
    """What was made again, or made first, is what the whole run made; and the weights are its weights, bit for bit."""
    made = steps_of(found.logs)
    assert 0 < len(made) < STEPS
    assert made == steps_of(expected.logs)[-len(made) :]
    assert_same_weights(saved(found.out), expected.weights, 0)


def test_a_killed_run_goes_on_to_the_same_weights_as_one_in_another_placement(made: Path, tmp_path: Path) -> None:
    """Killed while it writes; between two checkpoints, and on several ranks: tests/train/test_torchrun.py."""
    settings = settings_of(made, "chats", **ASSISTANT, **LORA, **SAVING)
    whole = ours(settings, tmp_path / "whole", penstock=MIXED)
    out = tmp_path / "parts"
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(die_while_writing, 1, settings, out, MIXED, 4)
    assert not saved(out)
    found = ours(settings, out, penstock=MIXED)
    assert found.status == 0
    last_steps(found, whole)
    from_there = str(tmp_path / "whole" / "checkpoint-2")
    found = ours(settings, tmp_path / "rest", "--resume_from_checkpoint", from_there, penstock=CPU | {"stage": 1})
    last_steps(found, whole)
    assert len(steps_of(found.logs)) == STEPS - 2


def test_a_run_goes_on_among_other_ranks(made: Path, tmp_path: Path) -> None:
    """Rows of a step are the same ones: per-device batch x accumulation x ranks stays."""
    rows = "".join((made / "texts" / f"{split}.jsonl").read_text() for split in ("train", "test"))
    (tmp_path / "rows.jsonl").write_text(rows)  # 20: else accelerate fills the last step of an epoch
    settings = settings_of(made, "texts", per_device_train_batch_size=1, dataset_name=str(tmp_path / "rows.jsonl"))
    whole = ours({**settings, "gradient_accumulation_steps": 4}, tmp_path / "whole", penstock=CPU)
    out = tmp_path / "parts"
    ends = {"when": "step ends", "step": 3, "number": signal.SIGTERM, "rank": 1}
    first = {**settings, "gradient_accumulation_steps": 2}
    assert [each.status for each in run_ranks(run_on_rank, 2, first, out, CPU, ends)] == [75, 75]
    assert checkpoints(out) == ["checkpoint-3"]
    found = ours(first, out, penstock=CPU)
    assert found.status == 0
    made_here = steps_of(found.logs)
    assert len(made_here) == 3
    for got, wanted in zip(made_here, steps_of(whole.logs)[3:], strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    assert_same_weights(saved(out), whole.weights, 1e-5)


def test_a_run_goes_on_by_itself_or_begins_anew_as_asked(made: Path, tmp_path: Path) -> None:
    """The newest checkpoint that is whole; one that is damaged is passed over, and named."""
    settings = settings_of(made, "texts", **SAVING)
    whole = ours(settings, tmp_path / "out", penstock=CPU)
    assert checkpoints(whole.out) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    done = ours(settings, whole.out, penstock=CPU)
    assert (done.status, done.losses) == (0, []), "nothing is left to do"
    longer = ours({**settings, "max_steps": 8}, whole.out, penstock=CPU)
    assert len(longer.losses) == 2
    anew = ours(settings, whole.out, "--resume_from_checkpoint", "false", penstock=CPU)
    assert steps_of(anew.logs) == steps_of(whole.logs)
    assert checkpoints(whole.out) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert list(whole.out.glob("*/checkpoint-8")), "what an earlier run has left is put apart"


def test_a_checkpoint_that_is_not_there_or_of_another_model_is_refused(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "texts", **SAVING, output_dir=str(tmp_path / "out"))
    file = written(settings, tmp_path, "run")
    assert "nowhere" in refused(["--config", str(file), "--resume_from_checkpoint", "nowhere"])
    assert not (tmp_path / "out").exists()
    ours(settings, tmp_path / "whole", penstock=CPU)
    from_there = str(tmp_path / "whole" / "checkpoint-2")
    words = ["--resume_from_checkpoint", from_there, "--use_peft", "true"]
    assert "checkpoint-2" in refused(["--config", str(file), *words])
