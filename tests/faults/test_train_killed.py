"""A fine-tuning run that is killed or asked to end goes on from its last checkpoint, as if nothing had been.

It reads sources of three kinds by weight, packed, and none of them is at the end of an epoch where it ends.
"""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.reader import checkpoints_in
from penstock.cli.training import run as command
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.learning.checkpoints import Checkpoints
from penstock.cli.training.learning.loop import LoopStepper
from tests.instruct import chat_file, conversations, instruct_folder
from tests.support import disks, run_ranks, thorough

pytest.importorskip("peft")

STEPS = 8
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
NVME = {"params": {"nvme": 1.0}, "grads": {"cpu": 1.0}, "optimizer": {"nvme": 1.0}}
LORA = {"lora": "r=4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data of conversations, completions and text."""
    made = tmp_path_factory.mktemp("killed")
    instruct_folder(made / "model", **SIZES)
    chat_file(made / "chats.jsonl", conversations(20))
    chat_file(made / "pairs.jsonl", [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(40)])
    (made / "text.txt").write_text("".join(f"{n} sheep and {n * n} goats. " for n in range(40)))
    return made


def settings(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    """Half of what is read are conversations, of which an epoch is ten sequences."""
    sources = {"chats.jsonl": 0.5, "pairs.jsonl": 0.3, "text.txt": 0.2}
    given: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": tuple(f"{folder / name}:{weight}" for name, weight in sources.items()),
        "out": out,
        "precision": "fp32",
        "seq_length": 128,
        "batch_size": 2,
        "accumulation": 2,
        "lr": 1e-2,
        "steps": STEPS,
        "warmup": 2,
        "eval_sequences": 0,
        "sample_tokens": 0,
        "log_every": 1,
        "save_every": 2,
        "keep": 9,
        "resume": "auto",
        "nvme_path": (str(disks()[0]),),
    }
    return TrainConfig(**given | changes)


def losses(out: Path) -> dict[int, float]:
    """What is told of each step; of one that was made again, the last."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def train_rank(rank: int, config: TrainConfig, signals: dict[str, Any] | None = None) -> bool:
    """The command in this rank, in which a signal comes: before a step is made, or when a checkpoint was begun."""
    command.joined = lambda ranks: nullcontext()  # the group is there
    made = [0]
    make, save = LoopStepper.make, Checkpoints.save

    def making(self: LoopStepper, batches: Any, window: Any) -> Any:
        made[0] += 1
        if signals and signals["rank"] in (None, rank) and made[0] == signals.get("step"):
            os.kill(os.getpid(), signals["number"])
        return make(self, batches, window)

    def saving(self: Checkpoints, position: Any, **rest: Any) -> None:
        save(self, position, **rest)
        if signals and signals.get("saving") == position.step:
            os.kill(os.getpid(), signals["number"])

    LoopStepper.make, Checkpoints.save = making, saving  # type: ignore[method-assign]
    with Interruption(speaks=False) as interruption:
        return command.run(config, interruption)


def checkpoints(out: Path) -> list[str]:
    return [path.name for path, _ in checkpoints_in(out / "checkpoints")]


@pytest.mark.parametrize(
    ("when", "ranks", "changes"),
    [
        pytest.param({"step": 6}, 1, {}, id="between checkpoints"),
        pytest.param({"saving": 4}, 2, NVME | LORA, id="two ranks in a checkpoint, adapters on nvme"),
        thorough({"step": 6}, 2, {}, id="two ranks between checkpoints"),
        thorough({"saving": 4}, 1, NVME, id="in a checkpoint, on nvme"),
        thorough({"step": 6}, 1, LORA, id="between checkpoints, adapters"),
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights(
    folder: Path, tmp_path: Path, when: dict[str, int], ranks: int, changes: dict[str, Any]
) -> None:
    changes = changes | {"batch_size": 2 // ranks}
    whole = settings(folder, tmp_path / "whole", **changes)
    assert run_ranks(train_rank, ranks, whole) == [True] * ranks
    parts = settings(folder, tmp_path / "parts", **changes)
    kill = {"number": signal.SIGKILL, "rank": None} | when
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(train_rank, ranks, parts, kill)
    assert not (parts.out / "model.safetensors").exists()
    there = checkpoints(parts.out)
    assert "step-00000002" in there
    assert not {"step-00000006", "step-00000008"} & set(there)

    assert run_ranks(train_rank, ranks, parts) == [True] * ranks
    assert losses(parts.out) == losses(whole.out)
    assert len(losses(parts.out)) == STEPS
    assert weights(parts.out) == weights(whole.out)


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), *(thorough(*row, id=f"{row[0]} to {row[1]}") for row in ((2, 1), (1, 1), (2, 2)))]
)
def test_a_run_that_was_asked_to_end_goes_on_among_other_ranks(
    folder: Path, tmp_path: Path, before: int, after: int
) -> None:
    """The same sequences in each step, wherever it ended, and whichever rank was asked."""
    whole = settings(folder, tmp_path / "whole", save_every=0)
    assert run_ranks(train_rank, 1, whole) == [True]
    first = settings(folder, tmp_path / "parts", save_every=0, batch_size=2 // before)
    ask = {"number": signal.SIGINT, "rank": before - 1, "step": 3}
    assert run_ranks(train_rank, before, first, ask) == [False] * before
    assert checkpoints(first.out) == ["step-00000003"]
    second = settings(folder, tmp_path / "parts", save_every=0, batch_size=2 // after)
    assert run_ranks(train_rank, after, second) == [True] * after
    expected = losses(whole.out)
    assert losses(first.out) == pytest.approx(expected, rel=1e-6)
    assert max(expected.values()) - min(expected.values()) > 0.5, "steps differ, so another order would show"
