"""What cannot be is refused before any data is read: one line that says which, and what to do; nothing is written."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import save
from penstock.errors import PenstockError
from tests.instruct import PLAIN, instruct_folder
from tests.train.runs import COMMON, ours, process_as_it_was, refused, run_child, run_ranks, written
from tests.train.test_as_trl import settings_of


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """Data that nobody can read: whoever comes so far speaks of it."""
    file = tmp_path / "unreadable" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("no JSON\n")
    return file.parent


def said_of(argv: list[str], out: Path) -> str:
    """What is said: in one line, by the command's own errors, and before anything is in its folder."""
    said = refused(argv)
    assert "\n" not in said.strip()
    assert len(said) < 2000
    assert not out.exists() or not list(out.iterdir()), "nothing is written"
    return said


# name: words, and what is said
ROWS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "device": (["--max_device_bytes", "64KiB", "--optimizer", "device"], ("65,536",)),
    "host": (["--max_host_bytes", "128KiB", "--params", "cpu", "--grads", "cpu"], ("131,072",)),
    "no folder": (["--params", "nvme"], ("nvme_path",)),
    "a folder that is not there": (["--params", "nvme", "--nvme_path", "nowhere"], ("nowhere",)),
    "no copy": (["--dp_replicate", "0"], ("--dp_replicate 0",)),
    "copies that do not divide the ranks": (["--dp_replicate", "2"], ("does not divide the 1 ranks",)),
    "no data": (["--data", "nowhere.jsonl"], ("nowhere.jsonl",)),
    "no model": (["--model", "./nowhere"], ("nowhere",)),
    "no file": (["--config", "nowhere.yaml"], ("nowhere.yaml",)),
    "no plan": (["--plan", "nowhere.json"], ("nowhere.json",)),
    "no rule for the optimizer": (["--optim", "adafactor"], ("optim='adafactor'",)),
    "offloading of TRL's": (["--activation_offloading"], ("activations='cpu'",)),
    "an attention that there is not": (["--attn_implementation", "nope"], ("--attn_implementation nope",)),
    "a tracker that is not installed": (["--report_to", "mlflow"], ("mlflow",)),
    "deepspeed": (["--deepspeed", "ds.json"], ("deepspeed",)),
    "four bits": (["--load_in_4bit", "--use_peft"], ("--base int8",)),
    "adapters of nothing": (["--use_peft", "--lora_target_modules", "no_such_layer"], ("no_such_layer",)),
    "base without adapters": (["--base", "int8"], ("base", "use_peft")),
    "the folder of the model": (["--out", "MODEL"], ("which it would overwrite",)),
}


@pytest.mark.parametrize("row", ROWS)
def test_one_line_before_the_data_is_read(row: str, made: Path, unreadable: Path, tmp_path: Path) -> None:
    words, said = ROWS[row]
    words = [word.replace("MODEL", str(made / "plain")) for word in words]
    settings = COMMON | {"model_name_or_path": str(made / "plain"), "output_dir": str(tmp_path / "out")}
    if "--data" not in words:
        settings["dataset_name"] = str(unreadable)
    found = said_of(["--config", str(written(settings, tmp_path, "run")), *words], tmp_path / "out")
    for part in said:
        assert part in found, found
    assert "no JSON" not in found
    assert "train.jsonl" not in found


def config_of(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def damaged(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"0" * 100)


def pickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"a pickle")


def no_code(model: Path) -> None:
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (model / "modeling_own.py").write_text('import pathlib\npathlib.Path("ran").touch()\n')
    config_of(model, model_type="own", architectures=["OwnModel"], auto_map=auto_map)


def adapters(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "base", "peft_type": "LORA"}')


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "damaged weights": (damaged, "model.safetensors"),
    "pickles": (pickled, "safetensors"),
    "code of its own": (no_code, "trust_remote_code"),
    "adapters": (adapters, "adapter"),
}


@pytest.mark.parametrize("row", MODELS)
def test_a_model_that_cannot_be_used_is_one_line(row: str, unreadable: Path, tmp_path: Path) -> None:
    change, said = MODELS[row]
    model = instruct_folder(tmp_path / "model", template=PLAIN, hidden_size=32, num_attention_heads=2)
    change(model)
    settings = COMMON | {"model_name_or_path": str(model), "dataset_name": str(unreadable)}
    file = written(settings | {"output_dir": str(tmp_path / "out")}, tmp_path, "run")
    found = said_of(["--config", str(file)], tmp_path / "out")
    assert said in found.replace("-", "_")
    assert not (tmp_path / "ran").exists(), "code of the folder ran"


