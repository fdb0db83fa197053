"""Ranks, hosts and launchers that are killed or stopped: torchrun starts the run again, to the same weights."""

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tests.faults.launched import Job, job, parent_of, processes, until
from tests.faults.test_train_killed import SIZES, losses, settings, train_rank, weights
from tests.instruct import chat_file, conversations, instruct_folder
from tests.support import run_ranks, thorough

pytest.importorskip("peft")

STEPS = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and a run of two ranks to which nothing happens: its `run.yaml` is what the others run."""
    made = tmp_path_factory.mktemp("launched")
    instruct_folder(made / "model", **SIZES)
    chat_file(made / "chats.jsonl", conversations(20))
    chat_file(made / "pairs.jsonl", [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(40)])
    (made / "text.txt").write_text("".join(f"{n} sheep and {n * n} goats. " for n in range(40)))
    (made / "swap").mkdir()
    state: dict[str, Any] = {"optimizer": {"nvme": 1.0}, "nvme_path": (str(made / "swap"),)}
    whole = settings(made, made / "whole", batch_size=1, steps=STEPS, save_every=3, keep=2, **state)
    assert run_ranks(train_rank, 2, whole) == [True, True]
    return made


def command(folder: Path, out: Path, *options: str) -> list[str]:
    return ["-m", "penstock", "train", "--config", str(folder / "whole" / "run.yaml"), "--out", str(out), *options]


def wait_for_step(running: Job, step: int) -> None:
    until(lambda: running.step() >= step, running.said)
    assert running.step() < STEPS, "it is killed while it runs"


def same_end(folder: Path, out: Path) -> None:
    """Every step was made, and the weights are those of the run to which nothing happened, bit for bit."""
    assert losses(out) == losses(folder / "whole")
    assert weights(out) == weights(folder / "whole")
    assert list((folder / "swap").iterdir()) == [], "files of ranks that were killed are gone"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000093", "step-00000096"]


@pytest.mark.parametrize("seed", [0, *map(thorough, range(1, 4))])
def test_a_rank_that_is_killed_at_any_moment(folder: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with job(command(folder, tmp_path / "out"), tmp_path / "out") as running:
        running.start(2, "1", "--shutdown-timeout", "5")
        wait_for_step(running, draw.randrange(4, STEPS // 3))
        time.sleep(draw.random() / 10)
        os.kill(running.ranks_of(0)[draw.randrange(2)], signal.SIGKILL)
        assert running.ended(0) == 0, running.said
    same_end(folder, tmp_path / "out")
    assert re.search(r"goes on after step \d+\n", running.said)


@pytest.mark.thorough
def test_a_rank_that_is_stopped_is_waited_for_as_long_as_was_asked(folder: Path, tmp_path: Path) -> None:
    """Nothing tells the launcher: the other rank ends by itself, says who is missing, and all are started again."""
    with job(command(folder, tmp_path / "out", "--timeout-s", "6"), tmp_path / "out") as running:
        running.start(2, "1", "--shutdown-timeout", "3")
        wait_for_step(running, 10)
        os.kill(running.ranks_of(0)[1], signal.SIGSTOP)
        assert running.ended(0) == 0, running.said
    same_end(folder, tmp_path / "out")
    assert "Ranks wait for 6 s at most: --timeout-s." in running.said
    # It is stopped inside a step of the engine, or between two.
    assert re.search(r"rank \d says nothing: it has|Rank 0 of 2 waits between two steps for another", running.said)


@pytest.mark.thorough
@pytest.mark.parametrize("whole_host", [True, False], ids=["host", "its launcher alone"])
def test_a_host_that_is_gone_is_done_without(folder: Path, tmp_path: Path, whole_host: bool) -> None:
    """Steps have the same sequences on what is left, so losses and weights are the same but for the order of sums."""
    out = tmp_path / "out"
    with job(command(folder, out), out) as running:
        for _ in range(2):
            running.start(1, "1:2", "--shutdown-timeout", "5")
        wait_for_step(running, 10)
        (rank,) = running.ranks_of(1)
        os.kill(running.agents[1].pid, signal.SIGKILL)
        if whole_host:
            os.kill(rank, signal.SIGKILL)
        assert running.ended(0) == 0, running.said
    assert "1 instead of 2 ranks (steps of 4 sequences: --batch-size 1 --accumulation 4)" in running.said
    assert ("its launcher, process" in running.said) != whole_host
    expected = losses(folder / "whole")
    assert losses(out).keys() == expected.keys()
    assert losses(out) == pytest.approx(expected, rel=1e-4)
    found, wanted = load(weights(out)), load(weights(folder / "whole"))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.thorough
def test_a_launcher_that_is_asked_to_end_has_the_run_saved(folder: Path, tmp_path: Path) -> None:
    """SIGTERM, as of a scheduler; then the same command goes on."""
    out = tmp_path / "out"
    with job(command(folder, out), out) as running:
        running.start(2, "1")
        wait_for_step(running, 10)
        running.agents[0].send_signal(signal.SIGTERM)
        assert running.ended(0) == 1, "torchrun's own"
        saved = re.search(r"asked to end: saved step (\d+); go on with: torchrun ", running.said)
        assert saved, running.said
        running.start(2, "1")
        assert running.ended(1) == 0, running.said
    assert f"goes on after step {saved[1]}\n" in running.said
    same_end(folder, out)


def test_no_process_is_looked_for_that_is_not_there() -> None:
    """What the tests above count is found by its arguments."""
    assert processes("an argument of nobody") == {}
    assert parent_of(os.getpid()) == os.getppid()
