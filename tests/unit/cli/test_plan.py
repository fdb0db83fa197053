"""`penstock plan`: what it asks the planner, what it says, and what it refuses before a model is built."""

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from penstock import ConfigError, Placement
from penstock.cli import planning
from penstock.cli.app import app
from penstock.cli.planning import precision_on
from penstock.planner import Machine, Plan
from penstock.planner.plans import Shortfall
from penstock.recompute import can_be_told, recomputes
from tests.lib.plans import plan as desktop

BASE = {"--model": "described", "--batch": "2x16", "--machine": "a100-80gb-node"}
SCRIPT = "run: a script of yours, with prepare(placement='auto', plan=...)"
Command = Callable[..., Any]


@pytest.fixture
def described(model_folder: Path, tmp_path: Path) -> Path:
    """A configuration and nothing else."""
    folder = tmp_path / "described"
    folder.mkdir()
    shutil.copy(model_folder / "config.json", folder)
    return folder


@pytest.fixture
def command(penstock_command: Command, described: Path) -> Command:
    """`penstock plan`, of this configuration for another machine where nothing else is said."""

    def run(*words: str) -> Any:
        base = (word for option, value in BASE.items() if option not in words for word in (option, value))
        return penstock_command("plan", *base, *words)

    return run


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., str]:
    """The file of a machine without some figures."""

    def write(*without: str) -> str:
        machine = Machine.read("cpu-laptop")
        figures = {name: figure for name, figure in machine.figures.items() if not name.startswith(without)}
        Machine("bare", "cpu", figures).write(tmp_path / "bare.json")
        return "bare.json"

    return write


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the planner was asked; it answers with the desktop's plan."""
    seen: list[dict[str, Any]] = []

    def plan(model: Any, optimizer: Any, batch: Callable[[], Any], **arguments: Any) -> Plan:
        seen.append({"model": model, "optimizer": optimizer, "batch": batch(), **arguments})
        return desktop(recompute=False)

    monkeypatch.setattr(planning, "plan", plan)
    return seen


def joined(text: str) -> str:
    """What is printed, with its command on the line that names it, as a shell puts it together."""
    return text.replace(" \\\n    ", " ").replace(":\n  ", ": ")


def test_a_configuration_alone_is_planned_for_a_machine_that_one_does_not_have(command: Command) -> None:
    """Through the planner itself; nothing was left but the files that were asked for."""
    words = ["--machine", "rtx4090-desktop", "--max-step", "9", "--out", "p.json", "--trace", "t.json", "--explain"]
    outcome = command(*words)
    assert outcome.exit_code == 0, outcome.err
    assert outcome.out.startswith("fits: yes     step ")
    assert "rtx4090-desktop, bf16, stage 3, input_ids" in outcome.out
    run = (
        "penstock train --plan p.json --model described --per_device_train_batch_size 2 --max_length 16 --bf16 true "
        "--packing --gradient_checkpointing false"
    )
    assert joined(outcome.out).endswith(f"step of at most 9 s: met\nwritten: p.json\nrun: {run}\n")
    assert max(map(len, outcome.out.splitlines())) <= 80
    plan = Plan.read("p.json")
    assert (plan.fits, plan.machine, plan.bytes["device"] > 0) == (True, "rtx4090-desktop", True)
    assert {event["cat"] for event in json.loads(Path("t.json").read_text())["traceEvents"] if "cat" in event}
    assert {path.name for path in Path().iterdir()} == {"described", "p.json", "t.json"}


