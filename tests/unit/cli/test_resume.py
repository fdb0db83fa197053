"""A run that ends before its last step goes on from its checkpoint, with the same losses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.checkpoint.format import MARKER, checksum, to_bytes
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.interruption import EXIT_INTERRUPTED, Interruption
from penstock.cli.training.learning import checkpoints
from penstock.cli.training.reporting.reports import Reports
from tests.support import thorough

RUN = ["--precision", "fp32", "--seq-length", "32", "--batch-size", "4", "--eval-sequences", "8", "--steps", "8"]
RUN += ["--log-every", "1", "--sample-tokens", "0", "--accumulation", "2", "--lr", "0.01"]


def losses(out: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["lr"]) for line in lines if line["event"] == "step"]


def evaluations(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["event"] == "eval"}


@pytest.fixture
def arguments(model_folder: Path, text_folder: Path) -> list[str]:
    return ["train", "--model", str(model_folder), "--data", str(text_folder), *RUN]


@pytest.mark.parametrize("number", [signal.SIGTERM, *map(thorough, [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])])
def test_a_run_that_is_asked_to_end_saves_and_goes_on_with_the_same_losses(
    penstock_command: Callable[..., Any],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    assert penstock_command(*arguments, "--out", "whole").exit_code == 0
    whole = losses(tmp_path / "whole")

    step = Reports.step
    with monkeypatch.context() as asking:

        def ask(self: Reports, progress: Any) -> None:
            step(self, progress)
            if progress.step == 3:
                os.kill(os.getpid(), number)

        asking.setattr(Reports, "step", ask)
        ended = penstock_command(*arguments, "--out", "parts", "--resume", "auto")
    assert ended.exit_code == EXIT_INTERRUPTED == 75
    command = " ".join([*arguments, "--out parts --resume auto"])
    assert f"asked to end: saved step 3; go on with: penstock {command}\n" in ended.out
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "parts" / "config.json").exists()
    handler = signal.getsignal(number)
    assert not isinstance(getattr(handler, "__self__", None), Interruption), "the signal is the caller's again"

    resumed = penstock_command(*arguments, "--out", "parts", "--resume", "auto")
    assert resumed.exit_code == 0, resumed.err
    assert "goes on after step 3" in resumed.out
    assert losses(tmp_path / "parts") == whole
    assert evaluations(tmp_path / "parts")[8] == evaluations(tmp_path / "whole")[8]
    assert (tmp_path / "parts" / "config.json").exists()


def test_checkpoints_are_saved_beside_training_and_only_the_newest_stay(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    saving = penstock_command(*arguments, "--out", "out", "--save-every", "2", "--keep", "3")
    assert saving.exit_code == 0, saving.err
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006", "step-00000008"]

    whole = losses(tmp_path / "out")
    named = str(tmp_path / "out" / "checkpoints" / "step-00000004")
    again = penstock_command(*arguments, "--out", "again", "--resume", named)
    assert again.exit_code == 0, again.err
    assert losses(tmp_path / "again") == whole[4:]

    done = penstock_command(*arguments, "--out", "out", "--resume", "auto")  # nothing is left to do
    assert done.exit_code == 0, done.err
    assert losses(tmp_path / "out") == whole


def test_a_run_on_other_data_is_not_resumed(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    assert penstock_command(*arguments, "--out", "out", "--save-every", "8").exit_code == 0
    other = penstock_command(*arguments, "--out", "out", "--resume", "auto", "--seed", "1")
    assert other.exit_code == 2
    assert "was trained on other data: seed was 0 and is 1" in other.err
    missing = penstock_command(*arguments, "--out", "out", "--resume", "nowhere")
    assert missing.exit_code == 2
    assert "nowhere does not exist" in missing.err


def test_what_is_refused_leaves_the_metrics_of_the_last_run(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    """Whatever comes up late: what `prepare` refuses, a checkpoint that does not fit, one of another text."""
    saving = penstock_command(*arguments, "--out", "out", "--save-every", "8")
    assert saving.exit_code == 0, saving.err
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    (tmp_path / "nothing").mkdir()
    for refused in (
        ["--overlap", "backward"],
        ["--resume", "nowhere"],
        ["--resume", "auto", "--seed", "1"],
        ["--resume", "auto", "--steps", "7"],
        ["--resume", "auto", "--nvme-path", "missing", "--optimizer", "nvme"],
    ):
        outcome = penstock_command(*arguments, "--out", "out", *refused)
        assert outcome.exit_code == 2, refused
        assert outcome.err.count("\n") == 1
        assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before, refused


def test_fewer_steps_than_were_made_are_refused(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    assert penstock_command(*arguments, "--out", "out", "--save-every", "8").exit_code == 0
    outcome = penstock_command(*arguments, "--out", "out", "--resume", "auto", "--steps", "2")
    assert outcome.exit_code == 2
    assert "has made 8 steps, more than --steps 2. Ask for 8 or more" in outcome.err
    assert "held-out loss" not in outcome.out


def test_a_run_of_epochs_is_as_long_as_its_course_is_now(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    place = arguments.index("--steps")
    without = arguments[:place] + arguments[place + 2 :]
    saving = penstock_command(*without, "--out", "out", "--save-every", "100", "--epochs", "0.1")
    assert saving.exit_code == 0, saving.err
    made = losses(tmp_path / "out")[-1][0]
    longer = penstock_command(*without, "--out", "out", "--resume", "auto", "--epochs", "0.15")
    assert longer.exit_code == 0, longer.err
    assert losses(tmp_path / "out")[-1][0] > made
    shorter = penstock_command(*without, "--out", "out", "--resume", "auto", "--epochs", "0.01")
    assert shorter.exit_code == 2
    assert f"has made {made} steps, more than the 1 of this run. Ask for {made} or more" in shorter.err


def test_a_run_that_goes_on_does_what_it_is_asked_for_now(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other learning rates, weight decay and betas hold, are said in a line, and so is the schedule of the new rate."""
    assert penstock_command(*arguments, "--out", "out", "--save-every", "4", "--keep", "9").exit_code == 0
    before = losses(tmp_path / "out")
    (tmp_path / "out" / "checkpoints" / "step-00000008" / MARKER).unlink()
    groups: list[list[tuple[Any, ...]]] = []
    step = penstock.Optimizer.step

    def spy(self: penstock.Optimizer) -> Any:
        groups.append([(group["lr"], group["weight_decay"], group["betas"]) for group in self.param_groups])
        return step(self)

    monkeypatch.setattr(penstock.Optimizer, "step", spy)
    asked = ["--lr", "0.02", "--weight-decay", "0.3", "--betas", "0.8,0.9"]
    outcome = penstock_command(*arguments, "--out", "out", "--resume", "auto", *asked)
    assert outcome.exit_code == 0, outcome.err
    said = (
        "goes on after step 4, with --lr 0.02 instead of 0.01, --weight-decay 0.3 instead of 0.1, --betas 0.8,0.9 inst"
    )
    assert said in outcome.out
    rest = losses(tmp_path / "out")[len(before) :]
    assert [lr for _, _, lr in rest] == pytest.approx([2 * lr for _, _, lr in before[4:]])
    assert [[lr for lr, _, _ in of_step] for of_step in groups] == [[lr, lr] for _, _, lr in rest]
    assert {tuple(rest) for of_step in groups for _, *rest in of_step} == {(0.3, (0.8, 0.9)), (0.0, (0.8, 0.9))}
    assert [loss for _, loss, _ in rest] != [loss for _, loss, _ in before[4:]]


