"""The benchmark kit for GPUs on a cpu: a row with every figure for whoever runs, and a row for whoever fails."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = [
    *("--shape", "tiny", "--batch", "1,2", "--sequence", "32", "--threads", "1"),
    *("--warmup", "1", "--rounds", "2", "--steps", "1", "--peak-flops", "1e12"),
]
LIMITS = ["--contender-limit", "600", "--budget-seconds", "3000"]
ENDED = [("failed", "no such argument"), ("skipped", "no_such_module"), ("measured", "")]


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS / "gpu")
    return importlib.import_module("run")


def test_a_steady_step_is_charged_no_update_that_a_round_waits_for(kit: ModuleType) -> None:
    """Two rounds of four steps of a second; then three more seconds until the last update is over."""
    measure = importlib.import_module("measure")
    marks = [[begin + at / 4 for at in range(4)] for begin in range(4)]
    moments = [[begin + at / 8 for at in range(4)] for begin in range(4)]
    clock = measure.Clock(torch.device("cpu"))
    found = measure.timings([measure.Round(7.0, marks, moments)] * 2, clock)
    assert (found["steady_step_ms"], found["step_ms"]) == (1000, 1750)
    assert (found["phases_ms"]["forward"], found["host_ms"]["forward"]) == (250, 125)
    found = measure.timings([measure.Round(7.0, marks[:1], moments[:1])], clock)
    assert found["steady_step_ms"] == found["step_ms"] == 7000


def test_a_profile_counts_what_runs_at_once_once(kit: ModuleType) -> None:
    """Two steps: kernels that overlap by half, and copies both ways beside them."""
    measure = importlib.import_module("measure")
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 2000.0},
        {"cat": "kernel", "name": "gemm", "ts": 1000.0, "dur": 2000.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2500.0, "dur": 1000.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 2500.0, "dur": 500.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9000.0},
        {"ph": "M", "name": "process_name"},
    ]
    for event, nbytes in zip(events[2:4], (4000, 2000), strict=True):
        event["args"] = {"bytes": nbytes}
    found = measure.summary(events, 2)
    assert found == {
        "kernel_ms": 1.5,
        "launches": 1.0,
        "busy_ms": 1.75,
        "up": {"ms": 0.5, "bytes": 2000},
        "down": {"ms": 0.25, "bytes": 1000},
    }


def test_one_that_fails_or_is_not_there_is_a_row_of_each_batch_size_and_the_next_one_runs(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a stand-in for the script that measures."""
    (tmp_path / "measure.py").write_text(
        "import json, pathlib, sys\n"
        "given = json.loads(sys.argv[1])\n"
        "if given['options']:\n"
        "    sys.exit('no such argument')\n"
        "rows = [{'batch': batch, 'round_step_ms': [1.0]} for batch in given['batches']]\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'rows': rows}))\n"
    )
    contenders = {
        "broken": kit.Contender("plain", {"no_such_argument": 1}),
        "absent": kit.Contender("plain", needs="no_such_module.inside"),
        "plain": kit.Contender("plain"),
    }
    monkeypatch.setattr(kit, "contenders", lambda **_: contenders)
    monkeypatch.setattr(kit, "HERE", tmp_path)
    arguments = kit.parse([*TINY, *LIMITS, "--folder", str(tmp_path), "--contenders", ",".join(contenders)])
    rows = list(kit.run_case(kit.CASES["step"], arguments))
    assert [(row["name"], row["batch"]) for row in rows] == [(name, n) for name in contenders for n in (1, 2)]
    for row, (status, reason) in zip(rows[::2], ENDED, strict=True):
        assert row["status"] == status
        assert reason in row["reason"]
    for row in rows[:4]:
        assert all(row[figure] is None for figure in kit.RATES if figure not in ("batch", "sequence"))


