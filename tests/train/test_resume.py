"""A run that was killed at any step, or asked to end, goes on as if nothing had been, on any number of ranks."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

import penstock
from penstock.integrations.transformers.resuming import is_whole
from tests.train.runs import (
    CPU,
    MIXED,
    NVME,
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


def killing(when: str, step: int, number: int = signal.SIGKILL, rank: int | None = None) -> Any:
    """Make a hook that sends this process a signal at an event of a step."""

    def hook(event: str, state: Any) -> None:
        if event == when and state.global_step == step and os.environ.get("RANK", "0") == str(rank or 0):
            # A checkpoint is written beside the steps that follow, and is one to go on from when it is whole.
            while number == signal.SIGKILL and not all(map(is_whole, Path.cwd().glob("*/checkpoint-*"))):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    return hook


def at_a_write(what: str, step: int) -> None:
    """Have the process die while the checkpoint of a step is written: with its state, or with the trainer's own."""
    if what == "state":
        save = penstock.Optimizer.save

        def saving(self: penstock.Optimizer, path: Any, **options: Any) -> None:
            save(self, path, **options)
            if f"checkpoint-{step}" in str(path):
                os.kill(os.getpid(), signal.SIGKILL)

        penstock.Optimizer.save = saving  # type: ignore[method-assign]
        return
    write = TrainerState.save_to_json

    def writing(self: TrainerState, path: str) -> None:
        if f"checkpoint-{step}" in path:
            Path(path).write_text("{")  # torn
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, path)

    TrainerState.save_to_json = writing


def run_on_rank(
    rank: int,
    settings: dict[str, Any],
    out: Path,
    placement: dict[str, Any],
    ends: Mapping[str, Any] | None = None,
    words: tuple[str, ...] = (),
) -> Outcome:
    """The command in this rank, which may be killed or asked to end."""
    os.environ.update(CI="1", HF_HUB_OFFLINE="1")
    os.chdir(out.parent)
    hook = None
    if ends and "write" in ends:
        at_a_write(ends["write"], ends["step"])
    elif ends:
        hook = killing(ends["when"], ends["step"], ends.get("number", signal.SIGKILL), ends.get("rank"))
    return ours(settings, out, *words, penstock=placement, hook=hook)


def last_steps(found: Outcome, expected: Outcome) -> None:
    """What was made again, or made first, is what the whole run made; and the weights are its weights, bit for bit."""
    made = steps_of(found.logs)
    assert 0 < len(made) < STEPS
    assert made == steps_of(expected.logs)[-len(made) :]
    assert_same_weights(saved(found.out), expected.weights, 0)


@pytest.mark.parametrize(
    ("ends", "rows", "changes", "placement"),
    [
        ({"when": "step ends", "step": 3}, "chats", ASSISTANT | {"packing": True}, CPU),
        ({"write": "trainer", "step": 4}, "chats", ASSISTANT | LORA, MIXED),
    ],
    ids=["between checkpoints", "while the trainer's state is written"],
)
def test_a_killed_run_goes_on_to_the_same_weights(
    ends: dict[str, Any], rows: str, changes: dict[str, Any], placement: dict[str, Any], made: Path, tmp_path: Path
) -> None:
    settings = settings_of(made, rows, **changes, **SAVING)
    whole = ours(settings, tmp_path / "whole", penstock=placement)
    out = tmp_path / "parts"
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(run_on_rank, 1, settings, out, placement, ends)
    assert not saved(out)
    found = ours(settings, out, penstock=placement)
    assert found.status == 0
    last_steps(found, whole)


def test_a_killed_run_of_two_ranks_goes_on_to_the_same_weights(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "chats", per_device_train_batch_size=1, **ASSISTANT, **SAVING)
    (whole, _) = run_ranks(run_on_rank, 2, settings, tmp_path / "whole", NVME)
    out = tmp_path / "parts"
    with pytest.raises(AssertionError, match=r"died with exit code|rank 0"):
        run_ranks(run_on_rank, 2, settings, out, NVME, {"write": "state", "step": 4})
    (found, _) = run_ranks(run_on_rank, 2, settings, out, NVME)
    last_steps(found, Outcome(whole.logs, saved(tmp_path / "whole"), tmp_path / "whole"))


def test_a_run_goes_on_among_other_ranks(made: Path, tmp_path: Path) -> None:
    """Rows of a step are the same ones: per-device batch x accumulation x ranks stays."""
    rows = "".join((made / "texts" / f"{split}.jsonl").read_text() for split in ("train", "test"))
    (tmp_path / "rows.jsonl").write_text(
        rows
    )  # 20: accelerate fills the last step of an epoch where ranks do not share it
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


def test_a_run_goes_on_in_another_placement(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "chats", **ASSISTANT, **LORA, **SAVING)
    whole = ours(settings, tmp_path / "whole", penstock=CPU)
    from_there = str(tmp_path / "whole" / "checkpoint-2")
    found = ours(settings, tmp_path / "rest", "--resume_from_checkpoint", from_there, penstock=MIXED | {"stage": 1})
    last_steps(found, whole)
    assert len(steps_of(found.logs)) == STEPS - 2


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
