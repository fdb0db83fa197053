"""A run that is asked to end by a signal: before it has begun, in an evaluation, twice, on one rank of two."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.reader import checkpoints_in, read_manifest
from penstock.cli import main
from penstock.cli.training import interruption, run, session
from penstock.cli.training.data.feed import DataFeed
from penstock.cli.training.interruption import SIGNALS, Interruption, command_to_go_on
from penstock.cli.training.learning.best import Best
from penstock.cli.training.learning.evaluation import Evaluations, Measured
from penstock.cli.training.learning.loop import LoopStepper
from tests.support import run_ranks, thorough

RUN = ["--precision", "fp32", "--seq-length", "32", "--batch-size", "2", "--eval-sequences", "8", "--steps", "8"]
RUN += ["--log-every", "1", "--sample-tokens", "0", "--lr", "0.01", "--warmup", "2"]


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture
def arguments(model_folder: Path, text_folder: Path) -> list[str]:
    return ["train", "--model", str(model_folder), "--data", str(text_folder), *RUN]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Have signals that whoever started the tests ignores (nohup, a shell's background) be heard by the commands."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before, "the signals are the caller's again"


@pytest.mark.parametrize(
    ("typed", "environ", "again"),
    [
        (["/bin/penstock", "train"], {}, "penstock train --resume auto"),
        (["penstock", "train", "--resume", "a b", "--lr", "1"], {}, "penstock train --lr 1 --resume auto"),
        (["penstock", "train", "--resume=auto", "--out", "a b"], {}, "penstock train --out 'a b' --resume auto"),
        (["/x/penstock/__main__.py", "train"], {}, "python -m penstock train --resume auto"),
        (
            ["/x/penstock/__main__.py", "train"],
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --nproc-per-node 2 -m penstock train --resume auto",
        ),
        (
            ["/x/penstock/__main__.py", "train"],
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "torchrun ... -m penstock train --resume auto",
        ),
    ],
)
def test_the_command_that_goes_on(typed: list[str], environ: dict[str, str], again: str) -> None:
    assert command_to_go_on(typed, environ) == again


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_first_step_ends_the_command_and_harms_nothing(
    penstock_command: Callable[..., Any],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    def build(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal is raised before this")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("of an earlier run")
    monkeypatch.setattr(run, "build", build)
    outcome = penstock_command(*arguments, "--out", "out")
    assert outcome.exit_code == 128 + number
    said = f"penstock: ended by {number.name} before the first step. Nothing of an earlier run was changed.\n"
    assert outcome.err == said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metrics.jsonl"]
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "of an earlier run"


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_somebody_catches_ends_the_command_all_the_same() -> None:
    with Interruption() as asking:
        with pytest.raises(interruption.Ended):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(interruption.Ended) as ended:
            asking.defer()
    assert ended.value.status == 143


@pytest.mark.usefixtures("handlers")
def test_a_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as asking:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asking.asked
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handlers")
def test_children_that_were_forked_end_by_their_signals_and_hold_nothing_up() -> None:
    with Interruption() as asking:
        asking.defer()
        children = []
        for _ in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(60)
                os._exit(0)
        os.kill(children[0], signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(children[0], 0)[1]) == signal.SIGTERM
        assert not asking.asked
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert not any(thread.name == "penstock-signals" for thread in threading.enumerate())
    os.kill(children[1], signal.SIGKILL)
    os.waitpid(children[1], 0)


def held_out_that_is_broken_off(patch: pytest.MonkeyPatch, *, evaluation: int) -> None:
    """Have the second batch of an evaluation come with a signal."""
    held_out, count = DataFeed.held_out, [0]

    def asking(self: DataFeed) -> Iterator[Any]:
        count[0] += 1
        for number, batch in enumerate(held_out(self)):
            if number == 1 and count[0] == evaluation:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    patch.setattr(DataFeed, "held_out", asking)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("evaluation", "step"), [(3, 4), *(thorough(*row, id=str(row)) for row in ((1, 0), (2, 2), (5, 8)))]
)
def test_an_evaluation_is_broken_off_and_made_again(
    penstock_command: Callable[..., Any],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
    step: int,
) -> None:
    arguments = [*arguments, "--eval-every", "2", "--keep-best"]
    assert penstock_command(*arguments, "--out", "whole").exit_code == 0
    with monkeypatch.context() as asking:
        held_out_that_is_broken_off(asking, evaluation=evaluation)
        ended = penstock_command(*arguments, "--out", "parts", "--resume", "auto")
    assert ended.exit_code == 75, ended.err
    assert (f"asked to end: saved step {step};" if step else "asked to end before the first step;") in ended.out
    assert [line["step"] for line in events(tmp_path / "parts", "eval")] == list(range(0, step, 2))
    assert len(checkpoints_in(tmp_path / "parts" / "checkpoints")) == (1 if step else 0)

    resumed = penstock_command(*arguments, "--out", "parts", "--resume", "auto")
    assert resumed.exit_code == 0, resumed.err
    measured = [{line["step"]: line["loss"] for line in events(tmp_path / out, "eval")} for out in ("parts", "whole")]
    assert measured[0] == measured[1]
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.usefixtures("handlers")
def test_who_is_asked_at_the_very_end_has_a_model_and_no_sample(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = session.save_model

    def asking(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(*given)

    monkeypatch.setattr(session, "save_model", asking)
    outcome = penstock_command(*arguments, "--out", "out", "--sample-tokens", "4")
    assert outcome.exit_code == 0, outcome.err
    assert "sample:" not in outcome.out
    assert weights(tmp_path / "out")


@pytest.mark.usefixtures("handlers")
def test_who_is_asked_when_all_is_measured_has_a_model(
    penstock_command: Callable[..., Any], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Evaluations.measure

    def asking(self: Evaluations, step: int, best: Best | None = None) -> Measured | None:
        measured = measure(self, step, best)
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    monkeypatch.setattr(Evaluations, "measure", asking)
    outcome = penstock_command(*arguments, "--out", "out")
    assert outcome.exit_code == 0, outcome.err
    assert weights(tmp_path / "out")


# Two ranks


def train_rank(rank: int, arguments: list[str], folder: Path) -> None:
    """The command three times in this rank: whole, with a signal for the second rank alone, and to its end."""
    os.chdir(folder)
    run.joined = lambda ranks: nullcontext()  # the group is there
    asks = [False]
    make = LoopStepper.make

    def asking(self: LoopStepper, batches: Any, window: Any) -> Any:
        outcome = make(self, batches, window)
        count[0] += 1
        if asks[0] and rank == 1 and count[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return outcome

    def planned(self: Evaluations, step: int, best: Best | None = None) -> Measured | None:
        if measure(self, step) is None:
            return None
        loss = 1.0 + abs(step - 4)
        return Measured(loss, None if best is None else best.count(step, loss))

    measure, Evaluations.measure = Evaluations.measure, planned  # type: ignore[method-assign]
    LoopStepper.make = asking  # type: ignore[method-assign]
    statuses = []
    for out, asks[0] in (("whole", False), ("parts", True), ("parts", False)):
        count = [0]
        sys.argv = ["penstock", *arguments, "--out", out, "--resume", "auto"]
        try:
            main()
        except SystemExit as stop:
            statuses.append(stop.code)
    (folder / f"statuses{rank}").write_text(str(statuses))


def test_one_rank_is_asked_and_both_save_and_go_on_to_the_same_weights(arguments: list[str], tmp_path: Path) -> None:
    """The weights are those of the lowest loss, to which both ranks go back."""
    run_ranks(train_rank, 2, [*arguments, "--accumulation", "2", "--eval-every", "2", "--early-stop", "2"], tmp_path)
    assert [(tmp_path / f"statuses{rank}").read_text() for rank in range(2)] == ["[0, 75, 0]"] * 2
    assert [line["step"] for line in events(tmp_path / "parts", "step")] == list(range(1, 9))
    assert events(tmp_path / "parts", "step")[-1]["loss"] == events(tmp_path / "whole", "step")[-1]["loss"]
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    best = read_manifest(tmp_path / "parts" / "best").extra
    assert isinstance(best, dict)
    assert best["step"] == 4
    assert events(tmp_path / "parts", "end")[-1]["loss_after"] == 1.0


# Processes of their own

STUCK = """
import time
from pathlib import Path
from penstock.cli import main
from penstock.cli.training.learning.loop import LoopStepper

