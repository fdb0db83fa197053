"""`penstock train` on two ranks that see a folder each under the name of `--out`: both end before they train."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

RANK = """
from penstock.checkpoint import save
save._PATIENCE_S = 0.2
from penstock.cli import main
main()
"""


def test_every_rank_ends_with_one_line_before_data_are_read(made: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "the quick brown fox"}) + "\n" for _ in range(40)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    arguments = ["train", "--model", str(made / "plain"), "--data", str(data), "--out", "run", "--max_steps", "2"]
    arguments += ["--bf16", "false"]
    ranks = []
    for rank in range(2):
        host = tmp_path / f"host{rank}"  # what is relative to it is another folder on each rank
        host.mkdir()
        env = {**os.environ, **around, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        env["OMP_NUM_THREADS"] = "1"
        with (host / "said.log").open("wb") as said:
            command = [sys.executable, "-c", RANK, *arguments]
            ranks.append(subprocess.Popen(command, env=env, cwd=host, stdout=said, stderr=said))
    try:
        codes = [each.wait(100) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    for rank in range(2):
        host = tmp_path / f"host{rank}"
        said = (host / "said.log").read_text()
        assert codes[rank] == 2, said
        assert "Traceback" not in said
        assert len([line for line in said.splitlines() if "is not one folder for all ranks" in line]) == 1, said
        assert "is not seen by rank 1 (" in said
        assert not (host / "run").exists()
