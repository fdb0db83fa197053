"""What cannot be is refused before any data is read: one line that says which, and what to do; nothing is written."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from tests.instruct import PLAIN, instruct_folder
from tests.train.runs import COMMON, command, ours, process_as_it_was, refused, run_ranks, written
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
    "tier": (["--params", "gpu3"], ("gpu3",)),
    "fractions": (["--params", "device=0.5,cpu=0.4"], ("params", "0.9")),
    "no folder": (["--params", "nvme"], ("nvme_path",)),
    "a folder that is not there": (["--params", "nvme", "--nvme_path", "nowhere"], ("nowhere",)),
    "stage": (["--stage", "4"], ("stage", "4")),
    "unknown": (["--learning_rat", "1"], ("learning_rat", "learning_rate")),
    "unknown, of ours": (["--nvme_paths", "x"], ("nvme_paths", "nvme_path")),
    "no number": (["--learning_rate", "fast"], ("learning_rate", "fast")),
    "no count": (["--max_steps", "many"], ("max_steps", "many")),
    "no value of a list": (["--lr_scheduler_type", "sideways"], ("lr_scheduler_type", "sideways")),
    "weights": (["--data", "a.jsonl:0.7", "b.jsonl"], ("b.jsonl", "weight")),
    "no data": (["--data", "nowhere.jsonl"], ("nowhere.jsonl",)),
    "no model": (["--model", "./nowhere"], ("nowhere",)),
    "plan and home": (["--placement", "auto", "--params", "cpu"], ("placement", "params")),
    "no plan": (["--plan", "nowhere.json"], ("nowhere.json",)),
    "deepspeed": (["--deepspeed", "ds.json"], ("deepspeed",)),
    "fsdp": (["--fsdp", "full_shard"], ("fsdp",)),
    "four bits": (["--load_in_4bit", "true"], ("4",)),
    "adapters of nothing": (["--use_peft", "true", "--lora_target_modules", "no_such_layer"], ("no_such_layer",)),
    "base without adapters": (["--base", "int8"], ("base", "use_peft")),
}


@pytest.mark.parametrize("row", ROWS)
def test_one_line_before_the_data_is_read(row: str, made: Path, unreadable: Path, tmp_path: Path) -> None:
    words, said = ROWS[row]
    settings = COMMON | {"model_name_or_path": str(made / "plain"), "output_dir": str(tmp_path / "out")}
    if "--data" not in words:
        settings["dataset_name"] = str(unreadable)
    (tmp_path / "b.jsonl").write_text("no JSON\n")
    (tmp_path / "a.jsonl").write_text("no JSON\n")
    found = said_of(["--config", str(written(settings, tmp_path, "run")), *words], tmp_path / "out")
    for part in said:
        assert part in found, found
    assert "no JSON" not in found
    assert "train.jsonl" not in found


def test_a_disk_that_is_too_small(
    made: Path, unreadable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2000, 1000, 1000))
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 2000, 1000, 1000, 100, 100, 100, 0, 255)))
    settings = settings_of(made, "texts", save_strategy="steps", save_steps=1, output_dir=str(tmp_path / "out"))
    settings["dataset_name"] = str(unreadable)
    found = said_of(["--config", str(written(settings, tmp_path, "run"))], tmp_path / "out")
    assert "1,000" in found
    assert "save_total_limit" in found


#: Every option that `penstock train` had in 0.2 and has no more, and what its message names: its place, or nothing.
OF_02: dict[str, str] = {
    "lora": "use_peft",
    "precision": "bf16",
    "chunked-loss": "",
    "recompute": "gradient_checkpointing",
    "compile": "torch_compile",
    "pad-vocab-to": "",
    "eval-data": "dataset_test_split",
    "text-field": "dataset_text_field",
    "chat-template": "chat_template_path",
    "seq-length": "max_length",
    "truncation": "truncation_mode",
    "cache": "",
    "cp": "",
    "device-bytes": "max_device_bytes",
    "host-bytes": "max_host_bytes",
    **dict.fromkeys(("tile-bytes", "live-bytes", "prefetch-bytes", "persistent-bytes", "pinned-bytes"), "options"),
    **dict.fromkeys(("update-threads", "streamed-updates", "state-dtype", "gather-format"), "options"),
    **dict.fromkeys(("reduce-format", "secondary-shard", "timeout-s"), "options"),
    "optimizer-name": "optim",
    "optimizer-args": "optim_args",
    "lr": "learning_rate",
    "betas": "adam_beta1",
    "schedule": "lr_scheduler_type",
    "min-lr": "lr_scheduler_kwargs",
    "warmup": "warmup_steps",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "batch-size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "global-batch": "gradient_accumulation_steps",
    "eval-every": "eval_steps",
    "eval-sequences": "",
    "keep-best": "load_best_model_at_end",
    "early-stop": "",
    "sample-tokens": "",
    "prompt": "",
    "log-every": "logging_steps",
    "save-every": "save_steps",
    "keep": "save_total_limit",
    "resume": "resume_from_checkpoint",
    "peak-flops": "",
}


@pytest.mark.parametrize("name", OF_02)
def test_an_option_of_02_is_named_with_what_it_is_called_now(name: str) -> None:
    for typed in (f"--{name}", f"--{name.replace('-', '_')}"):
        said = refused([typed, "1"])
        assert "0.2" in said
        assert name.replace("-", "_") in said.replace("-", "_")
        assert OF_02[name] in said


def config_of(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def damaged(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"0" * 100)


def pickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"a pickle")


def quantised(model: Path) -> None:
    config_of(model, quantization_config={"quant_method": "gptq", "bits": 4})


def no_code(model: Path) -> None:
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (model / "modeling_own.py").write_text('import pathlib\npathlib.Path("ran").touch()\n')
    config_of(model, model_type="own", architectures=["OwnModel"], auto_map=auto_map)


def adapters(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "base", "peft_type": "LORA"}')


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def torn_config(model: Path) -> None:
    (model / "config.json").write_text("{")


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "damaged weights": (damaged, "model.safetensors"),
    "pickles": (pickled, "safetensors"),
    "quantised by others": (quantised, "gptq"),
    "code of its own": (no_code, "trust_remote_code"),
    "adapters": (adapters, "adapter"),
    "no config": (no_config, "config.json"),
    "a torn config": (torn_config, "config.json"),
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


FILES: dict[str, tuple[str, str]] = {
    "unknown key": ("learning_rat: 1\n", "learning_rate"),
    "unknown key of ours": ("penstock: {parms: cpu}\n", "params"),
    "no mapping": ("- a\n- b\n", "run.yaml"),
    "torn": ("a: [1,\n", "run.yaml"),
    "a value of another kind": ("learning_rate: [1, 2]\n", "learning_rate"),
    "a key twice": ("seed: 1\nseed: 2\n", "seed"),
}


@pytest.mark.parametrize("row", FILES)
def test_a_file_that_cannot_be_used_is_one_line(row: str, made: Path, unreadable: Path, tmp_path: Path) -> None:
    text, said = FILES[row]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    words = ["--model", str(made / "plain"), "--data", str(unreadable), "--out", str(tmp_path / "out")]
    assert said in said_of(["--config", str(file), *words], tmp_path / "out")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml" in said_of(["--config", "nowhere.yaml", "--out", str(tmp_path / "out")], tmp_path / "out")


DATA: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a row that is no object": ("rows.jsonl", '{"text": "a"}\n[1]\n', ("rows.jsonl",)),
    "a torn line": ("rows.jsonl", '{"text": "a"}\n{"text": \n', ("rows.jsonl",)),
    "no column that is known": ("rows.jsonl", '{"a": "b"}\n', ("rows.jsonl", "text", "messages")),
    "preferences": ("rows.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}\n', ("preference",)),
    "a text that is none": ("rows.jsonl", '{"text": {"a": 1}}\n', ("rows.jsonl",)),
    "a turn without a role": ("rows.jsonl", '{"messages": [{"content": "a"}]}\n', ("rows.jsonl", "role")),
    "nothing": ("rows.jsonl", "", ("rows.jsonl",)),
    "not UTF-8": ("rows.txt", "\udcff\udcfe", ("rows.txt",)),
    "a folder of kinds that are unknown": ("folder/rows.xyz", "a", ("folder",)),
    "no parquet": ("rows.parquet", "a", ("rows.parquet",)),
}


@pytest.mark.parametrize("row", DATA)
def test_data_that_cannot_be_used_is_named_with_its_file(row: str, made: Path, tmp_path: Path) -> None:
    name, text, said = DATA[row]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    settings = settings_of(made, "texts", "plain", dataset_name=str(tmp_path / name.partition("/")[0]))
    settings["output_dir"] = str(tmp_path / "out")
    found = refused(["--config", str(written(settings, tmp_path, "run"))])
    for part in said:
        assert part in found, found
    assert not (tmp_path / "out" / "config.json").exists()


def test_evaluation_without_a_split_says_what_to_do(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "texts", eval_strategy="steps", eval_steps=2)
    settings |= {"dataset_name": str(made / "texts" / "train.jsonl"), "output_dir": str(tmp_path / "out")}
    found = refused(["--config", str(written(settings, tmp_path, "run"))])
    assert "test_split_size" in found or "dataset_test_split" in found


def test_what_is_refused_leaves_an_earlier_run_as_it_was(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "texts", max_steps=2)
    out = ours(settings, tmp_path / "out").out
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "cache" not in path.parts}
    for words in (["--max_device_bytes", "64KiB", "--optimizer", "device"], ["--resume_from_checkpoint", "nowhere"]):
        refused(["--config", str(written(settings, tmp_path, "run")), "--out", str(out), *words])
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "cache" not in path.parts}
    assert after == before


def refused_on_rank(rank: int, argv: list[str], folder: Path) -> str:
    os.environ.update(CI="1", HF_HUB_OFFLINE="1")
    os.chdir(folder)
    return refused(argv)


def test_every_rank_refuses_what_one_of_them_cannot(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "texts", output_dir=str(tmp_path / "out"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": 3}\n{"none": "a"}\n')
    settings["dataset_name"] = str(tmp_path / "rows.jsonl")
    file = written(settings, tmp_path, "run")
    for said in run_ranks(refused_on_rank, 2, ["--config", str(file)], tmp_path):
        assert "rows.jsonl" in said
    words = ["--max_device_bytes", "16KiB", "--optimizer", "device"]
    for said in run_ranks(refused_on_rank, 2, ["--config", str(file), *words], tmp_path):
        assert "16,384" in said


def test_the_module_ends_with_one_line_and_status_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", "--learning_rat", "1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("penstock")
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_fields_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command(["--help"])
    assert end.value.code in (0, None)
    said = capsys.readouterr().out
    for name in ("learning_rate", "model_name_or_path", "dataset_name", "nvme_path", "max_device_bytes", "dry_run"):
        assert name in said
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_not_overwritten(made: Path, tmp_path: Path) -> None:
    model = instruct_folder(tmp_path / "model", template=PLAIN, hidden_size=32, num_attention_heads=2)
    before = {path: path.read_bytes() for path in model.iterdir()}
    settings = settings_of(made, "texts", model_name_or_path=str(model), output_dir=str(model), max_steps=1)
    said = refused(["--config", str(written(settings, tmp_path, "run"))])
    assert "output_dir" in said
    assert {path: path.read_bytes() for path in model.iterdir()} == before


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['trl'] = None; from penstock.train import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "penstock[train]" in done.stderr.splitlines()[-1]


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