def change_extra(folder: Path, values: dict[str, Any]) -> None:
    """Other values in what a run has kept, every checksum put right."""
    whole = json.loads((folder / MARKER).read_bytes())
    whole["content"]["extra"] |= values
    whole["checksum"] = checksum(to_bytes(whole["content"]))
    (folder / MARKER).write_bytes(to_bytes(whole))


HOSTILE: list[Any] = [
    float("inf"),
    float("nan"),
    -1,
    1.5,
    True,
    None,
    "3",
    [],
    {},
    10**400,
    1 << 62,
    {"!": "tuple", "items": []},
]


def test_what_a_checkpoint_says_of_its_run_is_checked(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    assert penstock_command(*arguments, "--out", "out", "--save-every", "8").exit_code == 0
    folder = tmp_path / "out" / "checkpoints" / "step-00000008"
    marker = (folder / MARKER).read_bytes()
    extra = json.loads(marker)["content"]["extra"]
    changes = [{"step": value} for value in HOSTILE]
    changes += [{name: value} for name in ("sequences", "data") for value in (float("inf"), -1, None, [])]
    changes += [
        {"data": extra["data"] | {"seed": value}} for value in (float("inf"), None, False, {"!": "bytes", "hex": "00"})
    ]
    changes += [{"best": value} for value in (None, 3, {}, extra["best"] | {"loss": "low"})]
    changes += [{"best": extra["best"] | {"step": value}} for value in (True, -1, 1.5, 1 << 60)]
    for change in changes:
        change_extra(folder, change)
        outcome = penstock_command(*arguments, "--out", "out", "--resume", "auto")
        assert outcome.exit_code == 2, change
        assert outcome.err.startswith("penstock: error: "), change
        assert outcome.err.count("\n") == 1, change
        assert len(outcome.err) < 600
        (folder / MARKER).write_bytes(marker)


def test_a_run_keeps_its_steps_where_there_were_more_ranks_before(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    """A checkpoint of two ranks, as far as it says: what one rank of it did is done twice, for as many sequences."""
    assert penstock_command(*arguments, "--out", "out", "--save-every", "4", "--steps", "4").exit_code == 0
    folder = tmp_path / "out" / "checkpoints" / "step-00000004"
    assert json.loads((folder / MARKER).read_bytes())["content"]["extra"]["per_step"] == 8
    change_extra(folder, {"per_step": 16, "world_size": 2})
    (tmp_path / "out" / "metrics.jsonl").unlink()
    more = penstock_command(*arguments, "--out", "out", "--resume", "auto", "--steps", "6", "--warmup", "1")
    assert more.exit_code == 0, more.err
    said = "after step 4, with 1 instead of 2 ranks (steps of 16 sequences: --batch-size 4 --accumulation 4)"
    assert said in more.out
    assert "steps of 16 sequences" in more.out
    # What is typed otherwise than before holds, and so does a size of all ranks.
    for typed in (["--accumulation", "1"], ["--batch-size", "2"], ["--global-batch", "4"]):
        command = [word for word in arguments if typed[0] != "--global-batch" or word != "--accumulation"]
        if typed[0] == "--global-batch":
            command.remove("2")
        other = penstock_command(*command, "--out", "out", "--resume", str(folder), "--steps", "5", *typed, "--dry-run")
        assert other.exit_code == 0, other.err
        assert "of 4 sequences" in other.out, (typed, other.out)


@pytest.mark.parametrize("per_step", HOSTILE)
def test_a_size_of_steps_that_cannot_be_is_passed_over(per_step: Any, tmp_path: Path) -> None:
    extra = {"per_step": per_step, "config": {"model": "tiny"}}
    found = SimpleNamespace(extra=extra)
    config = TrainConfig(out=tmp_path, resume="somewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "read_manifest", lambda path: found)
        patch.setattr(checkpoints, "resolve", lambda path: path)
        assert checkpoints.per_step_before(config) is None
        extra["per_step"] = 12
        assert checkpoints.per_step_before(config) == 12


def test_a_schedule_in_a_checkpoint_changes_nothing_of_ours(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path
) -> None:
    assert penstock_command(*arguments, "--out", "out", "--save-every", "4", "--keep", "9").exit_code == 0
    whole = losses(tmp_path / "out")
    folder = tmp_path / "out" / "checkpoints" / "step-00000004"
    change_extra(folder, {"scheduler": {"step": 1, "optimizer": 2, "get_last_lr": 3, "last_epoch": 10**9}})
    outcome = penstock_command(*arguments, "--out", "again", "--resume", str(folder))
    assert outcome.exit_code == 0, outcome.err
    assert losses(tmp_path / "again") == whole[4:]


@pytest.mark.thorough
def test_two_ranks_save_and_one_goes_on(arguments: list[str], tmp_path: Path) -> None:
    """What torchrun does when fewer machines are left: the same sequences in the same order, on one rank."""

    def run(ranks: int, batch: int, *rest: str) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, "-m", "penstock", *arguments, "--batch-size", str(batch), *rest]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    run(2, 2, "--out", "out", "--save-every", "4")
    whole = losses(tmp_path / "out")
    (tmp_path / "out" / "checkpoints" / "step-00000008" / "checkpoint.json").unlink()
    run(1, 4, "--out", "out", "--resume", "auto")
    again = losses(tmp_path / "out")[len(whole) :]
    assert [(step, lr) for step, _, lr in again] == [(step, lr) for step, _, lr in whole[4:]]
    for (_, loss, _), (_, wanted, _) in zip(again, whole[4:], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
