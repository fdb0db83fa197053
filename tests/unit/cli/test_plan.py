"""`penstock plan`: what it asks the planner, what it says, and what it refuses before a model is built."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import ConfigError, Placement
from penstock.cli.options import about_of, option_of
from penstock.cli.planning import question
from penstock.cli.planning.config import PlanConfig, parse_batch
from penstock.cli.planning.question import precision_on
from penstock.forecast.answer import Lack
from penstock.planner import Machine, Plan
from penstock.recompute import can_be_told, recomputes
from tests.plans import plan as desktop

FOREIGN = ["--machine", "a100-80gb-node"]


@pytest.fixture
def config_folder(model_folder: Path, tmp_path: Path) -> str:
    """A configuration and nothing else."""
    (tmp_path / "described").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "described")
    return "described"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the planner was asked; it answers with the desktop's plan."""
    seen: list[dict[str, Any]] = []

    def plan(model: Any, optimizer: Any, batch: Callable[[], Any], **arguments: Any) -> Plan:
        seen.append({"model": model, "optimizer": optimizer, "batch": batch(), **arguments})
        return desktop(recompute=False)

    monkeypatch.setattr(question, "plan", plan)
    return seen


def test_standard_output_of_the_process_is_json_and_nothing_else(config_folder: str, tmp_path: Path) -> None:
    """With too little room on the device, so that a solver is asked: it is C, and prints past Python."""
    words = ["plan", "--model", config_folder, "--batch", "2x16", "--machine", "rtx4090-desktop", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--what-if", "device_memory=300000"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
    )
    assert not done.returncode, done.stderr.decode()
    assert json.loads(done.stdout)["penstock"] == "plan"


def test_a_configuration_alone_is_planned_for_a_machine_that_one_does_not_have(
    penstock_command: Callable[..., Any], config_folder: str
) -> None:
    """Through the planner itself; nothing was left but the files that were asked for."""
    words = ["--model", config_folder, "--batch", "2x16", "--machine", "rtx4090-desktop", "--max-step", "9"]
    outcome = penstock_command("plan", *words, "--out", "p.json", "--trace", "t.json", "--explain")
    assert outcome.exit_code == 0, outcome.err
    assert outcome.out.startswith("fits: yes     step ")
    assert "rtx4090-desktop, bf16, stage 3, input_ids" in outcome.out
    run = "penstock train --plan p.json --model described --batch-size 2 --seq-length 16 --precision bf16"
    assert outcome.out.endswith(f"step of at most 9 s: met\nwritten: p.json\nrun: {run}\n")
    plan = Plan.read("p.json")
    assert (plan.fits, plan.machine, plan.bytes["device"] > 0) == (True, "rtx4090-desktop", True)
    assert {event["cat"] for event in json.loads(Path("t.json").read_text())["traceEvents"] if "cat" in event}
    assert {path.name for path in Path().iterdir()} == {"described", "p.json", "t.json"}


