"""Runs on conversations: dry, with adapters, with prompts that a user says; and what `penstock data` shows of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.instruct import ANSWER, QUESTION

RUN = ["--precision", "fp32", "--seq-length", "128", "--batch-size", "4", "--steps", "2", "--eval-sequences", "4"]
RUN += ["--sample-tokens", "3", "--log-every", "1"]


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def train(penstock_command: Callable[..., Any], instruct_model: Path, chats: Path) -> Callable[..., Any]:
    def run(*arguments: str) -> Any:
        return penstock_command("train", "--model", str(instruct_model), "--data", str(chats), *RUN, *arguments)

    return run


def test_a_dry_run_says_what_it_takes_and_writes_nothing_but_the_cache(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    outcome = train("--out", "out", "--dry-run")
    assert outcome.exit_code == 0, outcome.err
    assert "50 rows (50 of messages) of 1 source" in outcome.out
    assert "activations of a micro-batch" in outcome.out
    assert "nothing is wrong with this run" in outcome.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cache"]


def test_a_dry_run_changes_nothing_of_an_earlier_run(train: Callable[..., Any], tmp_path: Path) -> None:
    assert train("--out", "out", "--save-every", "2").exit_code == 0
    before = files(tmp_path / "out")
    assert {"metrics.jsonl", "run.yaml", "model.safetensors"} <= before.keys()
    for status, arguments in ((0, []), (2, ["--device-bytes", "1000"]), (2, ["--lora", "r=0"]), (0, ["--lora", "r=2"])):
        outcome = train("--out", "out", "--dry-run", *arguments)
        assert outcome.exit_code == status, outcome.err
        assert outcome.err.count("penstock: error: ") == (status == 2)
        assert files(tmp_path / "out") == before, arguments


def test_adapters_are_merged_into_the_model_and_lie_beside_it(
    train: Callable[..., Any], tmp_path: Path, instruct_model: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    outcome = train("--out", "out", "--lora", "r=2", "--lr", "0.1", "--prompt", QUESTION)
    assert outcome.exit_code == 0, outcome.err
    ids = torch.arange(20)[None]
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    plain: Any = AutoModelForCausalLM.from_pretrained(instruct_model, local_files_only=True)
    assert {name: p.shape for name, p in merged.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }
    with torch.no_grad():
        assert not torch.equal(merged(ids).logits, plain(ids).logits)
    assert torch.equal(merged.model.embed_tokens.weight, plain.model.embed_tokens.weight), "the base is as it was"
    assert list((tmp_path / "out").glob("**/adapter_config.json"))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(instruct_model).chat_template
    start = events(tmp_path / "out", "start")[0]
    assert 0 < start["trained_count"] < start["parameter_count"]
    # What is asked is shown as it was typed, in a line of its own, and continued as a user's turn.
    assert {sample["prompt"] for sample in events(tmp_path / "out", "sample")} == {f"{QUESTION}\n"}


def test_data_shows_which_tokens_are_learned(
    penstock_command: Callable[..., Any], instruct_model: Path, chats: Path
) -> None:
    arguments = ["--model", str(instruct_model), "--data", str(chats), "--seq-length", "128", "--packing", "off"]
    outcome = penstock_command("data", *arguments, "--show", "2")
    assert outcome.exit_code == 0, outcome.err
    first, second = outcome.out.split("sequence ")[1:3]
    for shown in (first, second):
        asked = f"<|im_start|>user↵\n{QUESTION}<|im_end|>↵\n<|im_start|>assistant↵\n"
        assert f"{asked}⟦{ANSWER}<|im_end|>↵\n⟧" in shown
    assert "⟦Good day, guest 0.<|im_end|>" in first
    assert first.count("⟦") == 2
    assert second.count("⟦") == 1
    assert "chat.jsonl:1 (messages)" in first
    numbers = dict(re.split(r"\s{2,}", line) for line in outcome.out.splitlines() if re.search(r"\S\s{2,}\S+$", line))
    assert (numbers["rows of messages"], numbers["tokens lost"]) == ("50", "0")


def test_a_checkpoint_of_adapters_is_none_of_a_whole_model(
    penstock_command: Callable[..., Any], instruct_model: Path, chats: Path
) -> None:
    run = ["--model", str(instruct_model), "--data", str(chats), "--out", "out", "--sample-tokens", "0", "--steps", "2"]
    run += ["--eval-sequences", "0", "--seq-length", "64", "--save-every", "2"]
    assert penstock_command("train", *run, "--lora", "r=2").exit_code == 0
    outcome = penstock_command("train", *run, "--resume", "auto")
    assert outcome.exit_code == 2
    assert "is a checkpoint of adapters, and this run is of a whole model. Add --lora, or use" in outcome.err


def test_what_a_run_writes_is_no_data_of_it(
    penstock_command: Callable[..., Any], instruct_model: Path, chats: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    chats.rename(folder / "chat.jsonl")
    run = ["--model", str(instruct_model), "--data", str(folder), "--out", str(folder / "out"), "--steps", "1"]
    run += ["--sample-tokens", "0", "--eval-sequences", "0", "--seq-length", "64"]
    for _ in range(2):  # the second time there is a model, and what is told of it
        outcome = penstock_command("train", *run)
        assert outcome.exit_code == 0, outcome.err
        assert outcome.out.startswith("50 rows (50 of messages) of 1 source: ")
