"""The two calls for a lent GPU, with steps that are shell commands; and the page that their reports are drawn into."""

import importlib
import json
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lib.processes import lives

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SAME, OTHER = "of these sources", "of others"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS / "gpu")
    return importlib.import_module("call")


@dataclass(frozen=True)
class Shell:
    name: str
    does: str
    seconds: float = 600.0
    asks: str = "?"
    known: bool = False

    def missing(self, reports: Any) -> list[str]:
        return [] if self.known else [self.name]

    def command(self, out: Path, seconds: float, earlier: Any, tiny: bool) -> list[str]:
        return ["sh", "-c", self.does]


def run(call: ModuleType, out: Path, *groups: tuple[Shell, ...], seconds: float = 3000.0) -> dict[str, dict[str, Any]]:
    out.mkdir(exist_ok=True)
    under_way = call.Call(out, time.monotonic() + seconds, [], False, {"PATH": "/usr/bin:/bin"})
    for group in groups:
        under_way.run(group)
    return {row["name"]: row for row in json.loads((out / "call.json").read_text())["steps"]}


def test_a_step_that_fails_or_takes_too_long_is_a_row_and_the_next_one_runs(
    call: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "LEAST_SECONDS", 0.5)
    started = tmp_path / "started"
    groups = (
        (Shell("fails", "echo why; exit 3"),),
        (Shell("hangs", f"sleep 600 & echo $! > {started}; wait", seconds=1.5),),
        (Shell("known", "exit 1", known=True), Shell("fine", "true")),
    )
    found = run(call, tmp_path / "out", *groups)
    assert {name: row["status"] for name, row in found.items()} == {
        "fails": "exit status 3",
        "hangs": "cut off",
        "known": "skipped",
        "fine": "done",
    }
    assert "    why" in capsys.readouterr().out.splitlines()
    below = started.read_text().split() if started.exists() else []  # not where the host was slow
    assert not any(lives(int(process)) for process in below), "what a step started ends with it"


def test_steps_of_a_group_run_beside_each_other(call: ModuleType, tmp_path: Path) -> None:
    """Each waits for a file that the other one makes."""
    one, two = tmp_path / "one", tmp_path / "two"
    wait = "while [ ! -e {} ]; do sleep 0.1; done"
    group = (Shell("a", f"touch {one}; {wait.format(two)}"), Shell("b", f"touch {two}; {wait.format(one)}"))
    assert {row["status"] for row in run(call, tmp_path / "out", group).values()} == {"done"}


def check_report(source: str, rows: dict[str, str], part: str = "movement", status: str = "done") -> dict[str, Any]:
    told = [{"name": name, "status": how} for name, how in rows.items()]
    return {"machine": {"source": source}, "parts": [{"name": part, "status": status, "rows": told}]}


def test_a_check_is_answered_once_it_passed_and_what_passed_is_not_run_again(call: ModuleType) -> None:
    steps = {step.name: step for group in call.CALLS["first"] for step in group}
    cut_off, transfers = steps["cut-off"], steps["movement"]
    assert cut_off.missing([]) == ["two_ranks", "test_train"]
    ranks, train = (
        "t/test_several_devices.py::test_two_ranks_on_one_device_are_refused",
        "t/test_train.py::test_a[full]",
    )
    first = check_report(SAME, {ranks: "passed", train: "over its budget"}, status="over its budget")
    assert cut_off.missing([first]) == ["test_train"]
    command = cut_off.command(Path("out.json"), 60.0, [first], False)
    assert f"--pytest=--deselect={ranks}" in command
    assert f"--pytest=--deselect={train}" not in command
    assert cut_off.missing([first, check_report(SAME, {train: "passed"})]) == []
    assert transfers.missing([first]) == ["movement"]
    assert transfers.missing([check_report(SAME, {ranks: "passed", train: "passed"})]) == ["movement"], "the other ones"
    assert transfers.missing([check_report(SAME, {"t/x.py::test_x": "failed"})]) == ["movement"]
    assert transfers.missing([check_report(SAME, {"t/x.py::test_x": "passed"})]) == []


