"""`penstock train --plan`: found or read, the same on every rank, done, and held against what was measured."""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import ConfigError, MemoryBudgetError, Placement
from penstock.cli.training import planning
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.optimizer import Preparation
from penstock.cli.training.planning import about_batch, micro_batch, shared
from penstock.cli.training.recipe import Recipe
from penstock.planner import Plan
from penstock.recompute import recomputes
from tests.plans import plan as desktop
from tests.plans import too_large

RUN = ["--seq-length", "16", "--batch-size", "2", "--accumulation", "2", "--precision", "fp32", "--log-every", "4"]
RUN += ["--eval-sequences", "0", "--sample-tokens", "0", "--steps", "8"]
RECIPE = Recipe(seq_length=16, lr=1e-3, batch_size=2, accumulation=2, world_size=1)


def small(**changes: Any) -> Plan:
    """A plan for the small model on a cpu, with a step that nobody will measure."""
    here = {"device": "cpu", "machine_fingerprint": {}, "batch": "2 of 2x16 int64, 2x16 int64"}
    here |= {"precision": "fp32", "placement": Placement(params="cpu", grads="cpu", optimizer="cpu")}
    return desktop(**(here | {"busy_s": {"device compute": 3.5, "host update": 1e-3}, "recompute": False} | changes))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the planner was asked; it answers with `small()`. `prepare` does by hand what the plan says."""
    seen: list[dict[str, Any]] = []

    def plan(model: Any, optimizer: Any, batch: Callable[[], Any], **arguments: Any) -> Plan:
        told = recomputes(model)
        seen.append({"model": model, "batch": batch(), "told": told, **arguments})
        return small()

    monkeypatch.setattr(planning, "plan", plan)
    return seen


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[penstock.Optimizer]:
    """What came out of `penstock.prepare`."""
    seen: list[penstock.Optimizer] = []
    prepare = penstock.prepare

    def watched(*given: Any, **named: Any) -> penstock.Optimizer:
        seen.append(prepare(*given, **named))
        return seen[-1]

    monkeypatch.setattr(penstock, "prepare", watched)
    return seen


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_a_run_finds_its_plan_does_it_keeps_it_and_is_held_against_it(
    penstock_command: Callable[..., Any],
    model_folder: Path,
    text_folder: Path,
    tmp_path: Path,
    asked: list[dict[str, Any]],
    prepared: list[penstock.Optimizer],
) -> None:
    words = ["train", "--model", str(model_folder), "--data", str(text_folder), *RUN]
    outcome = penstock_command(*words, "--plan", "auto", "--out", "first")
    assert outcome.exit_code == 0, outcome.err
    (question,) = asked
    assert {name: question[name] for name in ("precision", "stage", "micro_batches", "world_size", "hosts")} == {
        "precision": "fp32",
        "stage": 3,
        "micro_batches": 2,
        "world_size": 1,
        "hosts": 1,
    }
    assert "placement" not in question
    shapes = {name: tuple(value.shape) for name, value in question["batch"].items() if torch.is_tensor(value)}
    assert shapes == dict.fromkeys(("input_ids", "labels", "position_ids"), (2, 16))
    assert prepared[0].plan == small()
    assert Plan.read("first/plan.json") == small()
    assert "plan: first/plan.json\n" in Path("first/run.yaml").read_text()

    before, after = [part.start() for part in re.finditer(r"^plan: step 4\.12 s", outcome.out, re.MULTILINE)]
    assert before < outcome.out.index("step 4/8") < after
    told = outcome.out[after:]
    assert re.search(r"^ +predicted +measured", told, re.MULTILINE)
    assert re.search(r"^differs: step: .* measured, 4\.12 s predicted \(-\d+ %\)$", told, re.MULTILINE)
    assert re.search(r"^differs: device compute: ", told, re.MULTILINE)

    # The same by hand, and again of the run's own file, which searches no more.
    by_hand = penstock_command(*words, "--params", "cpu", "--grads", "cpu", "--optimizer", "cpu", "--out", "hand")
    again = penstock_command("train", "--config", "first/run.yaml", "--out", "again")
    assert (by_hand.exit_code, again.exit_code, len(asked)) == (0, 0, 1), by_hand.err + again.err
    assert losses(tmp_path / "first") == losses(tmp_path / "hand") == losses(tmp_path / "again") != []
    assert "plan:" not in by_hand.out


def test_a_dry_run_shows_the_plan_and_makes_nothing(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, asked: list[dict[str, Any]]
) -> None:
    words = ["train", "--model", str(model_folder), "--data", str(text_folder), *RUN, "--dry-run", "--plan", "auto"]
    outcome = penstock_command(*words)
    assert outcome.exit_code == 0, outcome.err
    assert "fits: yes     step 4.12 s" in outcome.out
    assert "at once, on this rank" in outcome.out
    assert "activations of a micro-batch" not in outcome.out  # an estimate beside the plan's own number
    assert not Path("penstock-out/plan.json").exists()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: small(world_size=2), "The plan is for world size 2, this run has 1: plan again"),
        (lambda: small(stage=1), "The plan is for stage 1, this run has 3"),
        (lambda: small(precision="bf16"), "The plan is for precision bf16, this run has fp32"),
        (lambda: too_large(placement=Placement(), precision="fp32", machine_fingerprint={}), "The plan does not fit: "),
        (lambda: small(model_fingerprint="1 tensors"), "The plan is for a model of 1 tensors"),
    ],
)
def test_a_plan_of_another_run_is_refused_before_the_data(
    penstock_command: Callable[..., Any],
    model_folder: Path,
    text_folder: Path,
    tmp_path: Path,
    made: Callable[[], Plan],
    said: str,
) -> None:
    (tmp_path / "p.json").write_text(made().to_json())
    words = ["--model", str(model_folder), "--data", str(text_folder), *RUN, "--plan", "p.json"]
    outcome = penstock_command("train", *words)
    assert outcome.exit_code == 2
    assert outcome.err.startswith(f"penstock: error: {said}")
    assert outcome.err.count("\n") == 1
    assert not Path("penstock-out/cache").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--overlap", "none"], "--overlap is 'none' here and 'forward' in the plan. Leave it out"),
        (["--tile-bytes", "8KiB"], "--tile-bytes is 8192 here and "),
    ],
)
def test_what_contradicts_a_plan_is_named_as_an_option(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, words: list[str], said: str
) -> None:
    Path("p.json").write_text(small().to_json())
    run = ["--model", str(model_folder), "--data", str(text_folder), *RUN, "--plan", "p.json", *words]
    outcome = penstock_command("train", *run)
    assert (outcome.exit_code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith(f"penstock: error: {said}")


@pytest.mark.parametrize("name", ["params", "grads", "optimizer", "activations"])
def test_a_plan_beside_a_home_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--plan says where state lives, and so does --{name}\. Leave one of them out\.$"
    ):
        TrainConfig(plan="auto", **{name: "nvme"}, nvme_path=("d",))  # type: ignore[arg-type]


def test_what_is_typed_wins_over_a_file_of_options_where_one_says_a_plan_and_the_other_a_home(
    penstock_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configs: list[TrainConfig] = []
    monkeypatch.setattr("penstock.cli.training.run.run", lambda config, interruption: not configs.append(config))
    (tmp_path / "homes.yaml").write_text("params: cpu\nactivations: cpu\nstage: 2\n")
    (tmp_path / "plan.yaml").write_text("plan: auto\nstage: 2\n")
    assert penstock_command("train", "--config", "homes.yaml", "--plan", "auto").exit_code == 0
    assert penstock_command("train", "--config", "plan.yaml", "--params", "cpu").exit_code == 0
    assert configs == [TrainConfig(plan="auto", stage=2), TrainConfig(params="cpu", stage=2)]


def preparation() -> Preparation:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    arguments = {"placement": None, "precision": "fp32", "options": penstock.Options(), "overlap": "auto", "stage": 3}
    return Preparation(model, optimizer, arguments)


@pytest.mark.parametrize(
    ("asked_for", "planned", "told_before", "told_after"),
    [("off", False, False, False), ("off", True, False, True), ("on", False, True, True), ("auto", True, False, True)],
)
def test_the_model_is_told_to_recompute_where_the_plan_or_the_user_says_so(
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    asked_for: str,
    planned: bool,
    told_before: bool,
    told_after: bool,
) -> None:
    given, config = preparation(), TrainConfig(recompute=asked_for, plan="auto")
    answer = planning.plan
    monkeypatch.setattr(planning, "plan", lambda *args, **kw: replace(answer(*args, **kw), recompute=planned))
    chosen = planning.plan_for(given, config, RECIPE, None, packed=False, hosts=1)
    made = planning.planned(given, chosen, config)
    assert asked[0]["told"] is told_before
    assert (chosen.recompute, recomputes(made.model)) == (told_after, told_after)


def test_folders_of_the_run_take_the_place_of_those_of_a_plan(tmp_path: Path) -> None:
    tiers = Placement(optimizer="nvme", nvme_path=("nvme0", "nvme1"))
    (tmp_path / "p.json").write_text(small(placement=tiers).to_json())
    config = TrainConfig(plan=str(tmp_path / "p.json"), nvme_path=("/a", "/b"))
    chosen = planning.plan_for(preparation(), config, RECIPE, None, packed=False, hosts=1)
    assert chosen.placement == replace(tiers, nvme_path=("/a", "/b"))


@pytest.mark.parametrize(
    ("planned_for", "said"),
    [("2 of 2x16 int64, 2x16 int64", ""), ("", ""), ("2x16 int64", "2 of 2x16"), ("2 of 2x160 int64", "2 of 2x16")],
)
def test_a_plan_of_other_batches_is_said(planned_for: str, said: str) -> None:
    note = about_batch(small(batch=planned_for), RECIPE)
    assert note == (
        said and f"the plan is for batches of {planned_for}; this run has {said}: its steps and its peaks are others"
    )


def test_a_micro_batch_has_the_tensors_that_the_run_gives_its_model() -> None:
    packed, padded, one = (micro_batch(count, 6, packed=kind) for count, kind in ((2, True), (2, False), (1, False)))
    assert packed.attention_mask is None
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert padded.position_ids is None
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert one.attention_mask is None
    assert (packed.input_ids.dtype, packed.labels.shape) == (torch.int64, (2, 6))


class Wire:
    """What the first rank broadcasts, for the others to get in turn."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_first = True

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            self.sent.append(values.clone())
        else:
            values.copy_(self.sent.pop(0))
        return values


