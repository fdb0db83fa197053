"""`OUT/run.yaml` makes the run again, to the bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.instruct import chat_file, conversations, instruct_folder

RUN = ["--seq-length", "48", "--batch-size", "2", "--log-every", "1", "--sample-tokens", "0", "--eval-sequences", "4"]
RUN += ["--precision", "fp32", "--steps", "4", "--lr", "3e-3"]
ADAPTERS = ["--lora", "r=2,alpha=4,base=int8"]
WEIGHTS = ["--data", "one.jsonl:0.7", "two.jsonl:0.3", "--eval-data", "held.jsonl", "--packing", "off"]
OPTIMIZER = ["--optimizer-name", "sgd", "--optimizer-args", "momentum=0.9", "nesterov=true"]
ONE = ["--data", "one.jsonl"]
#: What each run has beside that.
ODD = [
    pytest.param([*ADAPTERS, *WEIGHTS, *OPTIMIZER], id="adapters, weights, optimizer"),
    pytest.param([*ONE, "--warmup", "0.3", "--schedule", "wsd", "--seed", "5"], id="all", marks=pytest.mark.thorough),
    pytest.param([*ONE, *ADAPTERS], id="adapters", marks=pytest.mark.thorough),
    pytest.param([*ONE, *OPTIMIZER], id="optimizer", marks=pytest.mark.thorough),
]


def numbers(out: Path) -> list[list[Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line.get(name) for name in ("event", "step", "loss", "grad_norm", "lr")] for line in lines]


@pytest.mark.parametrize("asked", ODD)
def test_the_file_of_a_run_makes_the_same_losses(
    penstock_command: Callable[..., Any], tmp_path: Path, asked: list[str]
) -> None:
    instruct_folder(tmp_path / "m")
    rows = conversations(24)
    for name, part in (("one", rows[:10]), ("two", rows[10:18]), ("held", rows[18:])):
        chat_file(tmp_path / f"{name}.jsonl", part)
    outcome = penstock_command("train", "--model", "m", "--out", "first", *RUN, *asked)
    assert outcome.exit_code == 0, outcome.err
    outcome = penstock_command("train", "--config", "first/run.yaml", "--out", "again")
    assert outcome.exit_code == 0, outcome.err
    first, again = numbers(tmp_path / "first"), numbers(tmp_path / "again")
    assert len([line for line in first if line[0] == "step"]) == 4
    assert again == first
    # And the file of the second one is that of the first, but for where it was made.
    texts = [(tmp_path / out / "run.yaml").read_text().partition("\n# Where it was")[0] for out in ("first", "again")]
    assert texts[1] == texts[0].replace("out: first", "out: again")
