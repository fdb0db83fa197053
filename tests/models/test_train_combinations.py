"""Options of `penstock train` beside each other: they learn what the plain placement learns, or are refused."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import ConfigError
from tests.models.trained import Trained, data_of, model_of, placed_at, read, train
from tests.support import run_ranks, thorough

pytest.importorskip("peft")
pytest.importorskip("datasets")

ALL_ON_CPU = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
ALL_ON_NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme_path": "disk"}
SPLIT = {
    "params": {"device": 0.5, "cpu": 0.5},
    "grads": {"device": 0.5, "cpu": 0.5},
    "optimizer": {"device": 0.3, "cpu": 0.3, "nvme": 0.4},
    "nvme_path": "disk",
}
RECOMPUTED, CHUNKED = {"recompute": "on"}, {"chunked_loss": "on"}
BEST = {"eval_every": 1, "keep_best": True, "early_stop": 2, "save_every": 1, "schedule": "wsd"}
TRACKED = {"report_to": ("tensorboard",), "prompt": ("hi",), "sample_tokens": 4}
LORA, DROPPING = {"lora": "r=4,alpha=8"}, {"lora": "r=4,alpha=8,dropout=0.1"}
INT8 = {"lora": "r=4,alpha=8,base=int8"}


@dataclass(frozen=True)
class Row:
    """A run, and the same one otherwise.

    Attributes:
        model, data: kinds of them.
        learned: settings that both have.
        placed: settings that change no result.
        within: how far losses may be apart, relatively; 0 is bit by bit.
        releases: whether parameters are gathered for each use, as where the device is no cpu.
    """

    model: str
    data: str
    learned: dict[str, Any] = field(default_factory=dict)
    placed: dict[str, Any] = field(default_factory=dict)
    within: float = 0.0
    releases: bool = True

    def __str__(self) -> str:
        settings = {name: value for name, value in (self.learned | self.placed).items() if name != "nvme_path"}
        return " ".join([self.model, self.data, *(f"{name}={value}" for name, value in settings.items())])

    def settings(self, folder: Path) -> dict[str, Any]:
        """What both runs have."""
        made = {"model": model_of(self.model, folder), "data": data_of(self.data, folder)}
        return made | {"cache": str(folder / "cache")} | self.learned

    def others(self, folder: Path) -> dict[str, Any]:
        """What the other one has beside it."""
        disk = folder / "disk"
        disk.mkdir(exist_ok=True)
        return self.placed | ({"nvme_path": (str(disk),)} if "nvme_path" in self.placed else {})


BF16, FP16, PADDED, TWICE = {"precision": "bf16"}, {"precision": "fp16"}, {"packing": "off"}, {"accumulation": 2}
UNCLIPPED = {"max_grad_norm": None}
QUICK = [
    Row("instruct", "chat", {}, ALL_ON_CPU | {"activations": "cpu"}),
    Row("grows", "weighted", BF16, ALL_ON_NVME | RECOMPUTED),
    Row("tied", "text", FP16 | TWICE, SPLIT | {"stage": 2, "overlap": "forward"}),
    Row("gpt2", "pairs", PADDED, ALL_ON_CPU | RECOMPUTED | CHUNKED, within=1e-5),
    Row("instruct", "parquet", INT8 | BEST, ALL_ON_NVME | {"activations": "nvme"}),
    Row("grows", "chat", DROPPING | PADDED, SPLIT | RECOMPUTED | {"stage": 1}),
    Row("instruct", "chat", UNCLIPPED | {"optimizer_name": "adagrad"}, ALL_ON_CPU | {"overlap": "backward"}),
    Row("tiny", "text", {"optimizer_name": "lion", "state_dtype": "int8"} | TRACKED | BEST, {"stage": 0}),
]
THOROUGH = [
    Row("instruct", "chat", PADDED, ALL_ON_NVME),
    Row("grows", "chat", {}, {"optimizer": "device"}),
    Row("tied", "parquet", PADDED | TWICE, {"stage": 2, "overlap": "forward"}),
    Row("tied", "pairs", FP16 | {"state_dtype": "bf16"}, SPLIT | {"activations": "cpu"}),
    Row("instruct", "weighted", {}, ALL_ON_NVME | {"activations": "nvme"}, releases=False),
    Row("instruct", "chat", LORA | {"optimizer_name": "adagrad"}, ALL_ON_NVME),
    Row("instruct", "chat", INT8 | BF16, ALL_ON_NVME),
    Row("tied", "chat", INT8, CHUNKED | {"params": "cpu"}, within=1e-5),
    Row("grows", "chat", INT8 | {"pad_vocab_to": 64}, ALL_ON_CPU | RECOMPUTED),
    Row("gpt2", "text", LORA | FP16, {"params": "cpu"}),
    Row("instruct", "chat", {"truncation": "left", "seq_length": 32}, {"stage": 0, "optimizer": "device"}),
    Row("instruct", "text", {"truncation": "right", "seq_length": 32}, {"streamed_updates": 0.5}),
    *(
        Row("tied", "chat", {"optimizer_name": name}, SPLIT)
        for name in ("sgd", "lion", "rmsprop", "adamax", "nadam", "radam", "asgd", "rprop")
    ),
    Row("instruct", "chat", {"compile": True}, ALL_ON_NVME | RECOMPUTED | CHUNKED | {"activations": "cpu"}, 1e-5),
    Row("tied", "chat", INT8 | {"compile": True}, ALL_ON_CPU),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data, made once."""
    return tmp_path_factory.mktemp("combinations")


