"""`run.yaml`: given to `--config` it is the same run, and it says where it was made."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.keys import values_in
from penstock.cli.options import options_of
from penstock.cli.training.about import about, git_state
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.recipe import recipe_for
from penstock.cli.training.runfile import RUN_NAME, resolved_by, write_run_file
from penstock.errors import ConfigError

from .test_surface import settings_of_runs

ODD: dict[str, Any] = {
    "model": "a folder: with # signs",
    "data": ("on", "1", "- x", "bad-\udcff", "é\n\t", "a.jsonl:0.7"),
    "max_grad_norm": None,
    "recompute": "on",
    "activations": "off",
    "precision": "fp16",
    "optimizer": {"device": 0.6, "cpu": 0.4},
    "betas": (0.8, 0.9),
    "lr": 2e-5,
    "peak_flops": 989e12,
    "warmup": 0.03,
    "streamed_updates": "auto",
    "device_bytes": 20 * 2**30,
    "compile": True,
    "prompt": ("null", "{x: 1}", "*a", "&a", "!!int 3", "true"),
    "report_to": ("wandb",),
}


@pytest.mark.parametrize("asked", [{}, ODD], ids=["defaults", "odd"])
def test_the_file_is_the_run(asked: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig(**asked, out=tmp_path)
    path = write_run_file(config, {}, world_size=2)
    assert path == tmp_path / RUN_NAME
    assert TrainConfig(**values_in(path, options_of(TrainConfig))) == config


def test_the_command_makes_the_run_again(
    penstock_command: Callable[..., Any], monkeypatch: Any, tmp_path: Path
) -> None:
    configs = settings_of_runs(monkeypatch)
    config = TrainConfig(model="m", epochs=2.0, global_batch=32, out=tmp_path)
    resolved = {"steps": 63, "lr": 2e-5, "seq_length": 512, "batch_size": 4, "warmup": 6.0, "precision": "bf16"}
    path = write_run_file(config, resolved, world_size=8)
    assert penstock_command("train", "--config", str(path)).exit_code == 0
    # Of what says the same twice, what the run has is written: steps, not epochs.
    assert configs == [TrainConfig(model="m", global_batch=32, out=tmp_path, **resolved)]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"steps": 9, "warmup": 1.0},
        {"epochs": 1.5, "warmup": 0.0},
        {"model": "m", "lora": "r=4", "accumulation": 3},
        {"model": "m", "global_batch": 64},
        {"model": "m", "global_batch": 64, "batch_size": 2, "accumulation": 16},
    ],
)
def test_the_file_of_a_course_makes_the_same_course(asked: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig(**asked, out=tmp_path)
    course = recipe_for(config, positions=512, world_size=2).over(config, 1000)
    path = write_run_file(config, resolved_by(config, course), world_size=2)
    again = TrainConfig(**values_in(path, options_of(TrainConfig)))
    assert None not in (again.lr, again.steps, again.seq_length, again.batch_size, again.warmup)
    # The data has grown, and the file is of the run as it was.
    assert recipe_for(again, positions=512, world_size=2).over(again, 7000) == replace(course, epoch_count=7000)
    if config.global_batch and not config.accumulation:
        assert recipe_for(again, positions=512, world_size=4).per_step == 64


def test_every_option_is_written_once_under_its_heading(tmp_path: Path) -> None:
    text = write_run_file(TrainConfig(out=tmp_path), {}, world_size=1).read_text()
    written = [line.partition(":")[0] for line in text.splitlines() if re.match(r"[a-z_]+:", line)]
    assert sorted(written) == sorted([*options_of(TrainConfig), "about"])
    assert [line for line in text.splitlines() if line.startswith("# ")][1:-1] == [
        "# Model",
        "# Data",
        "# Where state lives (tiers: device, cpu, nvme) and when it moves",
        "# Learning",
        "# Measures, reports and checkpoints",
    ]


def test_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["penstock", "train", "--data", "a b", "x\n\x1b[2J"])
    path = write_run_file(TrainConfig(out=tmp_path), {}, world_size=4, plan={"device": 12, "cpu": 34})
    said = yaml.safe_load(path.read_text())["about"]
    assert said["plan"] == {"device": 12, "cpu": 34}
    assert said["world_size"] == 4
    assert said["command"].startswith("penstock train --data 'a b' ")
    assert "\x1b" not in said["command"]
    assert {"python", "penstock", "torch", "transformers"} <= said["versions"].keys()
    assert said["machine"].keys() >= {"cpu", "cores", "memory_bytes", "system"}
    assert said["machine"]["cores"] >= 1
    assert "git" not in said
    assert said["date"][4] == "-"


def git(folder: Path, *words: str) -> str:
    environment = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    names = ["-c", "user.name=n", "-c", "user.email=e"]
    done = subprocess.run(
        ["git", *names, *words], cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_git_state(repository: Path) -> None:
    """As git says it: of a loose and a packed name, of no name, below the folder, and in a tree of its own."""
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "deep").mkdir()
    git(repository, "worktree", "add", "-q", "-b", "other", str(repository / "tree"))
    git(repository / "tree", "commit", "-q", "--allow-empty", "-m", "two")
    other = git(repository / "tree", "rev-parse", "HEAD")
    for words in (["status"], ["pack-refs", "--all"], ["checkout", "-q", "--detach"]):
        git(repository, *words)
        assert git_state(repository) == git_state(repository / "deep") == {"commit": commit}
        assert git_state(repository / "tree") == {"commit": other} != {"commit": commit}


@pytest.mark.parametrize(
    "head", ["", "ref: ", "ref: refs/heads/none", "ref: ../../secret", "ref: /etc/passwd", "\0", "x" * 5000, "0" * 41]
)
def test_what_is_no_name_of_a_commit_is_none(repository: Path, head: str) -> None:
    (repository / "secret").write_text("0" * 40)
    (repository / ".git" / "HEAD").write_text(head)
    assert git_state(repository) == {}
    (repository / ".git" / "HEAD").unlink()
    os.mkfifo(repository / ".git" / "HEAD")
    assert git_state(repository) == {}


def test_git_runs_nothing_of_the_folder_and_shows_no_remote(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = repository / "script"
    script.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    script.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(script))
    git(repository, "config", "core.pager", str(script))
    (repository / ".git" / "hooks" / "post-index-change").write_text(script.read_text())
    (repository / ".git" / "hooks" / "post-index-change").chmod(0o755)
    git(repository, "-c", "core.fsmonitor=false", "remote", "add", "origin", "https://name:secret@host/x")
    (repository / "ran").unlink(missing_ok=True)
    monkeypatch.chdir(repository)
    (repository / ".gitattributes").write_text("file filter=planted\n")
    git(repository, "config", "filter.planted.clean", str(script))
    (repository / "file").write_text("two")  # which git status would clean, to tell whether it differs
    assert git_state(repository).keys() == {"commit"}
    assert "secret" not in str(about(world_size=1))
    assert not (repository / "ran").exists()


def test_a_repository_without_a_commit_has_no_state(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {}


def test_a_file_that_was_there_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run_file(TrainConfig(out=tmp_path, seed=1), {}, world_size=1)
    was = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(
        ConfigError,
        match=r"run.yaml cannot be written: No space left on device\. Free space there, or use another --out\.",
    ):
        write_run_file(TrainConfig(out=tmp_path, seed=2), {}, world_size=1)
    assert path.read_bytes() == was
    assert [file.name for file in tmp_path.iterdir()] == [RUN_NAME]
    monkeypatch.undo()
    write_run_file(TrainConfig(out=tmp_path, seed=2), {}, world_size=1)
    assert yaml.safe_load(path.read_text())["seed"] == 2


def test_a_folder_that_is_gone_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "git" not in about(world_size=1)
