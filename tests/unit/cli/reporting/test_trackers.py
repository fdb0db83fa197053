"""Trackers get a run's numbers and settings, a run that goes on is the same run there, and none of them ends a run.

Weights & Biases, MLflow and Trackio are stand-ins with the signatures of the real ones, which note their calls.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.reporting.trackers import RUNS_NAME, check_trackers, flattened
from penstock.errors import ConfigError
from tests.unit.cli.reporting.test_reports import PROGRESS

WANDB = """
calls = []
fail = None

class Run:
    def __init__(self, id):
        self.id = id
    def log(self, data, step=None, commit=None):
        if fail is not None:
            raise fail
        calls.append(("log", data, step))
    def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None, goal=None):
        calls.append(("define_metric", name, step_metric))
    def finish(self, exit_code=None, quiet=None):
        calls.append(("finish",))

def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
         config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None,
         mode=None, force=None, anonymous=None, reinit=None, resume=None, resume_from=None, fork_from=None,
         save_code=None, tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None):
    calls.append(("init", project, dir, id, name, resume, config))
    return Run(id or "new1")
"""
MLFLOW = """
calls = []

class Info:
    def __init__(self, run_id):
        self.run_id = run_id

class ActiveRun:
    def __init__(self, run_id):
        self.info = Info(run_id)

def set_experiment(experiment_name=None, experiment_id=None, trace_location=None):
    calls.append(("set_experiment", experiment_name))

def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None,
              description=None, log_system_metrics=None):
    calls.append(("start_run", run_id, run_name))
    return ActiveRun(run_id or "0af1")

def log_params(params, synchronous=None, run_id=None):
    assert len(params) <= 100 and all(len(str(value)) <= 500 for value in params.values())
    calls.append(("log_params", params))

def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None):
    calls.append(("log_metrics", metrics, step))

def end_run(status="FINISHED"):
    calls.append(("end_run",))
"""
TRACKIO = """
calls = []

class Run:
    def __init__(self, name):
        self.name = name
    def log(self, metrics, step=None):
        calls.append(("log", metrics, step))
    def finish(self):
        calls.append(("finish",))

def init(project, name=None, group=None, space_id=None, server_url=None, space_storage=None, dataset_id=None,
         bucket_id=None, config=None, resume="never", settings=None, private=None, embed=True, auto_log_gpu=None,
         gpu_log_interval=10.0, webhook_url=None, webhook_min_level=None):
    calls.append(("init", project, name, resume, config))
    return Run(name or "brave-fox-0")