def test_every_option_reaches_the_planner(
    penstock_command: Callable[..., Any], config_folder: str, asked: list[dict[str, Any]]
) -> None:
    words = ["--model", f"{config_folder}/config.json", "--batch", "3x16", "--accumulation", "2", "--stage", "2"]
    words += ["--precision", "fp16", "--optimizer-name", "lion", "--max-grad-norm", "0", "--overlap", "none"]
    words += [
        "--state-dtype",
        "bf16",
        "--tile-bytes",
        "8KiB",
        "--gpus",
        "4",
        "--hosts",
        "2",
        "--mesh",
        "dp_replicate=2,dp_shard=4",
        "--folders",
        "2",
        "--measure",
    ]
    words += ["--device-memory", "10GiB", "--host-memory", "64GB", "--packing", "off", "--pad-vocab-to", "64"]
    outcome = penstock_command("plan", *words, *FOREIGN, "--what-if", "disk_read=14GB/s", "h2d=20GB/s", "--lora", "r=2")
    assert outcome.exit_code == 0, outcome.err
    (seen,) = asked
    assert seen["model"].get_base_model().get_input_embeddings().weight.shape == (320, 32)
    assert all(parameter.is_meta for parameter in seen["model"].parameters())
    assert {type(seen["optimizer"]).__name__, *(p.requires_grad for p in seen["model"].parameters())} == {
        "Lion",
        True,
        False,
    }
    assert {
        name: tuple(value.shape) for name, value in seen["batch"].items() if torch.is_tensor(value)
    } == dict.fromkeys(("input_ids", "attention_mask", "labels"), (3, 16))
    machine = seen["machine"]
    assert (machine.name, machine.value("disk_read"), machine.value("h2d")) == ("a100-80gb-node", 14e9, 20e9)
    expected = {"device_bytes": 10 << 30, "host_bytes": 64 * 10**9, "folders": ("nvme0", "nvme1"), "world_size": 8}
    expected |= {"hosts": 2, "placement": "auto", "micro_batches": 2, "measure": True, "trace": None, "stage": 2}
    expected |= {"mesh": {"dp_replicate": 2, "dp_shard": 4}}
    expected |= {"precision": "fp16", "overlap": "none", "max_grad_norm": None}
    assert {name: seen[name] for name in expected} == expected
    assert (seen["options"].state_dtype, seen["options"].tile_bytes) == ("bf16", 8192)
    assert "what if: disk_read=14GB/s, h2d=20GB/s; not a plan of the machine as it is" in outcome.out
    assert "run: " not in outcome.out  # there is no such machine


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        ([], "auto"),
        (["--params", "auto", "--activations", "auto"], "auto"),
        (["--params", "device"], Placement(optimizer="cpu")),
        (["--optimizer", "device=0.25,cpu=0.75"], Placement(optimizer={"device": 0.25, "cpu": 0.75})),
        (["--activations", "cpu", "--grads", "cpu"], Placement(grads="cpu", optimizer="cpu", activations="cpu")),
        (["--optimizer", "nvme", "--folders", "2"], Placement(optimizer="nvme", nvme_path=("nvme0", "nvme1"))),
        (["--optimizer", "nvme", "--folders", "/a"], Placement(optimizer="nvme", nvme_path=("/a",))),
    ],
)
def test_a_home_that_is_named_is_looked_at_beside_the_homes_of_a_run(
    penstock_command: Callable[..., Any],
    config_folder: str,
    asked: list[dict[str, Any]],
    words: list[str],
    placement: Any,
) -> None:
    outcome = penstock_command("plan", "--model", config_folder, "--batch", "2x16", *FOREIGN, *words)
    assert outcome.exit_code == 0, outcome.err
    given = asked[0]["placement"]
    assert given == (placement if isinstance(placement, str) else replace(placement, nvme_path=given.nvme_path))
    if "nvme" in words:
        assert given.nvme_path == placement.nvme_path


@pytest.mark.parametrize(
    ("words", "run"),
    [
        ([], "penstock train --plan auto --nvme-path DIR1 --model described"),
        (
            ["--host-memory", "64GB"],
            "run, planned with --out plan.json: penstock train --plan plan.json --nvme-path DIR1",
        ),
        (["--host-memory", "64GB", "--out", "p"], "run: penstock train --plan p --nvme-path DIR1"),
        (["--out", "p q.json"], "penstock train --plan 'p q.json' --nvme-path DIR1 --model described"),
        (["--folders", "/a", "--out", "p"], "penstock train --plan p --model described"),
        (
            ["--optimizer", "cpu=0.5,nvme=0.5", "--folders", "/a"],
            "penstock train --optimizer cpu=0.5,nvme=0.5 --nvme-path /a",
        ),
        (["--gpus", "8"], "torchrun --nproc-per-node 8 -m penstock train --plan auto"),
        (["--gpus", "8", "--hosts", "3"], "torchrun --nnodes 3 --nproc-per-node 8 -m penstock train --plan auto"),
        (["--recompute", "on"], "penstock train --plan auto --nvme-path DIR1 --recompute on"),
        (["--recompute", "off"], "penstock train --plan auto --nvme-path DIR1 --model"),
        (
            ["--accumulation", "4"],
            "--nvme-path DIR1 --accumulation 4 --model described --batch-size 2 --seq-length 16 --",
        ),
        (["--optimizer-args", "eps=1e-6", "amsgrad=true"], "--optimizer-args eps=1e-6 amsgrad=true --model described"),
        (["--lora", "r=2", "--max-grad-norm", "0"], "--lora r=2 --max-grad-norm 0 --model described"),
    ],
)
def test_the_command_that_is_named_has_the_options_that_the_plan_was_made_for(
    penstock_command: Callable[..., Any], config_folder: str, asked: list[dict[str, Any]], words: list[str], run: str
) -> None:
    outcome = penstock_command("plan", "--model", config_folder, "--batch", "2x16", *FOREIGN, *words)
    assert outcome.exit_code == 0, outcome.err
    named = outcome.out.splitlines()[-1]
    assert named.startswith("run")
    assert run in named
    assert named.endswith(" --batch-size 2 --seq-length 16 --precision bf16")