def test_every_option_reaches_the_planner(command: Command, asked: list[dict[str, Any]]) -> None:
    words = ["--model", "described/config.json", "--batch", "3x16", "--accumulation", "2", "--stage", "2"]
    words += ["--precision", "fp16", "--optimizer-name", "lion", "--max-grad-norm", "0", "--overlap", "none"]
    words += ["--options", "state_dtype=bf16", "--options", "tile_bytes=8KiB", "--options", "update_threads=3"]
    words += ["--gpus", "4", "--hosts", "2", "--mesh", "dp_replicate=2,dp_shard=4", "--folders", "2", "--measure"]
    words += ["--what-if", "disk_read=14GB/s", "--what-if", "h2d=20GB/s", "--lora", "r=2", "--tbw", "600"]
    words += ["--optimizer-args", "betas=0.5,0.25", "--optimizer-args", "weight_decay=1e-6"]
    words += ["--device-memory", "10GiB", "--host-memory", "64GB", "--packing", "off", "--pad-vocab-to", "64"]
    outcome = command(*words)
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
    assert machine.value("disk_endurance") == 600e12
    expected = {"device_bytes": 10 << 30, "host_bytes": 64 * 10**9, "folders": ("nvme0", "nvme1"), "world_size": 8}
    expected |= {"hosts": 2, "placement": "auto", "micro_batches": 2, "measure": True, "trace": None, "stage": 2}
    expected |= {"mesh": {"dp_replicate": 2, "dp_shard": 4}}
    expected |= {"precision": "fp16", "overlap": "none", "max_grad_norm": None}
    assert {name: seen[name] for name in expected} == expected
    options = seen["options"]
    assert (options.state_dtype, options.tile_bytes, options.update_threads) == ("bf16", 8192, 3)
    assert seen["optimizer"].defaults["betas"] == (0.5, 0.25)
    assert seen["optimizer"].defaults["weight_decay"] == 1e-6
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
    command: Command, asked: list[dict[str, Any]], words: list[str], placement: Any
) -> None:
    outcome = command(*words)
    assert outcome.exit_code == 0, outcome.err
    given = asked[0]["placement"]
    assert given == (placement if isinstance(placement, str) else replace(placement, nvme_path=given.nvme_path))
    if "nvme" in words:
        assert given.nvme_path == placement.nvme_path


@pytest.mark.parametrize(
    ("words", "run"),
    [
        ([], "penstock train --placement auto --nvme_path DIR1 --model described"),
        (
            ["--host-memory", "64GB"],
            "run, planned with --out plan.json: penstock train --plan plan.json --nvme_path DIR1",
        ),
        (["--host-memory", "64GB", "--out", "p"], "run: penstock train --plan p --nvme_path DIR1"),
        (["--out", "p q.json"], "penstock train --plan 'p q.json' --nvme_path DIR1 --model described"),
        (["--folders", "/a", "--out", "p"], "penstock train --plan p --model described"),
        (
            ["--optimizer", "cpu=0.5,nvme=0.5", "--folders", "/a"],
            "penstock train --optimizer cpu=0.5,nvme=0.5 --nvme_path /a",
        ),
        (["--gpus", "8"], "torchrun --nproc-per-node 8 -m penstock train --placement auto"),
        (["--gpus", "8", "--hosts", "3"], "torchrun --nnodes 3 --nproc-per-node 8 -m penstock train --placement auto"),
        (["--recompute", "on"], "--max_length 16 --bf16 true --packing --max_grad_norm 0.5"),
        (["--recompute", "off"], "--packing --gradient_checkpointing false --max_grad_norm 0.5"),
        (
            ["--accumulation", "4", "--packing", "off", "--precision", "fp32"],
            "--max_length 16 --gradient_accumulation_steps 4 --bf16 false --gradient_checkpointing false",
        ),
        (["--overlap", "none"], "run, planned with --out plan.json: penstock train --plan plan.json"),
        (["--optimizer-name", "lion", "--stage", "2"], "--rule lion --max_grad_norm 0.5 --stage 2"),
        (["--optimizer-name", "sgd", "--options", "tile_bytes=8KiB"], "--optim sgd"),
        (
            ["--lora", "r=2,base=int8"],
            "--use_peft --lora_r 2 --lora_alpha 4 --lora_target_modules all-linear --base int8 --max_grad_norm",
        ),
        (["--optimizer-name", "radam"], SCRIPT),
        (["--optimizer-args", "eps=1e-6"], SCRIPT),
    ],
)
def test_the_command_that_is_named_has_the_options_that_the_plan_was_made_for(
    command: Command, asked: list[dict[str, Any]], words: list[str], run: str
) -> None:
    outcome = command("--max-grad-norm", "0.5", *words)
    assert outcome.exit_code == 0, outcome.err
    named = joined(outcome.out).splitlines()[-1]
    assert named.startswith("run")
    assert run in named
    if named.startswith("run: penstock train"):  # by the words of the command itself
        arguments = pytest.importorskip("penstock.train.arguments")
        arguments.parse([*shlex.split(named)[3:], "--data", "a.txt"])


@pytest.mark.parametrize(("chunked", "whole"), [("auto", False), ("off", True), ("on", False)])
def test_logits_are_whole_where_the_class_is_not_known_or_they_are_asked_for(
    command: Command, asked: list[dict[str, Any]], chunked: str, whole: bool
) -> None:
    assert command("--chunked-loss", chunked).exit_code == 0
    assert ("forward" not in vars(asked[0]["model"])) is whole
    # A head that is no linear layer any more.
    refused = command("--chunked-loss", chunked, "--lora", "r=2,targets=lm_head")
    assert refused.exit_code == (2 if chunked == "on" else 0)
    assert ("The head of LlamaForCausalLM" in refused.err) is (chunked == "on")


