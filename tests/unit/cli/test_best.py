"""The lowest held-out loss: what counts, what a run goes back to, when it stops, and what a resume knows of it."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.format import MARKER
from penstock.cli.training.learning.best import Best
from penstock.cli.training.learning.evaluation import Evaluations, Measured

RUN = ["--precision", "fp32", "--seq-length", "16", "--batch-size", "1", "--eval-sequences", "1", "--steps", "6"]
RUN += ["--log-every", "1", "--sample-tokens", "0", "--lr", "0.01", "--warmup", "1", "--eval-every", "1"]
FALLING = {0: 0.5, 1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0, 5: 1.0, 6: 0.9}


def test_what_counts() -> None:
    best = Best()
    counted = [(1, math.nan), (2, 3.0), (2, 1.0), (3, math.inf), (4, 3.0), (5, 2.5), (6, -math.inf), (7, math.nan)]
    assert [best.count(*each) for each in counted] == [False, True, False, False, False, True, False, False]
    assert best == Best(loss=2.5, step=5, counted_step=7, since_count=2)
    assert Best.of(best.to_dict()) == best
    assert Best.of(Best().to_dict()) == Best()


@pytest.mark.parametrize(
    "change",
    [{"loss": 3}, {"loss": math.nan}, {"loss": "3"}, {"step": True}, {"step": -1}, {"since_count": 1.0}, {"more": 1}],
)
def test_what_a_checkpoint_says_is_checked(change: dict[str, Any]) -> None:
    assert Best.of(Best().to_dict() | change) is None
    assert Best.of(3) is None


@pytest.fixture
def train(
    penstock_command: Callable[..., Any],
    model_folder: Path,
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Train with planned held-out losses; gives what the command said, and the weights that each evaluation saw."""

    def run(plan: Mapping[int, float], *arguments: str, out: str = "out") -> tuple[Any, dict[int, dict[str, Tensor]]]:
        seen: dict[int, dict[str, Tensor]] = {}

        def measure(self: Evaluations, step: int, best: Best | None = None) -> Measured:
            seen[step] = {name: p.detach().clone() for name, p in self._model.named_parameters()}
            is_best = None if best is None else best.count(step, plan[step])
            self._reports.evaluation(step, plan[step], 0.0, token_name="byte", is_best=is_best)
            return Measured(plan[step], is_best)

        monkeypatch.setattr(Evaluations, "measure", measure)
        common = ["train", "--model", str(model_folder), "--data", str(text_folder), *RUN, "--out", out]
        return penstock_command(*common, *arguments), seen

    return run


def assert_model_is(out: Path, wanted: dict[str, Tensor]) -> None:
    saved = load_file(out / "model.safetensors")
    for name, value in wanted.items():
        assert torch.equal(saved[name], value), name


def steps(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "step"]


def test_the_run_ends_with_the_weights_of_its_lowest_loss(train: Callable[..., Any], tmp_path: Path) -> None:
    """The model as it was before the first step is not among them, however good it was."""
    outcome, seen = train(FALLING | {3: 0.7, 5: math.nan}, "--keep-best")
    assert outcome.exit_code == 0, outcome.err
    assert "back to step 3, whose held-out loss 0.7000 is the lowest" in outcome.out
    assert_model_is(tmp_path / "out", seen[3])
    assert not torch.equal(seen[3]["model.norm.weight"], seen[6]["model.norm.weight"])
    end = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (end["loss_before"], end["loss_after"]) == (0.5, 0.7)
    assert (tmp_path / "out" / "best" / MARKER).is_file()


@pytest.mark.parametrize("plan", [FALLING, dict.fromkeys(range(7), math.nan)])
def test_nothing_is_loaded_where_the_last_step_is_the_best_or_none_is(
    train: Callable[..., Any], tmp_path: Path, plan: dict[int, float]
) -> None:
    outcome, seen = train(plan, "--keep-best")
    assert outcome.exit_code == 0, outcome.err
    assert "back to" not in outcome.out
    assert "was lowest after" not in outcome.out
    assert_model_is(tmp_path / "out", seen[6])


def test_it_stops_early_and_the_resume_does_not_train_on(train: Callable[..., Any], tmp_path: Path) -> None:
    plan = {0: 9.0, 1: 3.0, 2: 4.0, 3: math.nan, 4: 1.0}
    arguments = ["--early-stop", "2", "--save-every", "100", "--resume", "auto"]
    outcome, seen = train(plan, *arguments)
    assert outcome.exit_code == 0, outcome.err
    assert "stops early: the last 2 evaluations did not lower the held-out loss" in outcome.out
    assert steps(tmp_path / "out") == [1, 2, 3]
    assert_model_is(tmp_path / "out", seen[1])
    again, _ = train(plan, *arguments)
    assert again.exit_code == 0, again.err
    assert steps(tmp_path / "out") == [1, 2, 3]
    assert_model_is(tmp_path / "out", seen[1])
    longer, _ = train(FALLING, *arguments, "--early-stop", "4")
    assert longer.exit_code == 0, longer.err
    assert steps(tmp_path / "out") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("harm", ["missing", "damaged", "torn", "another", "none"])
def test_a_resume_knows_the_lowest_loss_whatever_became_of_its_checkpoint(
    train: Callable[..., Any], tmp_path: Path, harm: str
) -> None:
    plan = FALLING | {1: 0.1}
    outcome, first = train(plan, "--keep-best", "--save-every", "2")
    assert outcome.exit_code == 0, outcome.err
    best, checkpoints = tmp_path / "out" / "best", tmp_path / "out" / "checkpoints"
    if harm != "torn":  # that one makes no step: what it loads is not verified unless it is asked for
        shutil.rmtree(checkpoints / "step-00000006")
    if harm == "missing":
        shutil.rmtree(best)
    elif harm == "damaged":
        (best / MARKER).write_bytes(b"{")
    elif harm == "torn":  # seen when it is read whole, and nothing is taken of it then
        file = next(best.glob("*.tiles"))
        file.write_bytes(bytes(file.stat().st_size))
    elif harm == "another":
        shutil.rmtree(best)
        shutil.copytree(checkpoints / "step-00000004", best)
    resumed, seen = train(plan, "--keep-best", "--resume", "auto")
    assert resumed.exit_code == 0, resumed.err
    assert sorted(seen) == ([4, 5, 6] if harm != "torn" else [6])
    if harm == "none":
        assert "back to step 1, whose held-out loss 0.1000 is the lowest" in resumed.out
        assert_model_is(tmp_path / "out", first[1])
        return
    assert ("The lowest held-out loss stays 0.1000, after step 1" in resumed.out) == (harm != "torn")
    assert "the held-out loss was lowest after step 1; the model is of the last step. " in resumed.out
    assert str(Path("out", "best")) in resumed.out
    assert_model_is(tmp_path / "out", seen[6])
    for name, value in first[6].items():
        assert torch.equal(seen[6][name], value), name
