"""The command line and the file beside it: fields of TRL's, Penstock's own, names of before, mistakes."""

import os
from pathlib import Path

import pytest

from penstock import Placement
from penstock.errors import ConfigError
from penstock.train import arguments
from penstock.train.arguments import Request, Source, parse, read_size, read_sources
from penstock.train.environment import is_local, prepare_environment
from penstock.train.run_file import OTHERWISE, RENAMED, advice_for

GIVEN = ["--model", "m", "--data", "d", "--use_cpu", "--bf16", "false"]


def parsed(*words: str, file: str | None = None, folder: Path | None = None) -> Request:
    given = [*GIVEN, *words]
    if file is not None and folder is not None:
        Path(folder, "run.yaml").write_text(file)
        given += ["--config", str(folder / "run.yaml")]
    return parse(given)


def test_fields_are_typed_with_dashes_or_underscores() -> None:
    found = parsed(
        "--learning-rate", "1e-5", "--max_steps=7", "--lora-r", "4", "--dry-run", "--no-remove-unused-columns"
    )
    assert (found.training.learning_rate, found.training.max_steps, found.model.lora_r) == (1e-5, 7, 4)
    assert found.penstock.dry_run
    assert not found.training.remove_unused_columns
    assert (found.model.model_name_or_path, found.sources) == ("m", (Source("d"),))
    assert parse(["--use_cpu"]).training.eval_on_start
    assert not parse(["--use_cpu", "--eval_strategy", "no"]).training.eval_on_start


def test_what_is_typed_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = "learning_rate: 3e-5\nmax_steps: 9\nout: there\npenstock: {params: cpu, options: {tile_bytes: 4MiB}}\n"
    found = parsed("--max_steps", "2", file=file, folder=tmp_path)
    assert (found.training.learning_rate, found.training.max_steps, found.training.output_dir) == (3e-5, 2, "there")
    assert (found.penstock.params, found.penstock.optimizer, found.penstock.stage) == ("cpu", "cpu", 3)
    assert found.penstock.to_options().tile_bytes == 4 << 20
    assert found.said["learning_rate"] == 3e-5
    placement = "placement: {optimizer: {cpu: 0.5, device: 0.5}, grads: cpu}"
    file = f"env: {{OF_THE_FILE: 1}}\npenstock:\n  stage: 2\n  {placement}\n"
    block = parsed(file=file, folder=tmp_path).penstock
    assert block.to_placement() == Placement(grads="cpu", optimizer={"cpu": 0.5, "device": 0.5})
    assert (block.stage, os.environ["OF_THE_FILE"]) == (2, "1")


def test_data_may_be_named_several_times_and_wins_over_the_file(tmp_path: Path) -> None:
    found = parsed("--data", "e:2", "f", file="data: [g, h]\n", folder=tmp_path)
    assert [source.name for source in found.sources] == ["d", "e", "f"]
    Path(tmp_path, "run.yaml").write_text("data: [g, h:2]\n")
    found = parse(["--model", "m", "--use_cpu", "--config", str(tmp_path / "run.yaml")])
    assert found.sources == (Source("g"), Source("h", 2.0))
    assert found.said["dataset_name"] == ["g", "h:2"]
    named = {"a.jsonl": ("a.jsonl", None), "b:3e-1": ("b", 0.3), "C:/rows": ("C:/rows", None), "*.txt": ("*.txt", None)}
    assert read_sources(list(named)) == tuple(Source(*source) for source in named.values())
    assert (read_sources("owner/name"), read_sources(None)) == ((Source("owner/name"),), ())


def test_a_run_without_a_model_has_defaults_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arguments, "DEFAULTS", {"max_steps": 400, "learning_rate": 2e-3})
    Path(tmp_path, "run.yaml").write_text("max_steps: 3\n")
    found = parse(["--use_cpu", "--config", str(tmp_path / "run.yaml")])
    assert found.is_default
    assert (found.training.max_steps, found.training.learning_rate) == (3, 2e-3)
    assert found.said == {"max_steps": 3, "learning_rate": 2e-3, "use_cpu": True}
    assert parsed().training.max_steps == -1


