"""`penstock train --cp 2` on two ranks trains as one rank does with whole sequences, and goes on without it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.sharing import check_cp, check_model
from penstock.errors import ConfigError

RUN = ["--precision", "fp32", "--seq-length", "37", "--batch-size", "2", "--eval-sequences", "3", "--log-every", "1"]
RUN += ["--sample-tokens", "0", "--accumulation", "2", "--lr", "0.01", "--steps", "4"]
#: One process makes several runs, each with a port of its own: imports take longer than they do.
RANK = """
import json, os, sys
from penstock.cli import main
for port, arguments in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = port
    sys.argv = ["penstock", *arguments]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
"""


def test_two_ranks_that_share_sequences_train_as_one(
    penstock_command: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    # Rows of many lengths: packed ones share sequences, and padded ones have halves without a label.
    data.write_text("".join(json.dumps({"text": "the quick brown fox"[: 3 + 5 * n % 17]}) + "\n" for n in range(80)))
    common = ["train", "--model", str(model_folder), "--data", str(data), *RUN]
    packed = [*common, "--packing", "on", "--save-every", "2", "--keep", "9"]
    padded = [*common, "--packing", "off", "--recompute", "on"]
    two_ranks([*packed, "--cp", "2", "--out", "packed-2"], [*padded, "--cp", "2", "--out", "padded-2"], folder=tmp_path)
    for arguments, name in ((packed, "packed"), (padded, "padded")):
        alone = penstock_command(*arguments, "--out", f"{name}-1")
        assert alone.exit_code == 0, alone.err
        wanted, found = told(tmp_path / f"{name}-1"), told(tmp_path / f"{name}-2")
        assert [line["step"] for line in wanted["step"]] == [line["step"] for line in found["step"]] == [1, 2, 3, 4]
        for kind, keys in (("step", ("loss", "grad_norm", "lr")), ("eval", ("loss",))):
            for one, two in zip(wanted[kind], found[kind], strict=True):
                assert {key: two[key] for key in keys} == pytest.approx({key: one[key] for key in keys}, abs=1e-5)

    shutil.copytree(tmp_path / "packed-2/checkpoints/step-00000002", tmp_path / "two")
    resumed = penstock_command(*packed, "--out", "resumed", "--resume", "two")
    assert resumed.exit_code == 0, resumed.err
    assert "goes on after step 2" in resumed.out
    went_on, whole = told(tmp_path / "resumed")["step"], told(tmp_path / "packed-2")["step"]
    assert [line["step"] for line in went_on] == [3, 4]
    assert [line["loss"] for line in went_on] == pytest.approx([line["loss"] for line in whole[2:]], abs=1e-5)


def two_ranks(*runs: list[str], folder: Path) -> None:
    """Make runs on two ranks, one after the other."""
    with ExitStack() as sockets:
        free = [sockets.enter_context(socket.socket()) for _ in runs]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in free]
    script = json.dumps(list(zip(ports, runs, strict=True)))
    around = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        env = {**os.environ, **around, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("wb") as said:
            ranks.append(
                subprocess.Popen([sys.executable, "-c", RANK, script], env=env, cwd=folder, stdout=said, stderr=said)
            )
    try:
        codes = [each.wait(120) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)


def told(out: Path) -> dict[str, list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {kind: [line for line in lines if line["event"] == kind] for kind in ("step", "eval")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--cp 2 does not divide the 1 rank there are"),
        ({"plan": "auto"}, "--plan is for whole sequences"),
        ({"chunked_loss": "on"}, "--chunked-loss on is for whole sequences"),
        ({"compile": True}, "--compile is for whole sequences"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = TrainConfig(data=(str(tmp_path),), cp=2, **options)
    with pytest.raises(ConfigError, match=said):
        check_cp(config, 2 if options else 1)
    check_cp(TrainConfig(data=(str(tmp_path),), **options), 1)


@pytest.mark.parametrize(
    ("config", "supports", "said"),
    [
        ({}, True, "--cp 4: 2 attention heads cannot be shared by 4 ranks"),
        ({"num_attention_heads": 4}, False, "attention is its own"),
        ({"num_attention_heads": 4, "output_router_logits": True}, True, "its router"),
        ({"num_attention_heads": 4, "sliding_window": 8}, True, "a sliding window of 8"),
        ({"num_attention_heads": 4, "_attn_implementation": "flex_attention"}, True, "'flex_attention'"),
    ],
)
def test_models_whose_sequences_cannot_be_shared_are_refused(config: dict[str, Any], supports: bool, said: str) -> None:
    from types import SimpleNamespace

    known = SimpleNamespace(**{"num_attention_heads": 2, "_attn_implementation": "sdpa", **config})
    model: Any = SimpleNamespace(config=known, _supports_attention_backend=supports)
    with pytest.raises(ConfigError, match=said):
        check_model(model, 4)


def test_the_ranks_of_a_group_read_the_same_rows() -> None:
    import torch

    ranks = [Ranks(rank, 4, torch.device("cpu"), cp=2) for rank in range(4)]
    assert [(each.dp_rank, each.dp_world_size, each.counts_rows) for each in ranks] == [
        (0, 2, True),
        (0, 2, False),
        (1, 2, True),
        (1, 2, False),
    ]
