"""`penstock train --cp 2` on two ranks trains as one rank does with whole sequences, and goes on without it."""

import json
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.loop import Window
from penstock.cli.training.learning.sharing import check_mesh, check_model
from penstock.errors import ConfigError
from tests.support import PRELOADED, run_ranks

RUN = ["--precision", "fp32", "--seq-length", "37", "--batch-size", "2", "--eval-sequences", "3", "--log-every", "1"]
RUN += ["--sample-tokens", "0", "--lr", "0.01", "--steps", "4"]


def test_two_ranks_that_share_sequences_train_as_one(
    penstock_command: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    # Rows of many lengths: packed ones share sequences, and padded ones have halves without a label.
    data.write_text("".join(json.dumps({"text": "the quick brown fox"[: 3 + 5 * n % 17]}) + "\n" for n in range(80)))
    common = ["train", "--model", str(model_folder), "--data", str(data), *RUN, "--accumulation", "2"]
    packed = [*common, "--packing", "on", "--save-every", "2", "--keep", "9"]
    padded = [*common, "--packing", "off", "--recompute", "on", "--chunked-loss", "off"]
    shared = [*padded[:-1], "on", "--cp", "2", "--out", "padded-2"]
    for arguments in ([*packed, "--out", "packed-1"], [*padded, "--out", "padded-1"]):
        alone = penstock_command(*arguments)
        assert alone.exit_code == 0, alone.err
    second = "checkpoints/step-00000002"
    several_ranks(
        2,
        [*packed, "--cp", "2", "--out", "packed-2"],
        shared,  # without whole logits, against whole ones
        [*packed, "--out", "from-cp", "--resume", f"packed-2/{second}"],  # each with rows of its own
        [*packed, "--cp", "2", "--out", "to-cp", "--resume", f"packed-1/{second}"],
        folder=tmp_path,
    )
    for name in ("packed", "padded"):
        wanted, found = told(tmp_path / f"{name}-1"), told(tmp_path / f"{name}-2")
        assert [line["step"] for line in wanted["step"]] == [line["step"] for line in found["step"]] == [1, 2, 3, 4]
        assert_same(wanted, found)
        assert wanted["end"][0]["token_count"] == found["end"][0]["token_count"] > 100  # each token is seen once

    resumed = penstock_command(*packed, "--out", "alone", "--resume", f"packed-2/{second}")
    assert resumed.exit_code == 0, resumed.err
    assert "goes on after step 2" in resumed.out
    whole = told(tmp_path / "packed-1")
    for name in ("alone", "from-cp", "to-cp"):
        went_on = told(tmp_path / name)
        assert [line["step"] for line in went_on["step"]] == [3, 4]
        assert_same({"step": whole["step"][2:], "eval": whole["eval"][-1:]}, went_on | {"eval": went_on["eval"][-1:]})
    said = "with 2 instead of 1 data-parallel groups (steps of 4 sequences: --batch-size 2 --accumulation 1)"
    assert said in (tmp_path / "rank0.log").read_text()


def assert_same(
    wanted: dict[str, list[dict[str, Any]]], found: dict[str, list[dict[str, Any]]], *, close: float = 1e-5
) -> None:
    """Compare the lines of the kinds that are wanted."""
    for kind, keys in (("step", ("loss", "grad_norm", "lr")), ("eval", ("loss",))):
        for one, two in zip(wanted.get(kind, []), found[kind] if kind in wanted else [], strict=True):
            assert {key: two[key] for key in keys} == pytest.approx({key: one[key] for key in keys}, abs=close)


def several_ranks(world_size: int, *runs: list[str], folder: Path) -> None:
    """Make runs on so many ranks, one after the other: imports take longer than they do."""
    with ExitStack() as sockets:
        free = [sockets.enter_context(socket.socket()) for _ in runs]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in free]
    around = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        environ = around | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        made = context.Process(target=commands, args=(list(zip(ports, runs, strict=True)), environ, folder, log))
        made.start()
        ranks.append(made)
    try:
        for each in ranks:
            each.join(120)
    finally:
        for each in ranks:
            each.kill()
    assert [each.exitcode for each in ranks] == [0] * world_size, "\n".join(log.read_text() for log in logs)


def commands(runs: list[tuple[str, list[str]]], environ: dict[str, str], folder: Path, log: Path) -> None:
    """Make the runs of a rank, each with a port of its own, in a process of its own."""
    import torch

    from penstock.cli import main

    with log.open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.chdir(folder)
    os.environ.update(environ)
    torch.set_num_threads(1)
    for port, arguments in runs:
        os.environ["MASTER_PORT"] = port
        sys.argv = ["penstock", *arguments]
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise


def told(out: Path) -> dict[str, list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {kind: [line for line in lines if line["event"] == kind] for kind in ("step", "eval", "end")}


@pytest.mark.parametrize(
    ("options", "world_size", "said"),
    [
        (
            {"cp": 2},
            1,
            "--cp 2 does not divide the 1 rank there are: mesh (dp_replicate 1 x dp_shard 1/2 x cp 2). Start a "
            "multiple of 2 with torchrun, or use sizes whose product divides 1.",
        ),
        ({"cp": 2, "plan": "auto"}, 2, "--plan is for ranks that share one copy and no sequence, unlike --cp 2."),
        ({"cp": 2, "compile": True}, 2, "--compile is for whole sequences"),
        (
            {"cp": 2, "dp_replicate": 3},
            8,
            "--dp-replicate 3 x --cp 2 does not divide the 8 ranks there are: mesh (dp_replicate 3 x dp_shard 8/6 x cp",
        ),
        ({"dp_replicate": 3}, 4, "--dp-replicate 3 does not divide the 4 ranks there are: mesh (dp_replicate 3 x"),
        ({"dp_replicate": 2, "stage": 0}, 4, "--dp-replicate 2 is for --stage 1 to 3: at 0 every rank has a copy."),
        (
            {"dp_replicate": 2, "plan": "auto"},
            4,
            "--plan is for ranks that share one copy and no sequence, unlike --dp-",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    options: dict[str, Any], world_size: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_mesh(TrainConfig(data=(str(tmp_path),), **options), world_size)
    others = {name: value for name, value in options.items() if name not in ("cp", "dp_replicate")}
    check_mesh(TrainConfig(data=(str(tmp_path),), **others), world_size)
    check_mesh(TrainConfig(data=(str(tmp_path),), dp_replicate=2, compile=True), 4)


@pytest.mark.parametrize(
    ("config", "supports", "said"),
    [
        ({}, True, "--cp 4: 2 attention heads cannot be shared by 4 ranks"),
        ({"num_attention_heads": 4}, False, "attention is its own"),
        ({"num_attention_heads": 4, "output_router_logits": True}, True, "its router"),
        ({"num_attention_heads": 4, "layer_types": ["chunked_attention"]}, True, "layers with chunked_attention"),
        ({"num_attention_heads": 4, "model_type": "mamba"}, True, "MambaForCausalLM is not known"),
        ({"num_attention_heads": 4, "_attn_implementation": "flex_attention"}, True, "'flex_attention'"),
    ],
)
def test_models_whose_sequences_cannot_be_shared_are_refused(config: dict[str, Any], supports: bool, said: str) -> None:
    known = SimpleNamespace(
        **{"model_type": "llama", "num_attention_heads": 2, "_attn_implementation": "sdpa", **config}
    )
    model: Any = SimpleNamespace(config=known, _supports_attention_backend=supports, modules=list)
    with pytest.raises(ConfigError, match=said):
        check_model(model, 4)


def count(rank: int) -> tuple[int, float]:
    """The tokens of a step in which two ranks have shared 10, and how many its speed comes to."""
    import torch

    ranks = Ranks(rank, 2, torch.device("cpu"), cp=2)
    course: Any = SimpleNamespace(steps=1)
    window = Window(course, ranks)
    window.add(torch.zeros(()), 20, 10 if ranks.counts_rows else 0, skipped=False)
    began = window.window_began
    progress = window.close(1, 0.0, 0.0, {})
    return progress.token_count, progress.tokens_per_second * (window.window_began - began)


def test_tokens_that_ranks_share_are_counted_once() -> None:
    for found in run_ranks(count, 2):
        assert found == pytest.approx((10, 10.0))


def test_the_ranks_of_a_group_read_the_same_rows() -> None:
    import torch

    ranks = [Ranks(rank, 4, torch.device("cpu"), cp=2) for rank in range(4)]
    assert [(each.dp_rank, each.dp_world_size, each.counts_rows) for each in ranks] == [
        (0, 2, True),
        (0, 2, False),
        (1, 2, True),
        (1, 2, False),
    ]


def test_a_model_whose_attention_is_its_own_is_refused_wherever_sequences_are_shared() -> None:
    from types import SimpleNamespace

    from penstock.integrations.ulysses import check_shareable

    known = SimpleNamespace(num_attention_heads=4, _attn_implementation="sdpa", model_type="llama")
    check_shareable(SimpleNamespace(config=known, _supports_attention_backend=True), 4)
    with pytest.raises(ConfigError, match="attention is its own"):
        check_shareable(SimpleNamespace(config=known, modules=list), 4)