REFUSED: dict[str, tuple[list[str], str]] = {
    "an option that there is not": (
        ["--learning_rte", "1"],
        "--learning_rte: There is no such option. Did you mean learning_rate",
    ),
    "an option of 0.2": (["--lr", "1"], "--lr is an option of 0.2: use --learning_rate"),
    "a word that belongs to none": (["--seed", "1", "2"], "'2' belongs to no option"),
    "a value of another kind": (["--max_steps", "many"], "max_steps"),
    "values that contradict each other": (["--fp16", "--bf16", "true"], "fp16 and bf16"),
    "a measure without rows": (["--eval_on_start"], "--eval_on_start needs held-out rows"),
    "a tier that there is not": (["--params", "moon"], "moon"),
    "fractions that are none": (["--params", "device=half,cpu=half"], "device=0.6,cpu=0.4"),
    "a plan beside tiers": (["--plan", "p.json", "--params", "cpu"], "--plan chooses the tiers, and so does --params"),
    "two plans": (["--plan", "p.json", "--placement", "auto"], "--placement chooses the tiers, and so does --plan"),
    "an option of Penstock's": (["--options", "tile_byte=1"], "Did you mean tile_bytes"),
    "a size": (["--max_device_bytes", "many"], "--max_device_bytes 'many' is not a size"),
    "a rule": (["--rule", "sgd"], "--rule 'sgd': use muon or lion"),
}
OF_FILES = {
    "learning_rte: 1\n": "Did you mean learning_rate",
    "penstock: 3\n": "penstock is 3",
    "penstock: {parms: cpu}\n": "params",
    "model: m\nmodel_name_or_path: n\n": "twice",
    "seed: 1\nseed: 2\n": "seed",
    "max_steps: many\n": "max_steps",
    "learning_rate: [1, 2]\n": "learning_rate is [1, 2]",
    "[1]\n": "not a mapping",
    "a: [1,\n": "run.yaml",
}


@pytest.mark.parametrize(("given", "text"), [*REFUSED.values(), *OF_FILES.items()], ids=[*REFUSED, *OF_FILES])
def test_mistakes_are_one_line(given: list[str] | str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(file=given, folder=tmp_path) if isinstance(given, str) else parsed(*given)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(given, list) or "run.yaml" in str(caught.value)


def test_sizes() -> None:
    sizes = {"20GiB": 20 << 30, "1.5 MB": 1_500_000, "64": 64, 7: 7}
    assert {text: read_size(text, "--x") for text in sizes} == sizes


def test_every_old_name_is_no_option_now_and_names_some_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = capsys.readouterr().out
    assert all(word in told for word in ("--model", "--data", "--params", "(default: device)", "--learning-rate"))
    known = {word.strip(",") for word in told.split() if word.startswith("--")}
    for name in (*RENAMED, *OTHERWISE):
        text = str(advice_for(name))
        assert f"--{name}" not in known, name
        named = [word.strip(",;:") for word in text.replace("=...", "").split() if word.startswith("--")]
        assert set(named) <= known, name


@pytest.mark.parametrize(
    ("words", "local"),
    [
        (["--model", "HERE", "--data", "HERE"], True),
        (["--model=HERE", "--dataset-name", "HERE:0.5"], True),
        ([], True),
        (["--model", "owner/name", "--data", "HERE"], False),
        (["--model", "HERE", "--data", "HERE", "owner/name"], False),
        (["--model", "HERE", "--push_to_hub"], False),
        (["--model", "HERE", "--attn_implementation", "kernels-community/flash-attn2"], False),
    ],
)
def test_the_hub_is_asked_nothing_where_model_and_data_are_here(words: list[str], local: bool, tmp_path: Path) -> None:
    given = [word.replace("HERE", str(tmp_path)) for word in words]
    assert is_local(given) is local
    config = tmp_path / "run.yaml"
    config.write_text("model: owner/name\n")
    assert not is_local([*given, "--config", str(config)]) or "--model" in " ".join(words)
    environ: dict[str, str] = {}
    prepare_environment(given, environ)
    assert environ == {"HF_HUB_DISABLE_TELEMETRY": "1"} | ({"HF_HUB_OFFLINE": "1"} if local else {})