@pytest.mark.parametrize(
    ("asked_for", "told", "can"), [("auto", False, True), ("on", True, True), ("off", False, False)]
)
def test_recompute_is_the_planners_unless_it_is_said(
    command: Command, asked: list[dict[str, Any]], asked_for: str, told: bool, can: bool
) -> None:
    outcome = command("--recompute", asked_for, "--json")
    model = asked[0]["model"]
    assert (recomputes(model), can_be_told(model)) == (told, can)
    Path("p.json").write_text(outcome.out)
    assert Plan.read("p.json") == desktop(recompute=told)


@pytest.mark.parametrize(
    ("changes", "words", "status", "said"),
    [
        ({}, ["--max-step", "4.12"], 0, "step of at most 4.12 s: met"),
        ({"overlap": "backward"}, ["--max-grad-norm", "0"], 0, SCRIPT),
        ({}, ["--max-step", "4.1"], 1, "step of at most 4.1 s: not met"),
        (
            {"fits": False, "lacks": (Shortfall("cpu", 5, "one more host"),)},
            [],
            1,
            "5 B (5 bytes) too few on the host.",
        ),
    ],
)
def test_what_does_not_fit_or_is_too_slow_ends_with_status_1(
    command: Command, monkeypatch: pytest.MonkeyPatch, changes: Any, words: list[str], status: int, said: str
) -> None:
    monkeypatch.setattr(planning, "plan", lambda *rest, **named: desktop(**changes))
    outcome = command(*words)
    assert (outcome.exit_code, outcome.err) == (status, "")
    assert said in outcome.out
    assert ("\nrun:" in outcome.out) is changes.get("fits", True)


def test_a_plan_of_a_mesh_is_for_prepare_and_of_one_of_its_parts(command: Command) -> None:
    words = ["--batch", "1x16", "--gpus", "2", "--hosts", "2", "--params", "device", "--out", "p.json"]
    outcome = command(*words, "--mesh", "dp_shard=2,tp=2")
    assert outcome.exit_code == 0, outcome.err
    assert Plan.read("p.json").mesh == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert "one of 4 ranks on 2 hosts, dp_shard 2 x tp 2" in " ".join(outcome.out.split())
    assert SCRIPT in outcome.out


def test_a_plan_of_ranks_that_share_sequences_is_of_a_chunk(command: Command) -> None:
    outcome = command("--batch", "1x16", "--gpus", "4", "--params", "device", "--mesh", "dp_shard=2,cp=2")
    assert (outcome.exit_code, outcome.err) == (0, "")
    said = " ".join(outcome.out.split())
    for words in ("shift_labels int64[1, 8]", "attention_mask bool[1, 1, 16, 16]", "one of 4 ranks", SCRIPT):
        assert words in said


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
def test_what_cannot_be_divided_is_refused(command: Command, words: list[str], said: str) -> None:
    refused = command("--gpus", "4", *words)
    assert refused.exit_code == 2
    assert said in refused.err
    assert refused.err.count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()], ids=["a terminal", "none"])
def test_a_terminal_is_shown_what_the_planner_does_and_json_stands_alone(
    command: Command, monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    def find(*_: object, progress: Callable[[str], None] | None = None, **__: object) -> Plan:
        if progress is not None:
            progress("simulating placement 3")
        return desktop()

    monkeypatch.setattr(planning, "plan", find)
    monkeypatch.setattr(planning.sys, "stderr", terminal)
    outcome = command("--json")
    assert json.loads(outcome.out)["penstock"] == "plan"
    shown = terminal.getvalue()
    assert ("simulating placement 3" in shown) if terminal.isatty() else not shown


def test_two_plans_are_compared_without_a_model(penstock_command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(desktop().to_json())
    (tmp_path / "b.json").write_text(desktop(step_s=4.5, overlap="none").to_json())
    outcome = penstock_command("plan", "--compare", "a.json", "b.json")
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert outcome.out.split()[:4] == ["differs:", "a.json", "->", "b.json"]
    assert "overlap forward -> overlap none" in outcome.out
    assert penstock_command("plan", "--compare", "a.json", "c.json").err.startswith("penstock: error: c.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--batch", "2x99"],
            "--batch 2x99 has longer sequences than the 64 positions of described. Use shorter ones.",
        ),
        (["--gpus", "9"], "--gpus 9 is more than the 8 of a host of a100-80gb-node. Use more --hosts"),
        (["--mesh", "dp_shard"], "'--mesh': 'dp_shard': write each name once with its value, like dp_replicate=16"),
        (["--mesh", "dp_shard=8"], "--mesh has 8 ranks, and --gpus 1 x --hosts 1 says 1. Make them agree."),
        (["--folders", "0"], "--folders 0: use a number from 1 to 64"),
        (["--machine", "", "--folders", "2"], "--folders 2 is a number: of this machine, name the folders themselves."),
        (["--options", "tile_byte=1"], "--options has no 'tile_byte'. Did you mean 'tile_bytes'?"),
        (["--compare", "a", "b", "--json"], "--compare prints no JSON"),
        (["--out", "no/p.json"], "--out 'no/p.json' cannot be written: its folder is none"),
        (["--trace", "described"], "--trace 'described' cannot be written: it is no file."),
        (["--optimizer-args", "epsilon=1"], "--optimizer-args: adamw does not take them: "),
        (["--model", "missing"], "--model 'missing' is neither a folder, a preset nor owner/name of a hub."),
    ],
)
def test_what_is_wrong_is_one_line_before_a_model_is_built(
    command: Command, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]], words: list[str], said: str
) -> None:
    monkeypatch.setattr(planning, "build_sketch", lambda *rest, **named: pytest.fail("a model was built"))
    outcome = command(*words)
    assert outcome.exit_code == 2
    assert outcome.err.startswith("penstock: error: ")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    assert asked == []


