"""`penstock export`: what is typed reaches the library, and comes out."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import penstock


def saved(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(folder)
    return {name: optimizer.full_param(p) for name, p in model.named_parameters()}


def test_export(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    masters = saved(tmp_path / "run" / "step-1")
    outcome = penstock_command("export", "run/latest", "out", "--dtype", "fp32")
    assert (outcome.exit_code, outcome.out) == (0, "out\n")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], master) for name, master in masters.items())


def test_two_processes_divide_the_files(tmp_path: Path) -> None:
    masters = saved(tmp_path / "step")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    words = [sys.executable, "-m", "penstock", "export", "step", "out", "--dtype", "fp32", "--max-shard-bytes", "300B"]
    ranks = [
        subprocess.Popen(words, env=common | {"RANK": str(rank)}, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert ([rank.returncode for rank in ranks], said) == ([0, 0], ["out\n", ""])
    files = list((tmp_path / "out").glob("model-0000*-of-00002.safetensors"))
    assert len(files) == 2
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], master) for name, master in masters.items())


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_launcher_that_says_nonsense(
    penstock_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    saved(tmp_path / "step")
    for value in ("", "x", "-1", "1.5", str(10**30)):
        monkeypatch.setenv(name, value)
        outcome = penstock_command("export", "step", "out")
        assert outcome.exit_code == 2
        assert f"The launcher's {name}=" in outcome.err
        assert outcome.err.count("\n") == 1
