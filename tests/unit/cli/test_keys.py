"""A file of options: what it may say, what wins, and what anybody may put into one."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.keys import values_in
from penstock.cli.options import options_of
from penstock.cli.training.config import DataConfig, TrainConfig
from penstock.errors import ConfigError

from .test_surface import settings_of_runs

YAML = """
lr: 1e-3
max-grad-norm: 0
steps: 30
weight_decay: 0
recompute: on
packing: off
activations: off
compile: true
data: [a.jsonl:0.7, b.parquet:0.3]
prompt: hello
out: runs/first
optimizer: {device: 0.5, cpu: 0.5}
params: cpu
betas: [0.8, 0.9]
tile_bytes: 4MiB
live_bytes: 8192
streamed_updates: 0.5
warmup: 0.03
update_threads: "3"
batch_size: null
about: {date: today, steps: [1, 2]}
"""
SAYS: dict[str, Any] = {
    "lr": 1e-3,
    "max_grad_norm": None,
    "steps": 30,
    "weight_decay": 0.0,
    "recompute": "on",
    "packing": "off",
    "activations": "off",
    "compile": True,
    "data": ("a.jsonl:0.7", "b.parquet:0.3"),
    "prompt": ("hello",),
    "out": Path("runs/first"),
    "optimizer": {"device": 0.5, "cpu": 0.5},
    "params": "cpu",
    "betas": (0.8, 0.9),
    "tile_bytes": 2**22,
    "live_bytes": 8192,
    "streamed_updates": 0.5,
    "warmup": 0.03,
    "update_threads": 3,
}


def read(path: Path, text: str | bytes) -> dict[str, Any]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return values_in(path, options_of(TrainConfig))


def test_yaml(tmp_path: Path) -> None:
    values = read(tmp_path / "run.yaml", YAML)
    assert values == SAYS
    assert {name: type(value) for name, value in values.items()} == {name: type(value) for name, value in SAYS.items()}


def test_json_and_toml(tmp_path: Path) -> None:
    said = {"lr": 0.5, "data": ["a"], "grads": {"cpu": 1}, "chunked_loss": "on", "compile": False}
    values = {"lr": 0.5, "data": ("a",), "grads": {"cpu": 1.0}, "chunked_loss": "on", "compile": False}
    assert read(tmp_path / "run.json", json.dumps(said)) == values
    assert read(
        tmp_path / "run.toml", 'lr = 0.5\ndata = ["a"]\nchunked_loss = "on"\ncompile = false\n[grads]\ncpu = 1\n'
    ) == (values)


def test_what_is_typed_wins(penstock_command: Callable[..., Any], monkeypatch: Any, tmp_path: Path) -> None:
    configs = settings_of_runs(monkeypatch)
    (tmp_path / "run.yaml").write_text(YAML)
    assert penstock_command("train", "--config", "run.yaml").exit_code == 0
    assert configs.pop() == TrainConfig(**SAYS)
    # Also where it is the default, and a list in the place of the file's.
    words = ["--data", "c", "--weight-decay", "0.1", "--recompute", "off", "--max-grad-norm", "1"]
    assert penstock_command("train", *words, "--config=run.yaml").exit_code == 0
    typed = {"data": ("c",), "weight_decay": 0.1, "recompute": "off", "max_grad_norm": 1.0}
    assert configs.pop() == TrainConfig(**SAYS | typed)


@pytest.mark.parametrize(
    ("typed", "left_out"), [("--epochs", "steps"), ("--steps", "epochs"), ("--global-batch", "accumulation")]
)
def test_what_is_typed_takes_the_place_of_what_says_the_same(
    penstock_command: Callable[..., Any], monkeypatch: Any, tmp_path: Path, typed: str, left_out: str
) -> None:
    configs = settings_of_runs(monkeypatch)
    (tmp_path / "run.yaml").write_text(f"{left_out}: 7\n")
    assert penstock_command("train", "--config", "run.yaml", typed, "32").exit_code == 0
    assert configs == [TrainConfig(**{typed[2:].replace("-", "_"): 32})]


def test_a_look_at_the_data_of_a_run_reads_its_file(
    penstock_command: Callable[..., Any], monkeypatch: Any, tmp_path: Path
) -> None:
    configs: list[DataConfig] = []
    monkeypatch.setattr("penstock.cli.training.looking.look", configs.append)
    (tmp_path / "run.yaml").write_text(YAML)
    outcome = penstock_command("data", "--config", "run.yaml", "--show", "1", "--packing")
    assert outcome.exit_code == 0, outcome.err
    assert configs == [DataConfig(data=SAYS["data"], packing="on", show=1)]
    (tmp_path / "run.yaml").write_text("learning_rate: 3")
    assert penstock_command("data", "--config", "run.yaml").exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1]", ": steps is [1]. Use a whole number."),
        ("steps: 1.5", ": steps is 1.5. Use a whole number."),
        ("steps: true", ": steps is true. Use a whole number."),
        ("steps: many", ": steps is 'many'. Use a whole number."),
        ("seed: null", ": seed is null. Use a whole number."),
        ("lr: {a: b}", ": lr is {'a': 'b'}. Use a number."),
        ("lr: .nan", ": lr is nan. Use a number."),
        (f"lr: {10**4000}", " is not read: it has a number of 4,001 digits."),
        ("max_grad_norm: null", ": max_grad_norm is null. Use a number."),
        ("lr: -1", ": --lr -1 does not train. Use a number above 0."),
        ("precision: 16", ": precision is 16. Use one of auto, fp32, bf16, fp16."),
        ("precision: fp64", ": --precision 'fp64': use one of auto, fp32, bf16, fp16."),
        ("compile: 1", ": compile is 1. Use true or false."),
        ("out: 5", ": out is 5. Use what is typed, as text."),
        ("model: 5", ": model is 5. Use text, in quotes."),
        ("data: 7", ": data is 7. Use a list of texts."),
        ("data: [a, 7]", ": data has 7 in its list. Use texts, in quotes."),
        ("tile_bytes: 4 parsecs", ": --tile-bytes '4 parsecs' is not a size."),
        ("optimizer: {cpu: x}", ": optimizer is {'cpu': 'x'}. Use what is typed, as text."),
        ("betas: [0.9]", ": --betas '0.9' is not two numbers."),
        ("date: 2024-01-01", ": there is no option 'date'. Did you mean 'data'?"),
        ("data: 2024-01-01", ": data is datetime.date(2024, 1, 1). Use a list of texts."),
        ("batch-sise: 3", ": there is no option 'batch-sise'. Did you mean 'batch-size'?"),
        ("batch_sise: 3", ": there is no option 'batch_sise'. Did you mean 'batch_size'?"),
        ("zebra: 3", ": there is no option 'zebra'. See --help."),
        ("options: {tile_bytes: 3}", ": there is no option 'options'."),
        ("config: run.yaml", ": there is no option 'config'."),
        ("jsonl_field: x", " has no option 'jsonl_field': it is called 'text_field' now."),
        ("3: x", ": the key 3 is no name of an option. See --help."),
        ("batch-size: 3\nbatch_size: 3", " has 'batch_size' twice, with a dash and with an underscore. Leave one out."),
        ("steps: 3\nsteps: 3", " is not read: it has the key 'steps' twice: leave one out."),
        ("optimizer: {cpu: 1, cpu: 1}", " is not read: it has the key 'cpu' twice: leave one out."),
        ("a: &a {steps: 1}\n<<: [*a, *a]", " is not read: it repeats a part by the alias *a: write it out."),
        ("- steps", " is not read: it is ['steps'] in YAML, not a mapping."),
        ("", " is not read: it is None in YAML, not a mapping."),
        (
            "steps: !!python/object/apply:os.system [true]",
            " is not read: it is no YAML: could not determine a constructor",
        ),
        ("data: " + "[" * 900, " is not read: "),
        ("steps: {", " is not read: "),
        (b"steps: \xff", " is not read: "),
        ("steps: 3 # " + "x" * (1 << 20), " is not read: it has more than 1,048,576 bytes."),
        ("data: &a [*a]", " is not read: it repeats a part by the alias *a: write it out."),
        ("data: [[a]]", ": data has ['a'] in its list."),
        (
            "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]),
            " is not read: it repeats a part by the alias *a0: write it out.",
        ),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_what_a_file_may_not_say(
    penstock_command: Callable[..., Any], tmp_path: Path, text: str | bytes, message: str
) -> None:
    (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    outcome = penstock_command("train", "--config", "run.yaml")
    assert outcome.exit_code == 2
    assert re.match(re.escape(f"penstock: error: run.yaml{message}"), outcome.err), outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", '{"steps": 1, "steps": 2}', " is not read: it has the key 'steps' twice: leave one out."),
        ("run.json", "[" * 100_000, " is not read: "),
        ("run.json", '{"lr": NaN}', " is not read: it has NaN, which is no number of JSON"),
        ("run.toml", "steps = 1\nsteps = 2", " is not read: "),
        ("run.toml", "lr = 0x" + "f" * 5000, " is not read: it has a number of 20000 bits."),
    ],
)
def test_what_json_and_toml_may_not_say(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}{message}")):
        read(tmp_path / name, text)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="is no file"):
        values_in(tmp_path / "run.yaml", options_of(TrainConfig))


def test_an_error_of_what_was_typed_does_not_name_the_file(
    penstock_command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("steps: 3")
    outcome = penstock_command("train", "--config", "run.yaml", "--lr", "-1")
    assert outcome.err == "penstock: error: --lr -1 does not train. Use a number above 0.\n"