@pytest.mark.parametrize(
    ("asked_for", "told", "can"), [("auto", False, True), ("on", True, True), ("off", False, False)]
)
def test_recompute_is_the_planners_unless_it_is_said(
    penstock_command: Callable[..., Any],
    config_folder: str,
    asked: list[dict[str, Any]],
    asked_for: str,
    told: bool,
    can: bool,
) -> None:
    words = ["--model", config_folder, "--batch", "2x16", "--recompute", asked_for, *FOREIGN, "--json"]
    outcome = penstock_command("plan", *words)
    model = asked[0]["model"]
    assert (recomputes(model), can_be_told(model)) == (told, can)
    Path("p.json").write_text(outcome.out)
    assert Plan.read("p.json") == desktop(recompute=told)


@pytest.mark.parametrize(
    ("changes", "words", "status", "said"),
    [
        ({}, ["--max-step", "4.12"], 0, "step of at most 4.12 s: met"),
        ({}, ["--max-step", "4.1"], 1, "step of at most 4.1 s: not met"),
        ({"fits": False, "lacks": (Lack("cpu", 5, "one more host"),)}, [], 1, "5 B (5 bytes) too few on the host."),
    ],
)
def test_what_does_not_fit_or_is_too_slow_ends_with_status_1(
    penstock_command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    config_folder: str,
    changes: Any,
    words: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(question, "plan", lambda *rest, **named: desktop(**changes))
    outcome = penstock_command("plan", "--model", config_folder, "--batch", "2x16", *FOREIGN, *words)
    assert (outcome.exit_code, outcome.err) == (status, "")
    assert said in outcome.out
    assert ("\nrun: " in outcome.out) is changes.get("fits", True)


def test_a_plan_of_a_mesh_is_for_prepare(penstock_command: Callable[..., Any], config_folder: str) -> None:
    words = ["--batch", "1x16", "--gpus", "2", "--hosts", "2", "--params", "device", "--mesh"]
    outcome = penstock_command("plan", "--model", config_folder, *FOREIGN, *words, "dp_replicate=2,dp_shard=2")
    assert outcome.exit_code == 0, outcome.err
    assert "one of 4 ranks on 2 hosts, dp_replicate 2 x dp_shard 2" in outcome.out
    assert "run: a script of yours, with prepare(placement='auto', mesh=..., plan=...)" in outcome.out


def test_a_plan_of_a_mesh_with_tp_is_of_one_of_its_parts(
    penstock_command: Callable[..., Any], config_folder: str
) -> None:
    words = [
        "plan",
        "--model",
        config_folder,
        *FOREIGN,
        "--batch",
        "1x16",
        "--gpus",
        "4",
        "--params",
        "device",
        "--json",
    ]
    whole, half = (
        json.loads(penstock_command(*words, "--mesh", mesh).out) for mesh in ("dp_shard=4", "dp_shard=2,tp=2")
    )
    assert half["mesh"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert half["bytes"] == whole["bytes"]  # a quarter either way: norms, of which each has all, are lost in padding
    assert half["tokens_per_s"] < whole["tokens_per_s"]  # half the ranks have a batch of their own


def test_a_plan_of_ranks_that_share_sequences_is_of_a_chunk(
    penstock_command: Callable[..., Any], config_folder: str
) -> None:
    words = ["plan", "--model", config_folder, *FOREIGN, "--batch", "1x16", "--gpus", "4", "--params", "device"]
    outcome = penstock_command(*words, "--mesh", "dp_shard=2,cp=2")
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert "shift_labels, labels 1x8 int64; attention_mask 1x1x16x16 bool, one of 4 ranks" in outcome.out
    assert "run: a script of yours" in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh", "cp=4"], "--mesh cp=4: 2 attention heads cannot be shared by 4 ranks"),
        (["--mesh", "tp=4"], "--mesh tp=4: the model has num_attention_heads=2, which 4 ranks cannot share. Use a"),
        (["--mesh", "ep=4"], "--mesh has ep, and models are divided by their plans for tp alone. Use tp, or plan() in"),
        (["--mesh", "dp_shard=2,tp=2", "--lora", "r=4"], "--lora is for whole parameters, which --mesh tp divides. Le"),
        (
            ["--mesh", "dp_shard=2,tp=2", "--chunked-loss", "on"],
            "--chunked-loss on is for whole parameters and sequences. Le",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    penstock_command: Callable[..., Any], config_folder: str, words: list[str], said: str
) -> None:
    refused = penstock_command("plan", "--model", config_folder, *FOREIGN, "--gpus", "4", *words)
    assert refused.exit_code == 2
    assert said in refused.err
    assert refused.err.count("\n") == 1


def test_two_plans_are_compared_without_a_model(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(desktop().to_json())
    (tmp_path / "b.json").write_text(desktop(step_s=4.5, overlap="none").to_json())
    outcome = penstock_command("plan", "--compare", "a.json", "b.json")
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert outcome.out.split()[:3] == ["differs", "a.json", "b.json"]
    assert "+9 %" in outcome.out
    assert penstock_command("plan", "--compare", "a.json", "c.json").err.startswith("penstock: error: c.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "16"], "--batch '16' is no micro-batch. Write sequences x tokens, such as 16x1024."),
        (["--batch", "2x1"], "--batch '2x1': use 1 sequence or more of 2 tokens or more"),
        (
            ["--batch", "2x99"],
            "--batch 2x99 has longer sequences than the 64 positions of described. Use shorter ones.",
        ),
        (["--machine", "h100-nod"], "h100-nod"),
        (["--what-if", "disk_reed=7GB/s"], "--what-if: There is no figure 'disk_reed'. Did you mean disk_read?"),
        (["--what-if", "disk_read=7Gb/s"], "--what-if: "),
        (["--gpus", "9"], "--gpus 9 is more than the 8 of a host of a100-80gb-node. Use more --hosts"),
        (["--mesh", "dp_shard"], "--mesh 'dp_shard' is no mesh. Write each dimension once"),
        (["--mesh", "tp=2,tp=2"], "--mesh 'tp=2,tp=2' is no mesh."),
        (["--mesh", "dp_shard=8"], "--mesh has 8 ranks, and --gpus 1 x --hosts 1 says 1. Make them agree."),
        (["--folders", "0"], "--folders 0: use a number from 1 to 64"),
        (["--machine", "", "--folders", "2"], "--folders 2 is a number: of this machine, name the folders themselves."),
        (["--max-step", "0"], "--max-step 0 is no time."),
        (["--compare", "a"], "--compare takes two files of plans, and was given 1."),
        (["--compare", "a", "b", "--json"], "--compare prints no JSON"),
        (["--out", "no/p.json"], "--out 'no/p.json' cannot be written: its folder is none"),
        (["--trace", "described"], "--trace 'described' cannot be written: it is no file."),
        (["--params", "x"], "--params x is not a tier. Use one of"),
        (["--optimizer-args", "eps"], "--optimizer-args 'eps': write name=value"),
        (["--lora", "q=1"], "--lora"),
        (["--chunked-loss", "x"], "--chunked-loss 'x': use one of"),
        (["--model", "missing"], "--model 'missing' is neither a folder, a preset nor owner/name of a hub."),
        (["--device-memory", "x"], "--device-memory 'x' is not a size."),
    ],
)
def test_what_is_wrong_is_one_line_before_a_model_is_built(
    penstock_command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    config_folder: str,
    asked: list[dict[str, Any]],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(question, "build_described", lambda *rest, **named: pytest.fail("a model was built"))
    base = [] if "--batch" in words else ["--batch", "2x16"]
    base += [] if "--machine" in words else FOREIGN
    base += [] if "--model" in words else ["--model", config_folder]
    outcome = penstock_command("plan", *base, *words)
    assert outcome.exit_code == 2
    assert outcome.err.startswith("penstock: error: ")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    assert asked == []


def test_folders_need_figures_of_disks(
    penstock_command: Callable[..., Any], config_folder: str, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    machine = Machine.read("cpu-laptop")
    figures = {name: figure for name, figure in machine.figures.items() if not name.startswith(("disk", "folders"))}
    Machine("bare", "cpu", figures).write(tmp_path / "bare.json")
    words = ["plan", "--model", config_folder, "--batch", "2x16", "--machine", "bare.json"]
    outcome = penstock_command(*words, "--folders", "2")
    said = "--folders: the machine bare has no figure disk_read. Say it with --what-if disk_read=..., or use a machine"
    assert outcome.err.startswith(f"penstock: error: {said}")
    outcome = penstock_command(*words, "--optimizer", "nvme")
    said = "--optimizer puts state on nvme, and the machine has no folder. Name some: --folders."
    assert outcome.err == f"penstock: error: {said}\n"
    assert penstock_command(*words).exit_code == 0
    assert [seen["precision"] for seen in asked] == ["fp32"]


def test_a_figure_that_is_missed_is_stated_by_its_option(
    penstock_command: Callable[..., Any], config_folder: str, tmp_path: Path
) -> None:
    machine = Machine.read("cpu-laptop")
    figures = {name: figure for name, figure in machine.figures.items() if name != "host_memory"}
    Machine("bare", "cpu", figures).write(tmp_path / "bare.json")
    outcome = penstock_command("plan", "--model", config_folder, "--batch", "2x16", "--machine", "bare.json")
    assert outcome.err.startswith("penstock: error: The machine 'bare' has no figure host_memory")
    assert outcome.err.endswith("or state it: --what-if host_memory=NUMBER.\n")


def test_this_machine_is_probed_where_none_is_named(
    penstock_command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    config_folder: str,
    asked: list[dict[str, Any]],
) -> None:
    meant: list[Any] = []

    def machine_for(*arguments: Any) -> Machine:
        meant.append(arguments)
        return Machine.read("cpu-laptop")

    monkeypatch.setattr(question, "machine_for", machine_for)
    outcome = penstock_command("plan", "--model", config_folder, "--batch", "2x16", "--folders", "/a", "--json")
    assert outcome.err == "penstock: this machine is measured, unless it was before; about a minute\n"
    assert meant == [(None, ("/a",))]
    assert asked[0]["folders"] == ("/a",)
    json.loads(outcome.out)  # and nothing beside it


def test_weights_of_a_hub_are_not_fetched(monkeypatch: pytest.MonkeyPatch, config_folder: str, tmp_path: Path) -> None:
    from penstock.integrations.huggingface import build_sketch, find_model

    fetched: list[Any] = []

    def snapshot(name: str, **named: Any) -> str:
        fetched.append((name, named["allow_patterns"]))
        return str(tmp_path / config_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    source = find_model("owner/name", seq_length=16, needs_weights=False)
    assert [name for name, _ in fetched] == ["owner/name"]
    assert "*.json" in fetched[0][1]
    assert "*.safetensors" not in fetched[0][1]
    model = build_sketch(source)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(ConfigError, match=r"has no \.safetensors weights"):
        find_model(str(tmp_path / config_folder), seq_length=16)


def test_the_sketch_is_the_model_that_a_run_would_build(model_folder: Path) -> None:
    from penstock.cli.training.learning.model import build, build_described
    from penstock.integrations.huggingface import find_model
    from penstock.integrations.lora import Lora
    from penstock.planner import model_fingerprint

    for lora in (None, Lora(r=2)):
        source = find_model(str(model_folder), seq_length=16)
        changes: Any = {"vocab_size": 320, "lora": lora, "chunks_loss": True, "seed": 0}
        built = build(source, compiles=False, **changes)
        assert model_fingerprint(build_described(source, **changes).model) == model_fingerprint(built.model)


def test_what_is_computed_in_follows_from_the_machine() -> None:
    node, laptop = Machine.read("h100-node"), Machine.read("cpu-laptop")
    old = Machine("old", "cuda", {name: node.figures[name] for name in ("flops_float32", "device_memory")})
    assert [precision_on(machine, "auto") for machine in (node, laptop, old)] == ["bf16", "fp32", "fp32"]
    assert [precision_on(machine, "fp16") for machine in (node, laptop)] == ["fp16", "fp16"]


def test_a_batch_is_two_numbers() -> None:
    assert parse_batch(" 16x1024 ", option="--batch") == (16, 1024)
    wrong = ["", "x", "1x", "0x8", "1x1", "-1x8", "1.5x8", "1x8x2", "65536x65536", "9" * 400 + "x2", "\uff11x\uff12"]
    for text in wrong:
        with pytest.raises(ConfigError, match=r"^--batch "):
            parse_batch(text, option="--batch")
    assert PlanConfig(batch=(2, 8)).training().batch_size == 2


def test_the_page_has_every_option_under_its_heading() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan-command.md").read_text().partition("## Options")[2]
    headings = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))
    headings[""] = page.partition("###")[0]
    found = {
        name: re.findall(r"`(--[a-z-]+)`", "".join(re.findall(r"^\|([^|]*)", text, re.MULTILINE)))
        for name, text in headings.items()
    }
    wanted: dict[str, list[str]] = {}
    for each in fields(PlanConfig):
        wanted.setdefault(about_of(each).panel or "", []).append(option_of(each.name))
    assert found == wanted
