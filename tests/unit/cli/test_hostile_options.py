"""Every option of every command with values that nobody means: one line on standard error, and what was there stays."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HUGE = str(10**30)
HUGER = str(10**400)
NUMBERS = ["", "x", "nan", "inf", "-inf", "-1", "1.5", HUGE, HUGER, "0x10", " ", "--"]
COUNTS = [*NUMBERS, "0"]
SIZES = ["", "x", "nan", "inf", "-1", HUGE, HUGER, "1e30", "0.3", "1.5KB.", "9999999999TiB", "0x10"]
HOMES = ["", "x", "nan", "cpu=nan", "cpu=inf", "cpu=-1,device=2", "cpu=0.5", "cpu=1,cpu=0", "=", "cpu=", f"cpu={HUGE}"]
#: What a test makes in its folder: what each of them is not is told by the name.
PATHS = ["a-folder", "a-file", "a-fifo", "a-dangling-link", "a-locked-folder", "a-loop", "missing", "x" * 300]
PATHS += ["x" * 5000, "a-file/below", "a\x00b", "", "/dev/null", "/proc/self/mem", "/dev/null/x", "bad-\udcff-name"]

OUT = ["a-file", "a-fifo", "a-file/below", "a\x00b", "", "x" * 300, "/dev/null", "/proc/x", "a-loop"]

SWITCHES = ["", "x", "0", "true"]
LORA = ["x", "r", "r=", "=", "r=0", "r=-1", "r=nan", "r=1.5", f"r={HUGE}", "alpha=nan", "alpha=inf", "r=2,r=3", "zz=3"]
LORA += ["targets=nothing", "targets=", "base=int3", "dropout=2", "alpha=x", "dropout=nan", "r=\udcff"]
SHARES = ["", "x", "nan", "inf", "-1", "1.5", HUGE]
TABLE: dict[str, dict[str, list[str]]] = {
    "train": {},  # reads what is typed by itself: tests/train/test_refusals.py
    "plan": {
        "--model": [*PATHS, "x"],
        "--batch": [*COUNTS, "x1", "1x", "0x8", "1x1", f"{HUGE}x8", f"8x{HUGE}", "65536x65536", "8x8x8", "-1x8"],
        "--accumulation": COUNTS,
        "--lora": [value for value in LORA if value != "targets=nothing"],
        "--precision": ["", "x", "fp64", "0"],
        "--chunked-loss": SWITCHES,
        "--recompute": SWITCHES,
        "--packing": SWITCHES,
        "--pad-vocab-to": COUNTS,
        "--stage": [*NUMBERS, "4"],
        "--params": HOMES,
        "--grads": HOMES,
        "--optimizer": HOMES,
        "--activations": ["", "x", "disk", "cpu=1"],
        "--overlap": ["", "x", "0"],
        "--options": [
            *("", "x", "=", "tile_bytes", "tile_bytes=", "tile_byte=1", "update_threads=x", "update_threads=1.5"),
            *(f"tile_bytes={size}" for size in (*SIZES, "0", "1")),
            *(f"{name}_bytes={size}" for name in ("live", "prefetch", "persistent", "pinned") for size in SIZES),
            *(f"streamed_updates={share}" for share in SHARES),
            *("state_dtype=fp16", "gather_format=int4", "reduce_format=[1]", "secondary_shard=-1", "tile_bytes=4KiB,1"),
        ],
        "--optimizer-name": ["", "x", "AdamW "],
        "--optimizer-args": ["", "x", "eps", "eps=nan", "lr=x", "eps=1e400", "foreaches=1", "betas=[1]"],
        "--max-grad-norm": ["", "x", "nan", "inf", "-1", HUGER],
        "--machine": [path for path in PATHS if path],
        "--gpus": [*COUNTS, "2000"],
        "--hosts": [*COUNTS, str(1 << 20)],
        "--mesh": ["", "x", "dp_shard=0", "dp_shard=-1", "dp_shard=x", "rows=2", "dp_shard=1,tp=-1", f"tp={HUGER}"],
        "--device-memory": [*SIZES, "0"],
        "--host-memory": [*SIZES, "0"],
        "--folders": ["", "0", "65", "a\x00b"],
        "--what-if": ["", "x", "disk_read", "disk_read=", "=", "disk_read=nan", "disk_read=-1", f"disk_read={HUGER}"],
        "--tbw": ["", "x", "nan", "inf", "-1", "0", HUGER],
        "--max-step": ["", "x", "nan", "inf", "-1", "0", HUGER],
        "--out": [path for path in OUT[1:] if path],
        "--trace": [path for path in OUT[1:] if path],
        "--compare": ["a-file", "missing"],
        **{flag: ["=x"] for flag in ("--trust-remote-code", "--measure", "--explain", "--json")},
    },
    "export": {
        "checkpoint": PATHS,
        "out": OUT,
        "--dtype": ["", "x", "int8"],
        "--max-shard-bytes": [*SIZES, "0"],
        "--adapters-only": ["=x"],
        "--no-adapters-only": ["=x"],
        "--merge-adapters": ["=x"],
        "--base": [],
        "--average": ["=x"],
    },
    "inspect": {"path": PATHS, "--verify": ["=x"], "--json": ["=x"]},
    "import-deepspeed": {"folder": PATHS, "out": OUT},
    "import-dcp": {"folder": PATHS, "out": OUT, "--buffer": ["", "x", "x" * 5000]},
    "convert-config": {"file": PATHS, "--out": [path for path in OUT if path], "--json": ["=x"]},
    "probe": {
        "--folders": [path for path in PATHS if path not in ("a-folder", "a-locked-folder")],
        "--seconds": [*(count for count in COUNTS if count != "1.5"), "0.5", "3601"],
        "--out": [path for path in OUT if path],
        "--json": ["=x"],
    },
    # A folder that cannot be written is what it finds, and no mistake of who asks.
    "doctor": {"--folders": ["", "a\x00b"], "--json": ["=x"]},
    "report": {"runs": PATHS, "--out": [path for path in OUT if path]},
    "launch": {
        "script": [path for path in PATHS if path not in ("a-file", "/proc/self/mem")],
        "arguments": [],
        "--config": PATHS,
        "-m": [],
        "--nproc-per-node": [count for count in COUNTS if count],
    },
}
OPTIONS = [(command, option, values) for command, rows in TABLE.items() for option, values in rows.items()]
#: A sixth of the values of each option: others are tried on others.
ROWS = [
    (command, option, value)
    for number, (command, option, values) in enumerate(OPTIONS)
    for value in values[number % 6 :: 6] or values[:1]
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import penstock

    folder = tmp_path_factory.mktemp("saved") / "step"
    model = torch.nn.Linear(8, 8)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(folder, extra={"step": 1})
    optimizer.close()
    return folder


@pytest.fixture
def surroundings(tmp_path: Path, checkpoint: Path) -> Iterator[Path]:
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-file").write_text("text " * 99)
    (tmp_path / "a-config").write_text("stage: 3")
    (tmp_path / "a-wrong-config").write_text("stages: 2")
    os.mkfifo(tmp_path / "a-fifo")
    (tmp_path / "a-dangling-link").symlink_to("nowhere")
    (tmp_path / "a-loop").symlink_to("a-loop")
    (tmp_path / "a-locked-folder").mkdir(mode=0o000)
    (tmp_path / "a-run").mkdir()
    (tmp_path / "a-run" / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 1.0}\n')
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    yield tmp_path
    (tmp_path / "a-locked-folder").chmod(0o700)


def arguments(command: str, option: str, value: str) -> list[str]:
    typed = option + value if value == "=x" else f"{option}={value}"
    if command == "plan":
        base = {"--machine": "cpu-laptop", "--batch": "1x8"}
        return [command, *(word for pair in base.items() if pair[0] != option for word in pair), typed]
    positional = {name: "" for name in TABLE[command] if not name.startswith("-")}
    given = {"checkpoint": "checkpoint", "path": "checkpoint", "folder": "a-folder", "out": "out"}
    given |= {"file": "a-config", "script": "a-file", "arguments": "x", "runs": "a-run"}
    if option in positional:
        before = ["--config=a-config"] if command == "launch" else []
        return [command, *before, "--", *(value if name == option else given[name] for name in positional)]
    return [command, typed, *(given[name] for name in positional)]


@pytest.mark.parametrize(("command", "option", "value"), ROWS, ids=lambda value: value[:20].encode("unicode_escape"))
def test_one_line_and_no_traceback(
    penstock_command: Callable[..., Any], surroundings: Path, command: str, option: str, value: str
) -> None:
    outcome = penstock_command(*arguments(command, option, value))
    assert outcome.exit_code == 2, outcome.out
    assert outcome.err.startswith("penstock: error: ")
    assert outcome.err.count("\n") == 1
    assert len(outcome.err) < 2100
    assert "Traceback" not in outcome.err
    assert list(surroundings.glob("**/metrics.jsonl")) == [surroundings / "a-run" / "metrics.jsonl"]
    assert not list(surroundings.glob("**/report.html"))


#: What commands say of a mistake; of those of `penstock plan`: `test_plan.py`.
MISTAKES = {
    "import-dcp nowhere out": "nowhere is no checkpoint of torch.distributed.checkpoint",
    "import-deepspeed nowhere out": "nowhere is no checkpoint of DeepSpeed's ZeRO",
    "convert-config nowhere.yaml": "nowhere.yaml is not read",
    "inspect a-folder": "is no whole checkpoint",
    "export nowhere out": "nowhere does not exist",
    "export . out --max-shard-bytes big": "Invalid value for '--max-shard-bytes': 'big' is not a size",
    "export checkpoint out --merge-adapters": "there are no adapters",
    "export a b --averag": "--average",
    "report a b c": "one run, or two to hold against each other, not 3",
    "report nowhere": "nowhere/metrics.jsonl: No such file or directory",
    "launch a-file": "--config is missing",
    "launch --config a-config": "Missing argument 'script'",
    "launch --config a-config other.py": "other.py is no file",
    "launch --config none.yaml a-file": "none.yaml is not read",
    "launch --config a-wrong-config a-file": "a-wrong-config has no 'stages'. Did you mean 'stage'?",
    "launch --config a-config --nproc-per-node two a-file": "use a number of processes to 1024, or gpu",
    "launch --config a-config -m nowhere.at_all --config x": "-m nowhere.at_all: there is no module",
}


@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.usefixtures("surroundings")
def test_a_mistake_is_one_line_that_says_it(penstock_command: Callable[..., Any], words: str) -> None:
    for module in {"launch": ("accelerate", "yaml"), "report": ("plotly",)}.get(words.split()[0], ()):
        pytest.importorskip(module)
    outcome = penstock_command(*words.split())
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert MISTAKES[words] in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_path_of_any_bytes_can_be_printed(penstock_command: Callable[..., Any], surroundings: Path) -> None:
    shutil.copytree(surroundings / "checkpoint", surroundings / "bad-\udcff")
    outcome = penstock_command("inspect", "bad-\udcff")
    assert outcome.exit_code == 0, outcome.err
