"""A trainer's run that ends in the middle of a save, or goes on at another number of ranks, and its trackers' runs."""

import errno
import inspect
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from penstock.checkpoint.save import Save
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations.transformers import resuming
from penstock.integrations.transformers.resuming import STATE, is_whole, keep_batch
from tests.integrations.trainers import assert_weights, history, our_trainer, rows, weights
from tests.lib.ranks import run_ranks

SAVED = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}


# A run that ends while it saves


def snapshots(monkeypatch: pytest.MonkeyPatch, out: Path, into: Path, name: str) -> list[Path]:
    """Copies of a trainer's folder: before and after each thing that a save writes, and in the middle of one.

    What the process sees of its files is what is there after it was killed.
    """
    taken: list[Path] = []

    def take(when: str, folder: Any) -> None:
        if f"/{name}" in str(folder):
            taken.append(into / f"{len(taken)}-{when}")
            shutil.copytree(out, taken[-1])

    def around(of: Any, what: str) -> None:
        original = getattr(of, what)

        def planted(*args: Any) -> Any:
            folder = args[0].folder if of is Save else args[0] if of is resuming else args[1]
            take(f"before-{what}", folder)
            returned = original(*args)
            if what == "_commit":  # after each other, the next one begins
                take("after-_commit", folder)
            return returned

        monkeypatch.setattr(of, what, planted)

    def halved(state: TrainerState, path: str) -> None:
        save_to_json(state, path)
        whole = Path(path).read_text()
        Path(path).write_text(whole[: len(whole) // 2])
        take("half-of-trainer-state", path)
        Path(path).write_text(whole)

    save_to_json = TrainerState.save_to_json
    monkeypatch.setattr(TrainerState, "save_to_json", halved)
    for of, what in (
        (Trainer, "_save_scaler"),
        (Trainer, "_save_rng_state"),
        (Save, "_write"),
        (Save, "_commit"),
        (resuming, "remove_old"),
    ):
        around(of, what)
    return taken


def test_a_run_killed_at_any_point_of_a_save_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, changes = tmp_path / "out", SAVED | {"save_total_limit": 1, "max_steps": 5}
    our_trainer(out, learning_rate=1e-4, **SAVED, max_steps=4).train()  # an earlier run, in the same folder
    assert (out / "checkpoint-4" / "model.safetensors").is_file()
    with monkeypatch.context() as patched:
        taken = snapshots(patched, out, tmp_path / "killed", "checkpoint-4")
        whole = our_trainer(out, **changes)
        whole.train()
    names = {path.name.partition("-")[2] for path in taken}
    assert {"half-of-trainer-state", "before-_commit", "after-_commit"} <= names
    for killed in taken:
        resumed = our_trainer(killed, seed=5, **changes)
        resumed.train(resume_from_checkpoint=True)
        assert history(resumed) == history(whole), killed.name
        if "commit" in killed.name:
            assert not list(killed.glob("checkpoint-4/model*"))  # those of an earlier run are others
        assert_weights(weights(resumed), weights(whole), relative=0)
        resumed.penstock.close()
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-5"]


def test_what_is_not_whole_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = our_trainer(tmp_path, **SAVED)
    whole.train()
    (tmp_path / "checkpoint-6" / STATE / "checkpoint.json").unlink()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{")
    last = get_last_checkpoint(str(tmp_path))
    for asked in (True, last):  # scripts ask transformers for the last one themselves
        resumed = our_trainer(tmp_path, seed=5, **SAVED | {"save_strategy": "no"})
        with caplog.at_level(logging.WARNING):
            resumed.train(resume_from_checkpoint=asked)
        said = f"checkpoint-6, checkpoint-4 was not written to its end. Going on from {tmp_path / 'checkpoint-2'}."
        assert said in caplog.messages
        caplog.clear()
        assert history(resumed) == history(whole)
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"no checkpoint that was written to its end, but checkpoint-6, check"):
        our_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_steps_are_made_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, seen, commit = threading.Event(), [], Save._commit

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                seen.append(is_whole(tmp_path / "checkpoint-2"))
                begun.set()

    def slow(save: Save, everyone: Any) -> str | None:
        assert begun.wait(60)
        return commit(save, everyone)

    monkeypatch.setattr(Save, "_commit", slow)
    ours = our_trainer(tmp_path, given={"callbacks": [Steps()]}, **SAVED)
    ours.train()
    assert seen == [False]
    assert all(is_whole(tmp_path / f"checkpoint-{step}") for step in (2, 4, 6))


@pytest.mark.parametrize(("failing", "left"), [(2, 2), (3, 4)])
def test_a_save_that_fails_is_told_at_the_next_one_or_at_the_end(
    failing: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = Save._write, iter(range(1, 100))

    def full(save: Save, *args: Any) -> Any:
        if next(count) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(save, *args)

    monkeypatch.setattr(Save, "_write", full)
    ours = our_trainer(tmp_path, **SAVED)
    with pytest.raises(CheckpointError, match="No space left"):
        ours.train()
    assert ours.state.global_step == 6
    ours.train(resume_from_checkpoint=True)
    assert ours.state.global_step == 6
    assert all(is_whole(folder) for folder in tmp_path.glob("checkpoint-*"))


def test_after_an_exception_the_checkpoint_that_was_being_saved_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ends(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    ours = our_trainer(tmp_path, given={"callbacks": [Ends()]}, **SAVED)
    with pytest.raises(KeyboardInterrupt):
        ours.train()
    ours.remove_callback(Ends)
    ours.train(resume_from_checkpoint=True)
    assert [log["step"] for log in ours.state.log_history if "loss" in log] == [1, 2, 3, 4, 5, 6]


def test_callbacks_that_copy_checkpoints_get_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            shutil.copytree(tmp_path / f"checkpoint-{state.global_step}", tmp_path / "copies" / str(state.global_step))

    our_trainer(tmp_path, given={"callbacks": [Copies()]}, **SAVED).train()
    assert all(is_whole(tmp_path / "copies" / str(step)) for step in (2, 4, 6))
    wandb: Any = type("WandbCallback", (TrainerCallback,), {"on_save": Copies.on_save})
    assert not resuming.may_copy(wandb())
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    assert resuming.may_copy(wandb())
    assert not resuming.may_copy(TrainerCallback())


# Another number of ranks


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows in order, without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows(64))


#: By name: settings of a run in steps of eight rows, three an epoch; data, where it is another one.
RUNS: dict[str, tuple[dict[str, Any], Callable[[], Any] | None]] = {
    "shuffled": ({}, None),
    "balanced": ({"train_sampling_strategy": "batch_rebalance"}, None),
    "batches are split": ({"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}, None),
    "without a length": ({}, Stream),
}
#: Where they are gone on with: within an epoch, at its end, and in the second one.
STEPS = {"shuffled": (3,), "balanced": (2,), "batches are split": (5,)}


def train_runs(rank: int, out: Path, ranks: int, resumes: bool) -> dict[tuple[str, int], Any]:
    """Train each of the runs from its beginning, or from each of some checkpoints of another number of ranks."""
    torch.set_num_threads(1)
    done = {}
    for name, (changes, data) in RUNS.items():
        for step in STEPS.get(name, (5,)) if resumes else (0,):
            asked: dict[str, Any] = {"max_steps": 6, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 1}
            if not step:
                asked |= {"gradient_accumulation_steps": 4 // ranks, "save_strategy": "steps", "save_steps": 1}
            if "split" in name:
                asked["gradient_accumulation_steps"] = 2
            given = {} if data is None else {"train_dataset": data()}
            ours = our_trainer(out / name, seed=7 * rank, given=given, **asked | changes)
            ours.train(resume_from_checkpoint=str(out / name / f"checkpoint-{step}") if step else None)
            done[name, step] = torch.tensor(history(ours)), weights(ours)
            ours.penstock.close()
    return done


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_makes_the_same_steps_at_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    def train(ranks: int, resumes: bool) -> dict[tuple[str, int], Any]:
        if ranks == 1:
            return train_runs(0, tmp_path, ranks, resumes)
        return run_ranks(train_runs, ranks, tmp_path, ranks, resumes, fresh=True)[0]

    whole = train(before, False)
    for (name, step), (log, trained) in train(after, True).items():
        wanted, values = whole[name, 0]
        torch.testing.assert_close(log, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, n=(name, step): f"{n}: {text}")
        assert_weights(trained, values)


def going_on(**changes: Any) -> Any:
    """What `keep_batch` asks of a trainer: 1 rank of 3 rows at once, one micro-batch."""
    config = SimpleNamespace(split_batches=False, dispatch_batches=None)
    args = {"accelerator_config": config, "world_size": 1, "gradient_accumulation_steps": 1, "ignore_data_skip": False}
    args |= {"auto_find_batch_size": False, "train_sampling_strategy": "random", "dataloader_drop_last": False}
    made = SimpleNamespace(args=SimpleNamespace(**args | changes), train_dataset=range(100), _train_batch_size=3)
    made.is_world_process_zero = lambda: True
    return made


BEFORE = {"ranks": 4, "rows": 3, "micro_batches": 2, "generation": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "gradient_accumulation_steps=8 in place of 1: the run had 24 rows a step, 4 ranks x 3 x 2 micro-batches"),
        ({"gradient_accumulation_steps": 8}, None),
        ({"world_size": 4}, None),
        ({"world_size": 3, "ignore_data_skip": True}, "Steps have other rows than before: the run had 24 rows a step"),
        ({"train_sampling_strategy": "group_by_length"}, "though as many: train_sampling_strategy='group_by_length'"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True drops others"),
    ],
)
def test_the_rows_of_a_step_are_kept_or_named(
    changes: Mapping[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ours = going_on(**changes)
    with caplog.at_level(logging.WARNING):
        keep_batch(ours, BEFORE)
    assert (said is None and not caplog.text) or (said is not None and said in caplog.text)
    if "world_size" not in changes:
        assert ours.args.gradient_accumulation_steps == 8


@pytest.mark.parametrize(
    ("ranks", "nearest"),
    [
        (3, "per_device_train_batch_size=2 at 3 ranks"),
        (5, "per_device_train_batch_size=3 at 4 ranks"),
        (16, "per_device_train_batch_size=2 at 12 ranks"),
    ],
)
def test_rows_of_a_step_that_cannot_be_kept_are_refused_with_the_nearest_that_can(ranks: int, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"which {ranks} ranks of 3 rows cannot make\. Use {nearest}; or set ignore_"
    ):
        keep_batch(going_on(world_size=ranks), BEFORE)


def test_prompts_that_are_answered_together_stay_as_many(caplog: pytest.LogCaptureFixture) -> None:
    ours = going_on(steps_per_generation=1, generation_batch_size=3)  # as GRPOConfig has them at one rank
    keep_batch(ours, BEFORE | {"generation": 48})
    assert (ours.args.steps_per_generation, ours.args.generation_batch_size) == (16, 48)
    assert ours.args.gradient_accumulation_steps == 8


# The runs of trackers


#: Libraries of trackers, with what callbacks of transformers ask of them. `opened` lists the runs that were. Others
#: read the environment by themselves: a callback of the name stands for them.
LIBRARIES = {
    "swanlab.py": """
import os
run, opened, config = None, [], {}
class Run:
    def __init__(self, id):
        self.id = id
def get_run():
    return run
def init(project=None, experiment_name=None, id=None, resume=None):
    global run
    opened.append(id)
    assert id is None or resume == "allow"
    run = Run(id or "new1")
def log(values, step=None):
    pass
""",
    "trackio/__init__.py": """
from types import SimpleNamespace
from contextvars import ContextVar
__version__ = "0.20.0"
opened = []
class Config(dict):
    def update(self, values, allow_val_change=None):
        super().update(values)
config = Config()
context_vars = SimpleNamespace(**{n: ContextVar(n, default=None) for n in (
    "current_run", "current_project", "current_space_id")})
def init(project, name=None, space_id=None, resume="never", private=None, bucket_id=None):
    opened.append(name)
    assert resume == "allow"
    context_vars.current_run.set(SimpleNamespace(name=name or "new1"))
def log(values):
    pass
def finish():
    pass
""",
}


def forget(name: str) -> None:
    for module in [known for known in sys.modules if known.partition(".")[0] == name]:
        del sys.modules[module]


def library(name: str, folder: Path, patch: pytest.MonkeyPatch) -> tuple[list[str | None], dict[str, Any]]:
    """A tracker's library as a new process finds it: the runs that it opens, and what a trainer is given for it."""
    forget(name)
    if name in ("swanlab", "trackio"):
        return import_module(name).opened, {"report_to": [name]}
    opened: list[str | None] = []
    variable, callback = f"{name.upper()}_RUN_ID", {"wandb": "WandbCallback", "mlflow": "MLflowCallback"}[name]
    assert "MLFLOW_MAX_LOG_PARAMS" in inspect.getsource(integration_utils.MLflowCallback)  # else it logs some anew

    def on_train_begin(self: Any, *_: Any, **__: Any) -> None:
        opened.append(os.environ.get(variable))
        run = SimpleNamespace(id=opened[-1] or "new1", info=SimpleNamespace(run_id=opened[-1] or "new1"))
        patch.setitem(sys.modules, name, SimpleNamespace(run=run, active_run=lambda: run))  # type: ignore[arg-type]
        assert opened[-1] in (None, "mine") or os.environ.get("WANDB_RESUME", os.environ.get("MLFLOW_MAX_LOG_PARAMS"))

    kind: Any = type(callback, (TrainerCallback,), {"on_train_begin": on_train_begin})
    return opened, {"given": {"callbacks": [kind()]}}


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_resumed_run_is_the_same_run_of_a_tracker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, text in LIBRARIES.items():
        path = tmp_path / "libraries" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "libraries")

    def train(out: str, resume: str | None) -> Any:
        opened, given = library(name, tmp_path, monkeypatch)  # each run is a process of its own
        ours = our_trainer(tmp_path / out, resume_from_checkpoint=resume, **SAVED, **given)
        environment = dict(os.environ)
        ours.train(resume_from_checkpoint=resume)
        assert os.environ == environment
        return opened

    checkpoint = str(tmp_path / "out" / "checkpoint-4")
    assert train("out", None) == [None]
    assert train("out", checkpoint) == ["new1"]
    assert train("another", checkpoint) == [None]  # it goes on from there, and is another run
    if name == "wandb":
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
        assert train("out", checkpoint) == ["mine"]
    forget(name)


def test_a_resumed_run_writes_into_the_same_folder_of_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    our_trainer(tmp_path / "before", report_to=["tensorboard"], **SAVED).train()
    (tmp_path / "before").rename(tmp_path / "moved")
    (folder,) = (tmp_path / "moved" / "runs").iterdir()
    monkeypatch.setattr("transformers.integrations.integration_utils.default_logdir", lambda: "runs/another")
    ours = our_trainer(tmp_path / "moved", report_to=["tensorboard"], **SAVED)
    ours.train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-4"))
    assert list((tmp_path / "moved" / "runs").iterdir()) == [folder]
    assert len(list(folder.glob("events.*"))) == 2