"""
ASKED = {"lr": 0.1, "prompt": ["a", "b"], "betas": None, "options": {"tile_bytes": 4}, "precision": "auto"}
SETTINGS: dict[str, Any] = {"config": ASKED, "world_size": 2, "precision": "bf16"}
FLAT = {"lr": 0.1, "prompt": "a b", "options.tile_bytes": 4, "precision": "bf16", "world_size": 2}
TRAIN = {"train/loss": 2.5, "train/grad_norm": 0.75, "train/lr": 1e-3, "train/tokens_per_second": 100.0}
EVAL = {"eval/loss": 5.5, "eval/perplexity": math.exp(5.5)}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """A library by its name and source."""

    def install(name: str, source: str) -> Any:
        module = ModuleType(name)
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def run(out: Path, name: str, *, goes_on: bool = False) -> None:
    """A run of one report and one evaluation."""
    out.mkdir(exist_ok=True)
    with Reports(TrainConfig(out=out, report_to=(name,)), is_first_rank=True) as reports:
        reports.start(goes_on=goes_on, **SETTINGS)
        reports.step(PROGRESS)
        reports.evaluation(20, 5.5, 0.25, token_name="byte")


def test_tensorboard_gets_the_numbers_and_the_settings(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    run(tmp_path, "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    read = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {name: [(20, pytest.approx(value))] for name, value in (TRAIN | EVAL).items()}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    of_settings = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin.HParamsPluginData.FromString(of_settings).session_start_info.hparams
    assert set(hparams) == set(FLAT)
    assert hparams["lr"].number_value == 0.1
    assert hparams["prompt"].string_value == "a b"


def test_wandb(tmp_path: Path, library: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = library("wandb", WANDB)
    out = tmp_path / "out"
    run(out, "wandb")
    assert wandb.calls == [
        ("init", "penstock", str(out), None, "out", None, FLAT),
        ("define_metric", "train/global_step", None),
        ("define_metric", "*", "train/global_step"),
        ("log", TRAIN | {"train/global_step": 20}, None),
        ("log", EVAL | {"train/global_step": 20}, None),
        ("finish",),
    ]
    wandb.calls.clear()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "this")
    run(out, "wandb", goes_on=True)
    assert wandb.calls[0] == ("init", "mine", str(out), "new1", "this", "allow", FLAT)


def test_mlflow(tmp_path: Path, library: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    mlflow = library("mlflow", MLFLOW)
    out = tmp_path / "out"
    run(out, "mlflow")
    texts = {name: str(value) for name, value in FLAT.items()}
    rest = [("log_metrics", TRAIN, 20), ("log_metrics", EVAL, 20), ("end_run",)]
    begin = [("set_experiment", "penstock"), ("start_run", None, "out"), ("log_params", texts)]
    assert mlflow.calls == [*begin, *rest]
    mlflow.calls.clear()
    run(out, "mlflow", goes_on=True)
    assert mlflow.calls == [("set_experiment", "penstock"), ("start_run", "0af1", None), *rest]


def test_trackio(tmp_path: Path, library: Callable[[str, str], Any]) -> None:
    trackio = library("trackio", TRACKIO)
    out = tmp_path / "out"
    run(out, "trackio")
    rest = [("log", TRAIN, 20), ("log", EVAL, 20), ("finish",)]
    assert trackio.calls == [("init", "penstock", None, "never", FLAT), *rest]
    trackio.calls.clear()
    run(out, "trackio", goes_on=True)
    assert trackio.calls == [("init", "penstock", "brave-fox-0", "allow", FLAT), *rest]


def test_many_settings_go_to_mlflow_in_pieces(tmp_path: Path, library: Callable[[str, str], Any]) -> None:
    mlflow = library("mlflow", MLFLOW)
    with Reports(TrainConfig(out=tmp_path, report_to=("mlflow",)), is_first_rank=True) as reports:
        reports.start(**{f"s{number}": "x" * 600 for number in range(150)})
    sizes = [len(call[1]) for call in mlflow.calls if call[0] == "log_params"]
    assert sizes == [100, 50]


def test_a_new_run_in_the_folder_is_a_new_run_of_the_tracker(
    tmp_path: Path, library: Callable[[str, str], Any]
) -> None:
    wandb = library("wandb", WANDB)
    run(tmp_path, "wandb")
    run(tmp_path, "wandb")
    assert [call[3] for call in wandb.calls if call[0] == "init"] == [None, None]
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start()  # a run without trackers
    run(tmp_path, "wandb", goes_on=True)
    assert [call[3] for call in wandb.calls if call[0] == "init"] == [None, None, None]


@pytest.mark.parametrize(
    "kept", ["", "{", "[]", '"new1"', '{"wandb": 1}', '{"wandb": "../x"}', '{"wandb": ""}', "[" * 100_000, "\udcff"]
)
def test_what_the_folder_says_of_runs_is_checked(tmp_path: Path, library: Callable[[str, str], Any], kept: str) -> None:
    wandb = library("wandb", WANDB)
    (tmp_path / RUNS_NAME).write_text(kept, errors="surrogateescape")
    run(tmp_path, "wandb", goes_on=True)
    assert wandb.calls[0][3] is None
    assert json.loads((tmp_path / RUNS_NAME).read_text()) == {"wandb": "new1"}


@pytest.mark.parametrize("error", ["OSError(28, 'No space left on device')", "SystemExit(1)", "Exception('a\\nb')"])
def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, library: Callable[[str, str], Any], capsys: pytest.CaptureFixture[str], error: str
) -> None:
    wandb = library("wandb", WANDB.replace("fail = None", f"fail = {error}"))
    run(tmp_path, "wandb")
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: wandb stopped: ")]
    assert len(warnings) == 1
    assert warnings[0].endswith("; the run goes on without it")
    assert "finish" not in str(wandb.calls)
    events = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events == ["start", "step", "eval"]


def test_a_tracker_that_cannot_begin_does_not_either(
    tmp_path: Path, library: Callable[[str, str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    library("wandb", "def init(**options):\n    raise RuntimeError('not logged in')\n")
    run(tmp_path, "wandb")
    said = "warning: wandb stopped: not logged in (RuntimeError); the run goes on without it"
    assert capsys.readouterr().out.splitlines()[0] == said


def test_an_interruption_is_no_failure_of_a_tracker(tmp_path: Path, library: Callable[[str, str], Any]) -> None:
    library("wandb", WANDB.replace("fail = None", "fail = KeyboardInterrupt()"))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "wandb")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("penstock.cli.training.reporting.trackers.find_spec", lambda name: None)
    said = (
        rf"^--report-to {name} needs {name}, which is not installed. Install it with: pip install '?(penstock\[)?{name}"
    )
    with pytest.raises(ConfigError, match=said):
        check_trackers((name,))


def test_a_folder_of_runs_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^--report-to wandb needs wandb"):
        check_trackers(("wandb",))


def test_other_ranks_track_nothing(tmp_path: Path, library: Callable[[str, str], Any]) -> None:
    wandb = library("wandb", WANDB)
    with Reports(TrainConfig(out=tmp_path, report_to=("wandb",)), is_first_rank=False) as reports:
        reports.start(**SETTINGS)
        reports.step(PROGRESS)
        reports.evaluation(20, 5.5, 0.25, token_name="byte")
    assert wandb.calls == []
    assert not (tmp_path / RUNS_NAME).exists()


def test_settings_are_flat() -> None:
    assert flattened({"a": {"b": {"c": 1}, "d": None}, "e": (1, 2)}) == {"a.b.c": 1, "e": "1 2"}
    assert flattened({"out": Path("a")}) == {"out": "a"}
