"""`penstock inspect`: what it says is what was saved, and it finds every damaged tile."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.checkpoint.reader import Checkpoint
from tests.lib.memory import disks
from tests.lib.models import stack


def save(folder: Path, steps: int = 2, extra: Any = None, **rest: Any) -> None:
    model = stack(layers=4, width=64)
    model[-1].requires_grad_(False)
    model.register_buffer("seen", torch.zeros(3))
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.5}])
    optimizer = penstock.prepare(model, adamw, options=penstock.Options(tile_bytes=4096), **rest)
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(folder, extra=extra)
    optimizer.close()


def damage(folder: Path, numbers: list[int]) -> list[str]:
    """Flip a bit in some tiles; what they are called."""
    keys = list(Checkpoint.open(folder).tiles())
    names = []
    data = bytearray(keys[0].file.read_bytes())
    for number in numbers:
        key = keys[number]
        record = key.unit.records(key.number)[-1]
        data[record.offset] ^= 16
        names.append(f"{record.storage.name} of unit '{key.unit.name}', tile {key.number}")
    keys[0].file.write_bytes(data)
    return names


def test_what_is_said_is_what_was_saved(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    placement = penstock.Placement(optimizer={"cpu": 0.5, "nvme": 0.5}, nvme_path=disks())
    extra = {"step": 7, "note": "x" * 1000, "scheduler": {"rates": (1, 2.5)}, "seen": torch.zeros(3, 4), "raw": b"ab"}
    save(tmp_path / "run" / "step-2", extra=extra, placement=placement)
    outcome = penstock_command("inspect", "run/latest", "--json")
    assert outcome.exit_code == 0
    found = json.loads(outcome.out)
    assert found["path"] == "run/step-2"
    assert found["world_size"] == 1
    assert found["model"] == "Sequential"
    assert found["versions"].keys() == {"penstock", "torch"}
    assert found["steps"] == {"least": 2, "greatest": 2}
    linear = 64 * 64 + 64
    assert found["parameters"] == {
        "count": 8, "trained": 6, "numel": 4 * linear, "trained_numel": 3 * linear, "left_out_numel": 0,
        "divided": 0,
    }  # fmt: skip
    assert found["optimizer"]["states"] == {"exp_avg": "float32", "exp_avg_sq": "float32"}
    assert [(g["parameters"], g["options"]["lr"]) for g in found["optimizer"]["groups"]] == [(2, 1e-3), (4, 0.5)]
    kinds = {(row["kind"], row["dtype"]): row["bytes"] for row in found["kinds"]}
    padded = 64 * 64 + 256  # of a linear layer: parameters begin at multiples of 256
    assert kinds == {
        ("param", "bfloat16"): 4 * padded * 2,
        ("master", "int16"): 3 * padded * 2,
        ("exp_avg", "float32"): 3 * padded * 4,
        ("exp_avg_sq", "float32"): 3 * padded * 4,
    }
    tiers = {(row["home"], row["tier"]): row["bytes"] for row in found["tiers"]}
    assert tiers.keys() == {("param", "device"), *((h, t) for h in ("master", "optimizer") for t in ("cpu", "nvme"))}
    assert tiers["optimizer", "cpu"] + tiers["optimizer", "nvme"] == 3 * padded * 8
    assert found["buffers"] == 1
    assert found["extra"]["step"] == 7
    assert found["extra"]["note"] == "x" * 120 + "..."
    assert found["extra"]["scheduler"] == {"rates": [1, 2.5]}
    assert found["extra"]["seen"] == "tensor float32 [3, 4]"
    assert found["extra"]["raw"] == "2 bytes"
    files = {file.name: file.stat().st_size for file in (tmp_path / "run" / "step-2").iterdir()}
    assert {row["name"]: row["bytes"] for row in found["files"]} == files
    assert found["bytes"] == sum(files.values())


def test_people_see_the_same(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    save(tmp_path / "step", extra={"[bold]note": "[red]as it is"})
    outcome = penstock_command("inspect", "step")
    assert outcome.exit_code == 0
    summary = json.loads(penstock_command("inspect", "step", "--json").out)
    words = outcome.out.split()
    for file in summary["files"]:
        assert file["name"] in words
        assert f"{file['bytes']:,}" in words
    for row in summary["kinds"]:
        assert [row["kind"], row["dtype"], f"{row['bytes']:,}"] in [line.split() for line in outcome.out.splitlines()]
    assert f"{summary['parameters']['numel']:,} in 8 tensors" in outcome.out
    assert "[bold]note  [red]as it is" in outcome.out
    outcome = penstock_command("inspect", "step", "--verify")
    assert (outcome.exit_code, outcome.out.splitlines()[-1]) == (0, "Every tile is as it was written.")


def test_every_damaged_tile_is_named(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    save(tmp_path / "step")
    names = damage(tmp_path / "step", [0, 2, 5, -1])
    assert penstock_command("inspect", "step").exit_code == 0
    outcome = penstock_command("inspect", "step", "--verify")
    assert outcome.exit_code == 1
    assert outcome.out.splitlines()[-1] == "4 damaged"
    outcome = penstock_command("inspect", "step", "--verify", "--json")
    assert outcome.exit_code == 1
    said = json.loads(outcome.out)["damaged"]
    assert len(said) == len(names)
    for name, error in zip(names, said, strict=True):
        assert name in error