def test_folders_need_figures_of_disks(command: Command, asked: list[dict[str, Any]], bare: Callable[..., str]) -> None:
    machine = ["--machine", bare("disk", "folders")]
    said = "--folders: the machine bare has no figure disk_read. Say it with --what-if disk_read=..., or use a machine"
    assert command(*machine, "--folders", "2").err.startswith(f"penstock: error: {said}")
    said = "--optimizer puts state on nvme, and the machine has no folder. Name some: --folders."
    assert command(*machine, "--optimizer", "nvme").err == f"penstock: error: {said}\n"
    assert command(*machine).exit_code == 0
    assert [seen["precision"] for seen in asked] == ["fp32"]


def test_this_machine_is_probed_where_none_is_named(
    penstock_command: Command, monkeypatch: pytest.MonkeyPatch, described: Path, asked: list[dict[str, Any]]
) -> None:
    meant: list[Any] = []

    def machine_for(*arguments: Any) -> Machine:
        meant.append(arguments)
        return Machine.read("cpu-laptop")

    monkeypatch.setattr(planning, "machine_for", machine_for)
    outcome = penstock_command("plan", "--model", "described", "--batch", "2x16", "--folders", "/a", "--json")
    assert outcome.err == "penstock: this machine is measured, unless it was before; about a minute\n"
    assert meant == [(None, ("/a",))]
    assert asked[0]["folders"] == ("/a",)
    json.loads(outcome.out)  # and nothing beside it


def test_weights_of_a_hub_are_not_fetched(monkeypatch: pytest.MonkeyPatch, described: Path) -> None:
    from penstock.integrations.huggingface import build_sketch, find_model

    fetched: list[Any] = []

    def snapshot(name: str, **named: Any) -> str:
        fetched.append((name, named["allow_patterns"]))
        return str(described)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    source = find_model("owner/name", seq_length=16, needs_weights=False)
    assert [name for name, _ in fetched] == ["owner/name"]
    assert "*.json" in fetched[0][1]
    assert "*.safetensors" not in fetched[0][1]
    model = build_sketch(source)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(ConfigError, match=r"has no \.safetensors weights"):
        find_model(str(described), seq_length=16)


def test_what_is_computed_in_follows_from_the_machine() -> None:
    node, laptop = Machine.read("h100-node"), Machine.read("cpu-laptop")
    old = Machine("old", "cuda", {name: node.figures[name] for name in ("flops_float32", "device_memory")})
    assert [precision_on(machine, "auto") for machine in (node, laptop, old)] == ["bf16", "fp32", "fp32"]
    assert [precision_on(machine, "fp16") for machine in (node, laptop)] == ["fp16", "fp16"]


def test_the_page_has_every_option_under_its_heading() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan-command.md").read_text().partition("## Options")[2]
    headings = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))
    headings[""] = page.partition("###")[0]
    found = {
        name: re.findall(r"`(--[a-z-]+)`", "".join(re.findall(r"^\|([^|]*)", text, re.MULTILINE)))
        for name, text in headings.items()
    }
    wanted: dict[str, list[str]] = {}
    group: Any = typer.main.get_command(app)
    for each in group.commands["plan"].params:
        wanted.setdefault(each.rich_help_panel or "", []).append(each.opts[0])
    assert found == wanted