def test_what_is_refused_leaves_an_earlier_run_as_it_was(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "texts", max_steps=2)
    out = ours(settings, tmp_path / "out").out
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "cache" not in path.parts}
    for words in (["--max_device_bytes", "64KiB", "--optimizer", "device"], ["--resume_from_checkpoint", "nowhere"]):
        refused(["--config", str(written(settings, tmp_path, "run")), "--out", str(out), *words])
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "cache" not in path.parts}
    assert after == before


def refused_on_rank(rank: int, lines: list[list[str]], folder: Path) -> list[str]:
    """What is said of each line; of the last in a folder of this rank's own."""
    os.environ.update(CI="1", HF_HUB_OFFLINE="1")
    os.chdir(folder)
    said = [refused(argv) for argv in lines[:-1]]
    save._PATIENCE_S = 0.2
    os.chdir(folder / f"host{rank}")  # what is relative to it is another folder on each rank
    return [*said, refused(lines[-1])]


def test_every_rank_refuses_what_one_of_them_cannot(made: Path, tmp_path: Path) -> None:
    """Rows that it cannot read, memory that it has not, an `--out` that is not the other's."""
    settings = settings_of(made, "texts", output_dir=str(tmp_path / "out"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": 3}\n{"none": "a"}\n')
    settings["dataset_name"] = str(tmp_path / "rows.jsonl")
    file = ["--config", str(written(settings, tmp_path, "run"))]
    hosts = [tmp_path / f"host{rank}" for rank in range(2)]
    for host in hosts:
        host.mkdir()
    lines = [file, [*file, "--max_device_bytes", "16KiB", "--optimizer", "device"], [*file, "--out", "run"]]
    for host, (of_rows, of_memory, of_folder) in zip(
        hosts, run_ranks(refused_on_rank, 2, lines, tmp_path), strict=True
    ):
        assert "rows.jsonl" in of_rows
        assert "16,384" in of_memory
        assert "is not one folder for all ranks" in of_folder, "before rows are read"
        assert "is not seen by rank 1 (" in of_folder
        assert not (host / "run").exists()


def test_the_command_ends_with_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from penstock.cli import main

    monkeypatch.setattr("sys.argv", ["penstock", "train", "--learning_rat", "1"])
    with process_as_it_was(), pytest.raises(SystemExit) as end:
        main()
    said = capfd.readouterr().err
    assert end.value.code == 2
    assert said.count("\n") == 1, said
    assert said.startswith("penstock")
    assert list(tmp_path.iterdir()) == []


def without_trl(folder: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("penstock.train.")]:
        del sys.modules[name]
    sys.modules["trl"] = None  # type: ignore[assignment]
    (folder / "said").write_text(refused([]))


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(tmp_path: Path) -> None:
    assert run_child(without_trl, tmp_path) == 0
    assert "penstock train needs trl: pip install 'penstock[train]'" in (tmp_path / "said").read_text()


HOSTILE = ("\0", "nan", "-1", "1e400", "9" * 40, "{", "\udcff", "[" * 500, "a=b", "")


def test_whatever_an_option_is_given_is_one_line(tmp_path: Path) -> None:
    """Each option with some value that nobody means: it is taken, or refused in one line; never a traceback."""
    from penstock.train.arguments import make_parser, parse

    known = make_parser()._option_string_actions
    names = sorted(name for name in known if name.startswith("--") and "-" not in name[2:])
    given = [(name, HOSTILE[number % len(HOSTILE)]) for number, name in enumerate(names)]
    given += [("--accelerator_config", "nan"), ("--logging_steps", "1e400"), ("--save_steps", "1e400")]
    for name, value in given:
        if name not in ("--help", "--config"):
            with process_as_it_was(), suppress(PenstockError):
                parse([f"{name}={value}", "--out", str(tmp_path / "out"), "--model", "model", "--use_cpu=true"])
    assert not (tmp_path / "out").exists()