def test_the_command_writes_a_report_that_can_be_drawn(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured in this process: a process for each is what the stand-in above has."""

    def in_this_process(command: list[str], *rest: Any) -> str:
        monkeypatch.setattr("sys.argv", command[1:])
        importlib.import_module("measure").main()
        return ""

    monkeypatch.setattr(kit, "run_limited", in_this_process)
    monkeypatch.setattr(kit, "describe", lambda threads: importlib.import_module("machine").describe())
    monkeypatch.setattr(kit.parts, "end_on_signals", lambda: None)
    names, out, folder = ["plain", "penstock-optimizer-nvme"], tmp_path / "report.json", tmp_path / "nvme"
    folder.mkdir()
    words = [*TINY, *LIMITS, "--chunked-loss", "--contenders", ",".join(names)]
    monkeypatch.setattr("sys.argv", ["run.py", *words, "--folder", str(folder), "--out", str(out)])
    kit.main()
    assert list(folder.iterdir()) == []
    report = json.loads(out.read_text())
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["torch"]
    assert report["settings"]["chunked_loss"] == "True"
    assert report["machine"]["source"] == kit.parts.source()
    assert [(row["name"], row["batch"]) for row in report["rows"]] == [(name, n) for name in names for n in (1, 2)]
    check_what_was_measured(kit, report["rows"])

    draw = importlib.import_module("draw")
    for case, drawn in (("step", "rect"), ("curves", "polyline")):
        (tmp_path / f"{case}.json").write_text(json.dumps(report | {"case": case}))
        monkeypatch.setattr("sys.argv", ["draw.py", str(tmp_path / f"{case}.json"), "--plots", str(tmp_path)])
        draw.main()
        root = ElementTree.parse(tmp_path / f"{case}.svg").getroot()
        found = [element.tag.rpartition("}")[2] for element in root]
        assert found.count(drawn) == 4 + (drawn == "rect"), "one for each, and the ground"


def check_what_was_measured(kit: ModuleType, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["status"] == "measured", row["reason"]
        assert set(kit.RATES) <= row.keys()
        assert len(row["losses"]) == len(row["round_step_ms"]) == 2
        assert row["tokens_per_second"] == pytest.approx(32 * row["batch"] / row["steady_step_ms"] * 1e3)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_token"] / 1e12)
        assert row["resident_bytes"] > 50e6
        for key in ("phases_ms", "host_ms"):
            assert all(row[key][phase] > 0 for phase in ("forward", "backward", "step"))
        assert (row["arithmetic"]["states"], row["arithmetic"]["attention"]) == ("fp32", "sdpa")
    plain, _, ours, of_two = rows
    assert (plain["trace"], of_two["trace"]) == (None, None), "one trace is enough"
    assert ours["trace"]["rows"]["write"]["nbytes"] > 0
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-2)
    assert (plain["differs"], ours["differs"], ours["losses_beside"]) == (None, False, "plain")
    assert ours["targets"] == [], "few tokens a step: no target speaks of them"


def test_a_compilation_that_was_ended_holds_nobody_up(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch waits without end for the lock that a process left which was killed while it compiled."""
    lock = tmp_path / "py312_cu130" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(kit, "run_limited", lambda *given: "ended after 1 s" if not lock.exists() else "waits")
    settings = {"threads": 1, "batches": [1], "sequence": 32}
    (row,) = kit.run_one(kit.Contender("plain"), settings, seconds=60)
    assert (row["status"], row["reason"]) == ("over its limit", "ended after 1 s")


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_token_are_those_of_the_paper(kit: ModuleType, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = importlib.import_module("shapes")
    kind, sizes = shapes.SHAPES["tiny"]
    monkeypatch.setitem(shapes.SHAPES, "tiny", (kind, sizes | {"tie_word_embeddings": tied}))
    model = shapes.build("tiny", sequence=32, recompute=True, device=torch.device("cpu"))
    hidden, layers, inner, vocabulary, sequence = 64, 2, 128, 256, 32
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    multiplied = layers * layer + hidden + vocabulary * hidden
    assert shapes.flops_per_token(model, sequence) == 6 * multiplied + 12 * layers * hidden * sequence
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def measured(name: str, tokens_per_second: float, losses: list[float]) -> dict:
    return {
        "name": name,
        "memory_gb": 80.0,
        "batch": 4,
        "sequence": 4096,
        "status": "measured",
        "tokens_per_second": tokens_per_second,
        "losses": losses,
    }


def test_rows_are_judged_beside_each_other(kit: ModuleType) -> None:
    names = ["plain", "penstock-device", "penstock-optimizer-cpu", "penstock-all-cpu", "deepspeed-zero-offload"]
    speeds, last = [900.0, 1000.0, 960.0, 840.0, 400.0], [11.0, 11.01, 11.0, 11.5, None]
    rows = [measured(name, speed, [12.0, loss]) for name, speed, loss in zip(names, speeds, last, strict=True)]
    rows.append(measured("fsdp2-offload", 1.0, []) | {"status": "failed"})
    kit.judge(rows, clipped=True)
    assert [row["differs"] for row in rows] == [None, False, False, True, True, None]
    assert rows[3]["losses_apart"] == pytest.approx(0.5)
    found = {row["name"]: [(target["measured"], target["met"]) for target in row["targets"]] for row in rows}
    assert found == {
        **{name: [] for name in ("plain", "penstock-device", "deepspeed-zero-offload", "fsdp2-offload")},
        "penstock-optimizer-cpu": [(0.96, True), (2.4, False)],
        "penstock-all-cpu": [(0.84, False)],
    }
    few = [row | {"batch": 1} for row in rows]
    kit.judge([*rows, *few[2:4]], clipped=True)
    assert [row["losses_beside"] for row in few[2:4]] == [None, "penstock-optimizer-cpu"], "of the same batch"
    assert not any(row["targets"] for row in few[2:4])
    state = {
        "name": "states",
        "status": "measured",
        "report": {"machine": {"accelerator": "X"}, "bandwidth_ratios": {}},
    }
    state["report"]["bandwidth_ratios"] = {"offload to cpu / copy down": 0.93, "reload from cpu / copy up": 0.8}
    kit.judge([state], clipped=True)
    assert [target["met"] for target in state["targets"]] == [True, False]


def test_batch_sizes_before_the_one_that_fails_are_whole(kit: ModuleType) -> None:
    rows = [{"batch": 4, "round_step_ms": [1.0]}]
    settings = {"batches": [4, 8, 16], "sequence": 32}
    found = kit.outcomes(settings, {"rows": rows, "under_way": 8}, "out of memory", "OutOfMemoryError: 9 GB")
    assert [(row["batch"], row["status"]) for row in found] == [
        (4, "measured"),
        (8, "out of memory"),
        (16, "out of memory"),
    ]
    assert [row["reason"] for row in found] == ["", "OutOfMemoryError: 9 GB", "OutOfMemoryError: 9 GB"]
