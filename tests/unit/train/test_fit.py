"""What does not fit, or cannot be, is refused before data is read; a dry run tells what a run takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, MemoryBudgetError, PenstockError
from penstock.train import fit
from penstock.train import run as runs

REFUSED: dict[str, tuple[list[str], type[PenstockError], str]] = {
    "the host": (["--max_host_bytes", "10kB"], MemoryBudgetError, r"336,176 too few"),
    "an optimizer without a rule": (["--optim", "adafactor"], ConfigError, "optim='adafactor'"),
    "offloading of TRL's": (["--activation_offloading"], ConfigError, "activations='cpu'"),
    "weights of bitsandbytes": (["--load_in_4bit", "--use_peft"], ConfigError, "--base int8"),
    "a quantised model without adapters": (["--base", "int8"], ConfigError, "--use_peft"),
    "the nvme tier without a folder": (["--optimizer", "nvme"], ConfigError, "nvme_path"),
    "activations on nvme without a folder": (["--activations", "nvme"], ConfigError, "nvme_path"),
    "a stage that there is not": (["--stage", "4"], ConfigError, "stage"),
    "no copy": (["--dp_replicate", "0"], ConfigError, "--dp_replicate 0"),
    "copies that do not divide the ranks": (["--dp_replicate", "2"], ConfigError, "does not divide the 1 ranks"),
    "targets that there are not": (["--use_peft", "--lora_target_modules", "nope"], ConfigError, "peft cannot adapt"),
    "an attention that there is not": (["--attn_implementation", "nope"], ConfigError, "--attn_implementation nope"),
    "a plan that there is not": (["--plan", "nope.json"], ConfigError, "nope.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_data_is_read(
    name: str, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(runs, "read_data", read)
    words, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        train(*words)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_for_checkpoints_is_refused(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_space", lambda folder: (folder, 1 << 20))
    with pytest.raises(MemoryBudgetError, match=r"1,048,576 bytes free, and 4 checkpoints with the model need 1,\d+,"):
        train("--save_total_limit", 3)


@pytest.mark.parametrize("placement", [[], ["--placement", "auto"], ["--use_peft", "--base", "int8"]])
def test_a_dry_run_tells_what_a_run_takes_and_makes_nothing(
    placement: list[str], train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--dry_run", *placement) == 0
    told = capsys.readouterr()
    assert "exp_avg" in told.out
    assert "a checkpoint" in told.out
    assert "checkpoints and model" in told.out
    assert ("bound by" in told.out) is ("auto" in placement)
    assert "nothing is wrong with this run" in told.err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_dry_run_of_what_does_not_fit_tells_both(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MemoryBudgetError):
        train("--dry_run", "--max_host_bytes", "10kB")
    assert "exp_avg" in capsys.readouterr().out


def test_a_run_that_is_planned_trains_as_the_plan_says(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--placement", "auto", steps=2) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
