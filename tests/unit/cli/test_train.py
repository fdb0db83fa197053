"""`penstock train` from end to end, on a model and a text that are small enough for every test run."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.losses import linear_cross_entropy

MICRO = ["--precision", "fp32", "--seq-length", "32", "--batch-size", "4", "--eval-sequences", "8", "--seed", "3"]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_reports_and_leaves_a_model(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--steps", "30", "--log-every", "10", "--lr", "0.01", "--sample-tokens", "12", "--prompt", "the quick"]
    outcome = penstock_command(
        "train", "--model", str(model_folder), "--data", str(text_folder), "--out", str(out), *MICRO, *arguments
    )
    assert outcome.exit_code == 0, outcome.err

    lines = metrics(out)
    start, end = lines[0], lines[-1]
    steps, (before, after), samples = (
        [line for line in lines if line["event"] == kind] for kind in ("step", "eval", "sample")
    )
    assert [line["step"] for line in lines[1:-1]] == sorted(line["step"] for line in lines[1:-1])
    assert start["event"] == "start"
    assert start["config"]["optimizer"] == "cpu"
    assert start["precision"] == "fp32"
    assert start["world_size"] == 1
    assert start["data"]["kinds"] == {"text": 40}
    assert start["data"]["train_rows"] == 38
    assert start["parameter_count"] == 257 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert (start["event"], before["step"], after["step"], end["event"]) == ("start", 0, 30, "end")
    assert before["loss"] == pytest.approx(math.log(257), abs=0.2)
    assert after["loss"] < 3.2
    assert [line["step"] for line in steps] == [10, 20, 30]
    for line in steps:
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert line["skipped_count"] == 0
        assert line["bytes_by_tier"]["cpu"] >= 8 * start["parameter_count"]  # exp_avg and exp_avg_sq
    assert steps[0]["lr"] > steps[1]["lr"] > steps[2]["lr"] > 0
    assert end["loss_after"] == end["best_loss"] == after["loss"]
    assert 0.9 * 30 * 4 * 32 < end["token_count"] <= 30 * 4 * 32, "padding is not counted"
    assert {sample["step"] for sample in samples} == {0, 30}, "after every evaluation"
    assert {sample["prompt"] for sample in samples} == {"the quick"}
    assert all(0 < len(sample["text"]) <= 12 for sample in samples)
    assert any("waited" in line for line in steps)
    assert json.loads((out / "trace.json").read_text())["otherData"]["rank"] == 0

    assert f"held-out loss {after['loss']:.4f} nats per byte after 30 steps" in outcome.out
    assert "step 30/30  loss" in outcome.out
    assert f"saved the model in {out}" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("done in 0:")


def test_the_saved_model_is_the_trained_one(
    penstock_command: Callable[..., Any],
    model_folder: Path,
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from penstock.cli.training import saving

    ids = torch.arange(20)[None]
    trained: list[torch.Tensor] = []

    def save(model: Any, optimizer: Any, out: Path, **kwargs: Any) -> None:
        with torch.no_grad():
            trained.append(model(input_ids=ids).logits)
        real_save(model, optimizer, out, **kwargs)

    real_save = saving.save_pretrained
    monkeypatch.setattr(saving, "save_pretrained", save)
    out = tmp_path / "out"
    arguments = ["--steps", "3", "--sample-tokens", "0", "--eval-sequences", "0"]
    outcome = penstock_command(
        "train", "--model", str(model_folder), "--data", str(text_folder), "--out", str(out), *MICRO, *arguments
    )
    assert outcome.exit_code == 0, outcome.err
    reloaded: Any = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    with torch.no_grad():
        logits = reloaded(input_ids=ids).logits
        untrained = AutoModelForCausalLM.from_pretrained(model_folder)(input_ids=ids).logits
    torch.testing.assert_close(logits, trained[0], rtol=0, atol=0)
    assert not torch.equal(logits, untrained)
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(out)("é!")["input_ids"] == [0xC3, 0xA9, 0x21]


def test_a_saved_model_can_be_trained_on(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["train", "--data", str(text_folder), *MICRO, "--steps", "2", "--sample-tokens", "0"]
    assert penstock_command(*common, "--model", str(model_folder), "--out", str(first)).exit_code == 0
    assert penstock_command(*common, "--model", str(first), "--out", str(second)).exit_code == 0
    assert metrics(second)[1]["loss"] == pytest.approx(metrics(first)[-2]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer", "device"],
        ["--params", "cpu", "--grads", "cpu", "--tile-bytes", "4KiB"],
        ["--stage", "0", "--optimizer", "device", "--update-threads", "1"],
        ["--recompute", "on"],
    ],
    ids=" ".join,
)
def test_where_state_lives_never_changes_the_result(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path, arguments: list[str]
) -> None:
    common = ["train", "--model", str(model_folder), "--data", str(text_folder), *MICRO, "--steps", "3"]
    common += ["--log-every", "1", "--sample-tokens", "0"]
    assert penstock_command(*common, "--out", str(tmp_path / "plain")).exit_code == 0
    outcome = penstock_command(*common, "--out", str(tmp_path / "other"), *arguments)
    assert outcome.exit_code == 0, outcome.err
    plain, other = metrics(tmp_path / "plain"), metrics(tmp_path / "other")
    for name in ("loss", "grad_norm"):
        assert [line.get(name) for line in other] == [line.get(name) for line in plain]


def test_micro_batches_make_the_same_step(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    common = ["train", "--model", str(model_folder), "--data", str(text_folder), *MICRO, "--steps", "3"]
    common += ["--log-every", "1", "--sample-tokens", "0"]
    assert penstock_command(*common, "--out", str(tmp_path / "one")).exit_code == 0
    assert penstock_command(*common, "--out", "two", "--batch-size", "2", "--accumulation", "2").exit_code == 0
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_chunked_loss_is_the_same_to_rounding(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return linear_cross_entropy(*args, **options)

    monkeypatch.setattr("penstock.integrations.chunked.linear_cross_entropy", counted)
    common = ["train", "--model", str(model_folder), "--data", str(text_folder), *MICRO, "--steps", "3"]
    common += ["--log-every", "1", "--sample-tokens", "4"]
    for out, arguments, expected in (("plain", ["--chunked-loss", "off"], 0), ("chunked", ["--chunked-loss", "on"], 3)):
        outcome = penstock_command(*common, "--out", out, *arguments)
        assert outcome.exit_code == 0, outcome.err
        assert len(calls) == expected
    plain, chunked = metrics(Path("plain")), metrics(Path("chunked"))
    for name in ("loss", "grad_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (chunked, plain)]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name


def test_a_loss_that_cannot_be_chunked_is_refused_before_anything_is_built(
    penstock_command: Callable[..., Any], text_folder: Path
) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(vocab_size=257, num_key_value_heads=1, **sizes)
    GraniteForCausalLM(config).save_pretrained("granite")
    arguments = ["--model", "granite", "--data", str(text_folder), "--chunked-loss", "on", "--out", "out"]
    outcome = penstock_command("train", *arguments)
    assert outcome.exit_code == 2
    assert outcome.err.startswith("penstock: error: GraniteForCausalLM is not known to compute its logits as head(hi")
    assert not Path("out").exists()


@pytest.mark.thorough
def test_two_ranks_with_half_the_batch_do_the_same(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    common = ["--model", str(model_folder), "--data", str(text_folder), *MICRO, "--steps", "4", "--log-every", "1"]
    common += ["--sample-tokens", "5", "--eval-sequences", "7", "--peak-flops", "1e12"]
    common += ["--prompt", "the ", "--prompt", "a quick"]
    assert penstock_command("train", *common, "--out", str(tmp_path / "one")).exit_code == 0
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "penstock",
    ]
    done = subprocess.run(
        [*launcher, "train", *common, "--out", str(tmp_path / "two"), "--batch-size", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert two[0]["world_size"] == 2
    assert [line["event"] for line in two] == [line["event"] for line in one]
    for name in ("loss", "grad_norm", "lr"):
        values = [[line[name] for line in lines if name in line] for lines in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-4), name
    assert done.stdout.count(" nats per byte after ") == 2  # rank 0 alone speaks
    # A token's operations: of whole weights, on ranks that hold halves.
    steps = [[line for line in lines if line["event"] == "step"] for lines in (one, two)]
    costs = [
        line["mfu"] * ranks / line["tokens_per_second"] for ranks, lines in enumerate(steps, start=1) for line in lines
    ]
    assert costs == pytest.approx([costs[0]] * 8)
    assert "waited" in steps[1][3]  # the fourth: both ranks have traced it
    for name in ("prompt", "text"):
        assert [line[name] for line in two if name in line] == [line[name] for line in one if name in line]
    assert (tmp_path / "two" / "model.safetensors").is_file()


def test_tensorboard(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    arguments = [
        "--steps",
        "1",
        "--eval-sequences",
        "0",
        "--sample-tokens",
        "0",
        "--report-to",
        "tensorboard",
        "--out",
        "out",
    ]
    outcome = penstock_command("train", "--model", str(model_folder), "--data", str(text_folder), *MICRO, *arguments)
    assert outcome.exit_code == 0, outcome.err
    assert len(list((tmp_path / "out" / "tensorboard").iterdir())) == 1
    assert [line["event"] for line in metrics(tmp_path / "out")] == ["start", "step", "placement", "end"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "--data 'nowhere' matches nothing. Name a file, or a folder or glob with .txt, "),
        (["--data", "empty.txt"], "empty.txt holds no rows. Name data with rows or text in it."),
        (
            ["--data", "short.txt"],
            "--data has too few rows, or too little text for two sequences of --seq-length 128,",
        ),
        (["--data", "bad.jsonl"], "bad.jsonl:2 is not JSON: "),
        (["--data", "good.jsonl"], "good.jsonl:1: its fields ('body') are none that are understood: 'text' (text),"),
        (
            ["--model", "huge"],
            "--model 'huge' is neither a folder, a preset nor owner/name of a hub. The presets are tiny",
        ),
        (["--model", "."], "--model '.' is not a model folder: it has no config.json."),
        (["--out", "short.txt/out"], "--out 'short.txt/out' cannot be written: Not a directory. Use another."),
        (["--params", "disc"], "--params disc is not a tier. Use one of 'device', 'cpu', 'nvme'."),
        (["--optimizer", "device=0.5,cpu=0.4"], "The fractions of --optimizer device=0.5,cpu=0.4 sum to 0.9"),
        (["--tile-bytes", "10"], "--tile-bytes 10: use a whole number of bytes, 4096 or more."),
        (["--live-bytes", "many"], "--live-bytes 'many' is not a size."),
        (["--steps", "0"], "--steps 0 is too small. Use 1 or more."),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    penstock_command: Callable[..., Any], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "good.jsonl").write_text('{"body": "fine"}\n')
    outcome = penstock_command("train", *arguments)
    assert outcome.exit_code == 2
    assert outcome.err.startswith(f"penstock: error: {message}")
    assert outcome.err.count("\n") == 1
    assert not list(tmp_path.glob("**/*.safetensors"))
    assert not list(tmp_path.glob("**/metrics.jsonl"))


def test_the_model_is_not_overwritten(penstock_command: Callable[..., Any], model_folder: Path) -> None:
    outcome = penstock_command("train", "--model", str(model_folder), "--out", str(model_folder), "--seq-length", "32")
    assert outcome.exit_code == 2
    assert outcome.err.endswith("is the folder of --model, which it would overwrite. Use another.\n")


def test_a_rank_says_its_name_with_its_mistake(
    penstock_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    outcome = penstock_command("train", "--steps", "0")
    assert outcome.err == "penstock [rank 1]: error: --steps 0 is too small. Use 1 or more.\n"


def test_transformers_that_is_not_installed(
    penstock_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.commands.find_spec", lambda name: None)
    outcome = penstock_command("train")
    assert outcome.err.startswith("penstock: error: penstock train needs transformers. Install it with: pip install ")