def test_a_contender_is_answered_by_a_steady_step_of_each_batch_size(call: ModuleType) -> None:
    step = next(step for group in call.CALLS["second"] for step in group if step.name == "8b")
    row = {"name": "penstock-optimizer-only-cpu", "status": "measured", "sequence": 4096, "steady_step_ms": 1.0}
    report = {"settings": {"shape": "llama-3-8b", "batch": [4, 8]}, "rows": [row | {"batch": 4}]}
    assert step.missing([report]) == ["penstock-optimizer-only-cpu x8,16"]
    report["rows"] += [row | {"batch": 8}, row | {"batch": 16, "status": "out of memory"}]
    assert step.missing([report]) == ["penstock-optimizer-only-cpu x16"]
    command = step.command(Path("out.json"), 60.0, [report], False)
    assert command[command.index("--contenders") + 1] == "penstock-optimizer-only-cpu"
    assert step.missing([report, report | {"rows": [row | {"batch": 16}]}]) == []
    assert len(step.missing([report | {"settings": {"shape": "qwen3-0.6b", "batch": 4}}])) == 1


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_commands_of_a_call_are_ones_that_its_scripts_take(call: ModuleType, name: str) -> None:
    pytest.importorskip("transformers")
    scripts = {"gpu_check.py": importlib.import_module("gpu_check"), "run.py": importlib.import_module("run")}
    rows = importlib.import_module("rows")
    known = rows.contenders(batch=1, sequence=1, folder="", max_grad_norm=None)
    for step in (step for group in call.CALLS[name] for step in group):
        for tiny in (False, True):
            program, script, *arguments = step.command(Path("out.json"), 60.0, [], tiny)
            assert program == sys.executable
            parsed = scripts[Path(script).name].parse(arguments) if script.endswith(".py") else None
            if hasattr(parsed, "contenders"):
                assert set(parsed.contenders.split(",")) <= set(known)
                assert parsed.shape == ("tiny" if tiny else step.shape)


def test_a_wheel_of_other_sources_is_refused(call: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "penstock-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("penstock/__init__.py", "")
        about = "penstock-0.0.dist-info/"
        file.writestr(about + "METADATA", "Metadata-Version: 2.1\nName: penstock\nVersion: 0.0\n")
        file.writestr(about + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(about + "RECORD", "")
    (tmp_path / "peers").mkdir()
    wheel.rename(tmp_path / "peers" / wheel.name)
    assert "PENSTOCK_PEERS" not in call.install(tmp_path, tmp_path / "site"), "no wheels: this Python as it is"
    (tmp_path / wheel.name).write_bytes((tmp_path / "peers" / wheel.name).read_bytes())
    with pytest.raises(SystemExit, match="is of other sources"):
        call.install(tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "peers" / "penstock").is_dir(), "apart"
    monkeypatch.setattr(call.subprocess, "run", None)  # what is there is not installed again
    with pytest.raises(SystemExit, match="is of other sources"):
        call.install(tmp_path, tmp_path / "site")


def test_reports_of_other_sources_answer_nothing(call: ModuleType, tmp_path: Path) -> None:
    """A call on a cpu that has a second: every step is told, and known ones are those of the same sources."""
    parts = importlib.import_module("parts")
    for folder, source in (("old", OTHER), ("new", parts.source())):
        (tmp_path / "earlier" / folder).mkdir(parents=True)
        report = check_report(source, {"a": "passed"}, "parity" if folder == "old" else "pinning")
        (tmp_path / "earlier" / folder / "check.json").write_text(json.dumps(report))
        (tmp_path / "earlier" / folder / "torn.json").write_text("{")
    command = [sys.executable, str(BENCHMARKS / "gpu" / "call.py"), "first", "--seconds", "1"]
    command += ["--earlier", str(tmp_path / "earlier"), "--out", str(tmp_path / "out"), "--wheels", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "out" / "call.json").read_text())["steps"]
    reasons = {step["name"]: step["reason"] for step in steps}
    assert reasons["pinning"] == "reports of the same sources have it"
    assert reasons["parity"] == "no time was left"


def test_rows_of_penstock_are_predicted(call: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    predict, rows = importlib.import_module("predict"), importlib.import_module("rows")
    predict.Machine.read("h100-node").write(tmp_path / "machine.json")
    known = rows.contenders(batch=2, sequence=32, folder=str(tmp_path), max_grad_norm=1.0)
    names = ("plain", "penstock-all-cpu-activations", "penstock-optimizer-nvme")
    common = {"status": "measured", "steady_step_ms": 1.0, "memory_gb": 80.0, "batch": 2, "sequence": 32}
    common |= {"arithmetic": {"recompute": True, "chunked_loss": True}, "predicted": None}
    told = [{"name": name, "setup": known[name].setup, "options": known[name].options} | common for name in names]
    report = {"case": "step", "settings": {"shape": "tiny"}, "rows": told}
    (tmp_path / "8b.json").write_text(json.dumps(report))
    predict.fill_in(tmp_path)
    plain, *ours = (row["predicted"] for row in json.loads((tmp_path / "8b.json").read_text())["rows"])
    assert plain is None
    assert all(row["fits"] and row["step_ms"] > 0 and row["device_peak_bytes"] > 0 for row in ours), ours


def test_the_page_is_what_the_reports_say(call: ModuleType) -> None:
    """After a change of reports, notes or calls: python benchmarks/gpu/draw.py --page docs/gpu.md."""
    draw = importlib.import_module("draw")
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert text == draw.drawn_into(text, draw.folders_of(call.RESULTS))
