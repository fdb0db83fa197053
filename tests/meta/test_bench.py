"""`benchmarks/bench.py`: its parts, the form of its file, and the words of its comparison."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("bench")


@pytest.fixture
def compared(bench: ModuleType) -> ModuleType:
    return importlib.import_module("bench_compare")


@pytest.fixture
def figures(bench: ModuleType) -> ModuleType:
    return importlib.import_module("bench_figures")


def run(figures: ModuleType, *found: Any, **others: Any) -> dict[str, Any]:
    """A report of these figures, as `bench.py` writes it."""
    return {
        "form": figures.FORM,
        "date": "2026-11-23",
        "quick": True,
        "machine": {"processor": "p", "cores": 2, "accelerator": None},
        "versions": {},
        "settings": {"step": {"threads": 1}},
        "load": {},
        "seconds": {},
        "figures": json.loads(json.dumps(figures.as_json(found))),
        "left_out": {},
    } | others


@pytest.mark.parametrize(
    ("then", "now", "more_is_better", "verdict"),
    [
        ([1.0, 1.01, 0.99], [1.0, 1.0, 1.0], False, "equal"),
        ([1.0, 1.01, 0.99], [0.8, 0.81, 0.79], False, "better"),
        ([1.0, 1.01, 0.99], [1.2, 1.21, 1.19], False, "worse"),
        ([1.0, 1.01, 0.99], [1.2, 1.21, 1.19], True, "better"),
        ([1.0, 1.01, 0.99], [0.8, 0.81, 0.79], True, "worse"),
        ([1.0, 1.4, 0.7], [1.2, 1.21, 1.19], False, "equal"),  # within the noise of the stored run
        ([1.0, 1.01, 0.99], [1.2, 1.6, 0.9], False, "equal"),  # within the noise of this one
        ([1.0] * 9, [1.02] * 9, False, "equal"),  # less than is ever told apart
        ([1.0, 1.0, 1.0, 1.0, 9.0], [1.2, 1.2, 1.2, 1.2, 0.1], False, "worse"),  # a stray round is no noise
    ],
)
def test_a_figure_is_better_equal_or_worse_by_more_than_rounds_differ(
    compared: ModuleType, figures: ModuleType, then: list[float], now: list[float], more_is_better: bool, verdict: str
) -> None:
    stored, found = (
        figures.Figure("step", "penstock", "ms", numbers, "plain", numbers, more_is_better) for numbers in (then, now)
    )
    assert compared.compare_figure(found, stored, same_machine=True).verdict == verdict


def test_stored_runs_have_the_form(figures: ModuleType) -> None:
    for path in (BENCHMARKS / "results").glob("bench*.json"):
        report = figures.read_report(path)
        assert report["quick"] == (path.stem == "bench-quick")
        assert figures.figures_of(report)


def test_every_part_is_listed_and_has_a_script(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(bench.PARTS)
    for part in bench.PARTS.values():
        assert (BENCHMARKS / part.script).exists()
    with pytest.raises(SystemExit):
        bench.parse(["--only", "steps"])
    with pytest.raises(SystemExit, match="not an interpreter that runs"):
        bench.packages_of("/no/such/python")


def test_scripts_know_the_arguments_of_their_part(bench: ModuleType) -> None:
    for part in bench.PARTS.values():
        script = (BENCHMARKS / part.script).read_text()
        for quick in (False, True):
            line = part.arguments(quick=quick, peers=True, given={"folder": "f", "threads": "1"})
            assert [word for word in line if word.startswith("--") and f'"{word}"' not in script] == []


@pytest.fixture
def scripts(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of benchmarks that answer at once, with one part that works and one that fails."""
    (tmp_path / "results").mkdir()
    (tmp_path / "works.py").write_text(
        "import json, sys, pathlib\n"
        "turns = {'plain': [{'total_ms': 2.0}] * 3, 'penstock': [{'total_ms': 1.0}] * 3}\n"
        "pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text(json.dumps({'rounds': turns}))\n"
    )
    (tmp_path / "fails.py").write_text("import sys; sys.exit('no such disk')\n")
    figures = importlib.import_module("bench_figures")
    part = bench.Part("works.py", "a step", figures.of_step, (), (), ("plain", "penstock", "fsdp2"), ("deepspeed",))
    parts = {
        "works": part,
        "fails": bench.Part("fails.py", "a failure", figures.of_step, (), ()),
        "needs": bench.Part("works.py", "a tool", figures.of_step, (), (), needs="no-such-program"),
    }
    monkeypatch.setattr(bench, "PARTS", parts)
    monkeypatch.setattr(bench, "HERE", tmp_path)
    return tmp_path


def test_a_run_is_one_file_a_drawing_and_a_comparison(
    bench: ModuleType, figures: ModuleType, scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = scripts / "out"
    bench.main(["--quick", "--out", str(out), "--folder", str(scripts), "--store"])
    assert "better" not in capsys.readouterr().out  # nothing was stored
    report = figures.read_report(out / "bench-quick.json")
    assert report == figures.read_report(scripts / "results" / "bench-quick.json")
    assert [figure.key for figure in figures.figures_of(report)] == ["works: plain", "works: penstock / plain"]
    assert report["left_out"] == {
        "works: fsdp2": "see works.log",
        "works: deepspeed": "no environment has lent it (--peers)",
        "fails": "ended with 1: no such disk",
        "needs": "no-such-program is not installed",
    }
    assert set(report["load"]) == set(report["seconds"]) == {"works", "fails", "needs"}
    assert report["machine"]["cores"] >= 1
    drawn = (out / "bench-quick.svg").read_text()
    assert "works: penstock / plain" in drawn
    assert "0.50" in drawn
    assert not list(scripts.glob("penstock-bench-*"))
    bench.main(["--quick", "--out", str(out), "--folder", str(scripts), "--only", "works"])
    assert "0 better, 2 equal, 0 worse, 0 not compared" in capsys.readouterr().out
