"""`penstock probe`: its table, its file, and what it refuses before anything is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.planner import this_machine
from penstock.planner.machine import Machine
from penstock.planner.rates import Rate


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the probe, which measures nothing."""
    asked: list[dict[str, Any]] = []

    def measure(*, progress: Callable[[str], None], **given: Any) -> Any:
        progress("something")
        asked.append(given)
        figures = {
            "disk_read": Rate(7e9, 6.8e9, 7.1e9, "a folder [bold]like markup"),
            "job_seconds": Rate(8e-5, 8e-5, 8e-5, "jobs"),
        }
        return figures, {"cpu": "x", "cores": 2, "device": "cpu"}

    monkeypatch.setattr(this_machine, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def test_a_table_with_units_spread_and_how(penstock_command: Callable[..., Any], measured: list[Any]) -> None:
    outcome = penstock_command("probe")
    assert (outcome.exit_code, outcome.err) == (0, "")
    lines = [line.rstrip() for line in outcome.out.splitlines()]
    assert lines[0] == "x, 2 cores (cpu, probed)"
    assert lines[1].split() == ["figure", "value", "from", "to", "how"]
    rows = {line.split()[0]: line for line in lines[2:4]}
    assert "7.00 GB/s" in rows["disk_read"]
    assert rows["disk_read"].split()[3:7] == ["6.80", "GB/s", "7.10", "GB/s"]
    assert rows["disk_read"].endswith("a folder [bold]like markup")
    assert rows["job_seconds"].split() == ["job_seconds", "80.0", "us", "jobs"]


def test_the_default_is_the_cache_and_it_says_where(
    penstock_command: Callable[..., Any], measured: list[Any], tmp_path: Path
) -> None:
    out = penstock_command("probe").out.replace("\n", "")
    (path,) = (tmp_path / "cache").rglob("*.json")
    assert out.endswith(f"written to {path}")
    assert Machine.read(path).value("disk_read") == 7e9


def test_folders_seconds_and_out(penstock_command: Callable[..., Any], measured: list[Any], tmp_path: Path) -> None:
    words = ["--folders", "a", "--folders", "b"]
    outcome = penstock_command("probe", *words, "--seconds", "2.5", "--out", "machine.json")
    assert outcome.exit_code == 0, outcome.err
    assert measured == [{"folders": [Path("a"), Path("b")], "seconds": 2.5}]
    assert Machine.read(tmp_path / "machine.json").probed
    assert not (tmp_path / "cache").exists()
    assert penstock_command("probe", "--out", "machine.json").exit_code == 0  # a machine's file may be replaced


def test_nothing_else_is_overwritten_and_nothing_measured(
    penstock_command: Callable[..., Any], measured: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    outcome = penstock_command("probe", "--out", "mine.json")
    said = "--out mine.json is there, and no machine's file. Name another file."
    assert (outcome.exit_code, outcome.err) == (2, f"penstock: error: {said}\n")
    assert (tmp_path / "mine.json").read_text() == '{"mine": 1}'
    for out in ("none/machine.json", "x" * 300, "mine.json/below", "/proc/x"):
        assert penstock_command("probe", "--out", out).exit_code == 2
    assert measured == []


def test_a_cache_that_cannot_be_written_is_said(
    penstock_command: Callable[..., Any], measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    outcome = penstock_command("probe")
    assert outcome.exit_code == 0
    assert outcome.out.rstrip().endswith("not kept: the cache cannot be written; name --out")