def test_every_rank_has_the_plan_of_the_first_one() -> None:
    wire: Any = Wire()
    chosen = small(step_s=0.1 + 0.2, step_range_s=(0, 1), bound_by="ünïcode")
    assert shared(chosen, wire) is chosen
    wire.is_first = False
    assert shared(None, wire) == chosen
    assert wire.sent == []


def test_ranks_on_hosts_are_counted() -> None:
    from penstock.cli.ranks import Ranks

    assert Ranks.from_environment({"RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}).hosts == 2
    assert Ranks.from_environment({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}).hosts == 1
    assert Ranks.from_environment({"WORLD_SIZE": "4"}).hosts == 1


def test_others_than_the_first_rank_ask_for_no_plan_and_know_of_no_room(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    from penstock.cli.ranks import Ranks
    from penstock.cli.training.interruption import Interruption
    from penstock.cli.training.run import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "penstock.cli.training.run.check_fits", lambda *rest: (_ for _ in ()).throw(MemoryBudgetError("no room"))
    )
    monkeypatch.setattr(Ranks, "from_environment", classmethod(lambda cls: Ranks(1, 2, torch.device("cpu"))))
    monkeypatch.setattr("penstock.cli.training.run.joined", lambda ranks: contextlib.nullcontext())
    monkeypatch.setattr("penstock.cli.training.run.machine_of", lambda ranks, config: None)
    config = TrainConfig(model=str(model_folder), data=(str(text_folder),), seq_length=16, plan="auto", dry_run=True)
    assert run(config, Interruption(speaks=False))
    assert asked == []
