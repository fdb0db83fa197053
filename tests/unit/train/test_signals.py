"""Signals that ask a run to end: before training, while it trains, twice."""

import os
import pty
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.train import signals
from penstock.train.signals import Ended, Interruption, command_to_go_on


def ended_by(number: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # below nohup, whose SIGHUP a run goes on ignoring
        signal.signal(number, signal.SIG_DFL)
    with Interruption():
        os.kill(os.getpid(), number)
        signal.pause()


def test_a_signal_before_training_ends_the_command() -> None:
    for number in signals.SIGNALS:
        with pytest.raises(Ended, match="before the first step") as caught:
            ended_by(number)
        assert caught.value.status == 128 + number


def test_a_signal_while_it_trains_is_noted() -> None:
    with Interruption() as interruption:
        interruption.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher's, of the same moment
        assert interruption.number == signal.SIGTERM


def test_a_signal_that_was_caught_by_another_library_ends_the_run_when_it_would_begin() -> None:
    with Interruption() as interruption:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        with pytest.raises(Ended):
            interruption.defer()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, status = threading.Event(), []
    monkeypatch.setattr(signals, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(signals.os, "_exit", lambda code: (status.append(code), ended.set()))
    with Interruption() as interruption:
        interruption.defer()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert ended.wait(60)
    assert status[0] == 128 + number
    assert "ends after this step" in capfd.readouterr().err


HUNG_UP = """
import sys, time
from pathlib import Path
from penstock.train.signals import Interruption
with Interruption() as interruption:
    interruption.defer()
    print("ready", flush=True)
    while not interruption.number:
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


def test_an_ignored_signal_stays_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            assert interruption.number == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_that_is_not_the_main_one_takes_no_signals() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def look() -> None:
        with Interruption():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.parametrize(
    ("words", "environ", "command"),
    [
        (["--out", "my runs"], {}, "penstock train --out 'my runs'"),
        (["--resume-from-checkpoint", "false", "--out", "a"], {}, "penstock train --out a"),
        (["--resume_from_checkpoint=b", "--out", "a"], {}, "penstock train --out a"),
        (
            ["--out", "a"],
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            "torchrun --nproc-per-node 4 -m penstock train --out a",
        ),
        (["--out", "a"], {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "torchrun ... -m penstock train --out a"),
    ],
)
def test_the_command_that_goes_on(words: list[str], environ: dict[str, str], command: str) -> None:
    assert command_to_go_on(words, environ) == command
