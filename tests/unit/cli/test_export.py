"""`penstock export`: what is typed reaches the library, and comes out."""

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import penstock
from penstock.cli import main
from tests.lib.ranks import run_ranks


def saved(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(folder)
    return {name: optimizer.full_param(p) for name, p in model.named_parameters()}


def export_on(rank: int, folder: Path, port: int) -> str:
    """What a process of a launcher prints, of the command in it."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.chdir(folder)
    words = ["penstock", "export", "step", "out", "--dtype", "fp32", "--max-shard-bytes", "300B"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        patch.setattr("sys.argv", words)
        main()
    return said.getvalue()


def test_two_processes_divide_the_files(tmp_path: Path) -> None:
    masters = saved(tmp_path / "step")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(export_on, 2, tmp_path, store.port, fresh=True) == ["out\n", ""]
    files = list((tmp_path / "out").glob("model-0000*-of-00002.safetensors"))
    assert len(files) == 2
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], master) for name, master in masters.items())