def make(self, batches, window):
    Path("out", "begun").touch()
    time.sleep(1000)

LoopStepper.make = make
main()
"""


def start(arguments: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    """Start a run whose first step takes for ever, and wait for it."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments, "--out", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "begun").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_the_second_ctrl_c_ends_at_once_and_the_echo_of_the_first_does_not(
    arguments: list[str], tmp_path: Path
) -> None:
    process = start(arguments, tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # a launcher's
    process.send_signal(signal.SIGINT)  # the terminal's, to the whole group
    time.sleep(interruption.AGAIN_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    said = "penstock: SIGINT: ends when what is being made is saved. Another Ctrl-C ends at once, unsaved.\n"
    assert err == said + "penstock: interrupted twice: ended at once\n"
    assert not checkpoints_in(tmp_path / "out" / "checkpoints")


@pytest.mark.thorough
def test_ctrl_c_under_torchrun_saves_and_the_same_command_goes_on(arguments: list[str], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "penstock", *arguments, "--steps", "300", "--out", "out", "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with Path(tmp_path, "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
        deadline = time.monotonic() + 200
        path = tmp_path / "out" / "metrics.jsonl"
        while not path.exists() or not events(tmp_path / "out", "step"):
            assert process.poll() is None, Path(tmp_path, "said").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) != 0
    step = len(events(tmp_path / "out", "step"))
    assert 0 < step < 300
    assert (
        f"asked to end: saved step {step}; go on with: torchrun --nproc-per-node 2"
        in Path(tmp_path, "said").read_text()
    )
    assert [folder.name for folder, _ in checkpoints_in(tmp_path / "out" / "checkpoints")] == [f"step-{step:08}"]


HUNG_UP = """
import sys, time
from pathlib import Path
from penstock.cli.training.interruption import Interruption
with Interruption() as interruption:
    interruption.defer()
    print("ready", flush=True)
    while not interruption.asked:
        time.sleep(0.01)
    print("asked", flush=True)
    Path(sys.argv[1]).write_text("saved")
"""


def test_a_terminal_that_is_closed_asks_a_run_to_end_and_not_without_saving(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", HUNG_UP, str(tmp_path / "saved")])
    assert b"ready" in os.read(terminal, 64)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "saved").read_text() == "saved"