def assert_same(found: Trained, expected: Trained, within: float) -> None:
    assert len(expected.losses) >= 3
    if not within:
        assert found == expected
    assert found.losses == pytest.approx(expected.losses, rel=within)
    assert found.norms == pytest.approx(expected.norms, rel=10 * within)
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert one == pytest.approx(other, rel=within)


def ended_with(trained: Trained, settings: dict[str, Any]) -> float:
    """The held-out loss of the model that was saved: the last one, or the lowest after a step."""
    losses = [loss for step, loss in trained.evaluations if step]
    return min(losses) if settings.get("keep_best") else losses[-1]


def assert_saved(out: Path, expected: float, again: Path, settings: dict[str, Any]) -> None:
    """The saved model has the held-out loss that its run has told."""
    kept = {
        name: settings[name]
        for name in ("data", "seq_length", "packing", "precision", "truncation")
        if name in settings
    }
    measured = train(again, model=str(out), steps=1, cache=str(again / "tokens"), **kept)
    # What adapters make of an int8 base is rounded once more where it is saved in 16 bits.
    within = 5e-4 if settings.get("lora") and settings.get("precision") in ("bf16", "fp16") else 1e-4
    assert measured.evaluations[0][1] == pytest.approx(expected, abs=within)


@pytest.mark.parametrize("row", [*QUICK, *map(thorough, THOROUGH)], ids=str)
def test_what_is_learned_is_that_of_the_plain_placement(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    settings = row.settings(folder)
    plain = train(tmp_path / "plain", **settings)
    if row.releases:
        monkeypatch.setenv("PENSTOCK_DEBUG_RELEASE", "1")
    other = train(tmp_path / "other", **settings | row.others(folder))
    monkeypatch.delenv("PENSTOCK_DEBUG_RELEASE", raising=False)
    assert_same(other, plain, row.within)
    assert_saved(tmp_path / "other", ended_with(other, settings), tmp_path / "again", settings)


@pytest.mark.parametrize(
    "row",
    [
        Row("tied", "weighted", BEST | {"steps": 4}, ALL_ON_NVME | RECOMPUTED),
        thorough(Row("grows", "chat", INT8 | BF16 | {"steps": 4}, SPLIT)),
        thorough(Row("gpt2", "pairs", FP16 | {"steps": 4, "state_dtype": "int8"}, {"stage": 1} | ALL_ON_CPU)),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_placement_as_if_it_had_never_ended(folder: Path, tmp_path: Path, row: Row) -> None:
    settings = row.settings(folder) | {"save_every": 1, "keep": 9}
    whole = train(tmp_path / "whole", **settings)
    from_there = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    rest = train(tmp_path / "rest", **settings | row.others(folder), resume=from_there)
    assert rest.losses == whole.losses[2:]
    assert rest.norms == whole.norms[2:]
    assert [each for each in rest.evaluations if each[0] > 2] == [each for each in whole.evaluations if each[0] > 2]


REFUSED = [
    ("instruct", {"overlap": "backward"}, ("--overlap backward", "--max-grad-norm 1.0", "--max-grad-norm 0")),
    ("instruct", FP16 | UNCLIPPED | {"overlap": "backward"}, ("--overlap backward", "--precision fp16")),
    ("instruct", {"optimizer_name": "rprop", "state_dtype": "int8"}, ("--state-dtype int8", "rprop")),
    ("gpt2", INT8, ("--lora base=int8", "GPT2LMHeadModel")),
    ("instruct", {"params": "nvme"}, ("--params", "--nvme-path")),
    ("instruct", {"eval_every": 1, "eval_sequences": 0}, ("--eval-every", "--eval-sequences 0")),
    ("instruct", {"keep_best": True}, ("--keep-best", "--eval-every")),
    ("instruct", {"optimizer_name": "sgd", "betas": (0.9, 0.95)}, ("--betas", "sgd")),
    ("instruct", {"steps": 3, "epochs": 1.0}, ("--steps 3", "--epochs 1")),
]


@pytest.mark.parametrize(("model", "settings", "named"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_combined_is_refused_before_the_data_is_read(
    folder: Path, tmp_path: Path, model: str, settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    unreadable = tmp_path / "rows.jsonl"
    unreadable.write_text("no JSON\n")
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "out", model=model_of(model, folder), data=(str(unreadable),), **settings)
    said = str(caught.value)
    assert "rows.jsonl" not in said
    assert "\n" not in said
    for name in named:
        assert name in said


RANKS = [
    Row("tied", "weighted", TWICE, ALL_ON_CPU | {"stage": 1}),
    Row("grows", "pairs", INT8 | PADDED, ALL_ON_NVME | RECOMPUTED),
    Row("instruct", "chat", UNCLIPPED | {"optimizer_name": "adagrad"}, {"stage": 2, "overlap": "backward"}),
]
MORE_RANKS = [
    Row("instruct", "chat", {}, {"stage": 0}),
    Row("instruct", "chat", TWICE | UNCLIPPED, {"stage": 1, "overlap": "backward"}),
    Row("grows", "chat", LORA, SPLIT | {"stage": 2}),
    Row("instruct", "text", {"seq_length": 100, "eval_sequences": 3}, RECOMPUTED | CHUNKED),
    Row("gpt2", "text", BF16 | TWICE, SPLIT, within=1e-3),
]


def train_on_rank(rank: int, folder: Path, out: Path, rows: list[Row], port: int) -> None:
    """Train a sequence of runs on this rank, each in a process group of its own, as the command makes it."""
    dist.destroy_process_group()
    for number, row in enumerate(rows):
        with placed_at(rank, 2):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + number))
            train(out / f"two{number}", **row.settings(folder) | row.others(folder) | {"batch_size": 1})


@pytest.mark.parametrize("rows", [RANKS, thorough(MORE_RANKS)], ids=["some", "more"])
def test_two_ranks_learn_what_one_learns(folder: Path, tmp_path: Path, rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        train(tmp_path / f"one{number}", **row.settings(folder))
        row.others(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = min(free.getsockname()[1], 65000)
    run_ranks(train_on_rank, 2, folder, tmp_path, rows, port)
    for number, row in enumerate(rows):
        one, two = read(tmp_path / f"one{number}"), read(tmp_path / f"two{number}")
        assert_same(two, one, row.within or 1e-5)
