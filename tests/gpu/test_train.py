"""`penstock train` on the device: evaluations, checkpoints, a resume, adapters over an int8 base; as on the cpu."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.instruct import MARKED, chat_file, instruct_folder

for library in ("trl", "datasets", "peft", "yaml"):
    pytest.importorskip(library)

from tests.train.runs import COMMON, assert_same_weights, ours, refused, steps_of, written  # noqa: E402

MEASURED = {
    "assistant_only_loss": True,
    "max_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear"}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "packed, all state elsewhere": ({"packing": True}, {"params": "cpu", "grads": "cpu", "activations": "cpu"}),
    "int8": (LORA, {"base": "int8", "params": "cpu"}),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no word to TRL's makers; and the working folder is the test's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, and conversations to train on and to hold out."""
    folder = tmp_path_factory.mktemp("files")
    instruct_folder(folder / "model", template=MARKED, hidden_size=32, intermediate_size=48, num_attention_heads=2)
    (folder / "chats").mkdir()
    for split in ("train", "test"):
        chat_file(folder / "chats" / f"{split}.jsonl")
    return {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "chats")}


@pytest.mark.parametrize("name", ROWS)
def test_a_run_on_the_device_learns_what_one_on_the_cpu_learns(
    device: torch.device, uncompiled: None, files: dict[str, Any], tmp_path: Path, name: str
) -> None:
    if device.type == "cpu" and name != "int8":
        pytest.skip("where the device is the cpu, one row tells as much")
    changes, placement = ROWS[name]
    settings = COMMON | files | MEASURED | changes
    on_device = settings | {"use_cpu": device.type == "cpu"}
    found = ours(on_device, tmp_path / "device", penstock=placement)
    expected = ours(settings, tmp_path / "cpu", penstock=placement)
    assert len(found.losses) == 4
    for one, other in zip(steps_of(found.logs), steps_of(expected.logs), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    held_out = [[line["eval_loss"] for line in run.logs if "eval_loss" in line] for run in (found, expected)]
    assert len(held_out[0]) == 2
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)
    # Where it stopped, it goes on as if it had not.
    from_there = str(tmp_path / "device" / "checkpoint-2")
    rest = ours(on_device, tmp_path / "rest", "--resume_from_checkpoint", from_there, penstock=placement)
    assert steps_of(rest.logs) == [pytest.approx(step, rel=1e-6) for step in steps_of(found.logs)[2:]]
    assert_same_weights(rest.weights, found.weights, 1e-6)


def test_too_few_bytes_of_the_device_are_refused_before_the_data_is_read(
    device: torch.device, files: dict[str, Any], tmp_path: Path
) -> None:
    unreadable = tmp_path / "unreadable.jsonl"
    unreadable.write_text("no JSON\n")
    settings = COMMON | files | {"dataset_name": str(unreadable), "output_dir": str(tmp_path / "out")}
    file = written(settings | {"use_cpu": device.type == "cpu"}, tmp_path, "run")
    said = refused(["--config", str(file), "--max_device_bytes", "64KiB", "--optimizer", "device"])
    assert "65,536" in said
    assert not (tmp_path / "out").exists()
