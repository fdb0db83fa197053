"""`penstock train` on two ranks that see a folder each under the name of `--out`: both end before they train."""

import json
import os
import sys
from pathlib import Path

from penstock.checkpoint import save
from tests.train.runs import run_ranks


def typed_on_host(rank: int, top: Path, words: list[str]) -> object:
    """The command in a folder of this rank's own; its exit status."""
    from penstock.cli import main

    save._PATIENCE_S = 0.2
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(top / f"host{rank}")
    said = os.open("said.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = words
    try:
        main()
    except SystemExit as end:
        return end.code


def test_every_rank_ends_with_one_line_before_data_are_read(made: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "the quick brown fox"}) + "\n" for _ in range(40)))
    words = ["penstock", "train", "--model", str(made / "plain"), "--data", str(data), "--out", "run"]
    words += ["--max_steps", "2", "--bf16", "false"]
    hosts = [tmp_path / f"host{rank}" for rank in range(2)]  # what is relative to it is another folder on each rank
    for host in hosts:
        host.mkdir()
    codes = run_ranks(typed_on_host, 2, tmp_path, words)
    for host, code in zip(hosts, codes, strict=True):
        said = (host / "said.log").read_text()
        assert code == 2, said
        assert "Traceback" not in said
        assert len([line for line in said.splitlines() if "is not one folder for all ranks" in line]) == 1, said
        assert "is not seen by rank 1 (" in said
        assert not (host / "run").exists()
