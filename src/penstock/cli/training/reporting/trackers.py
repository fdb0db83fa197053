"""Trackers: the numbers of a run in TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries.

accelerate has classes for these too, which log through its `PartialState`: that joins process groups and sets the
current device by itself, and this command does not need accelerate.

A tracker may raise anything, at any time: it is left out from there on, and the run goes on.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ConfigError, one_line
from penstock.files import check_own, parse_object, read_bytes, write_whole

RUNS_NAME = "trackers.json"
_PROJECT = "penstock"
_INSTALL = {
    "tensorboard": "'penstock[tensorboard]'",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
#: What MLflow takes: characters of a value (the least of its versions), values of a call.
_MLFLOW_VALUE, _MLFLOW_BATCH = 500, 100
_RUN = re.compile(r"[A-Za-z0-9_.\-]{1,128}")

Settings = Mapping[str, str | int | float | bool]


class Tracker(Protocol):
    """One run in one library.

    Attributes:
        run: what the library calls the run, to go on with it later; empty where nothing is needed for that.
    """

    run: str

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step."""

    def close(self) -> None:
        """Finish the run."""


@dataclass(frozen=True)
class Start:
    """What a tracker is opened with.

    Attributes:
        folder: the run's folder.
        settings: what the run was asked for, flat.
        run: the run to go on with; empty for a new one.
        goes_on: whether the run goes on from a checkpoint.
    """

    folder: Path
    settings: Settings
    run: str = ""
    goes_on: bool = False


class TensorBoard:
    """Events in the folder `tensorboard`; a run that goes on adds a file, which is drawn as one with the others."""

    run = ""

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        writer: Any = SummaryWriter(str(start.folder / "tensorboard"))
        # Not by add_hparams, which makes a run of its own for them.
        make: Any = hparams
        for summary in make(dict(start.settings), {}):
            writer.file_writer.add_summary(summary)
        self._writer = writer

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A run of the project `WANDB_PROJECT`, or penstock, at Weights & Biases or in the folder `wandb`."""

    def __init__(self, start: Start) -> None:
        library: Any = import_module("wandb")
        self._run: Any = library.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME") or _name(start),
            dir=str(start.folder),
            config=dict(start.settings),
            allow_val_change=True,
            **({"id": start.run, "resume": "allow"} if start.run else {}),
        )
        self.run = str(self._run.id)
        # A run that goes on makes steps again, and W&B's own step only grows.
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step."""
        self._run.log({**numbers, "train/global_step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of the experiment `MLFLOW_EXPERIMENT_NAME`, or penstock, where `MLFLOW_TRACKING_URI` says."""

    def __init__(self, start: Start) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        named = {"run_id": start.run} if start.run else {"run_name": _name(start)}
        self.run = str(self._mlflow.start_run(**named).info.run_id)
        if start.run:
            return  # parameters of a run never change: MLflow would refuse a new --steps
        values = [(name, str(value)[:_MLFLOW_VALUE]) for name, value in start.settings.items()]
        for begin in range(0, len(values), _MLFLOW_BATCH):
            self._mlflow.log_params(dict(values[begin : begin + _MLFLOW_BATCH]))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step."""
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._mlflow.end_run()


class Trackio:
    """A run of the project `TRACKIO_PROJECT`, or penstock, on this machine or where Trackio's own variables say."""

    def __init__(self, start: Start) -> None:
        library: Any = import_module("trackio")
        self._run: Any = library.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            config=dict(start.settings),
            **({"name": start.run, "resume": "allow"} if start.run else {}),
        )
        self.run = str(self._run.name)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


_KINDS: Mapping[str, Callable[[Start], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


class Trackers:
    """All trackers of a run, on the rank that tells.

    Arguments:
        names: those that are asked for.
        warn: says a line to people.
    """

    def __init__(self, names: tuple[str, ...], warn: Callable[[str], None]) -> None:
        self._names, self._warn = tuple(dict.fromkeys(names)), warn
        self._open: dict[str, Tracker] = {}

    def open(self, folder: Path, settings: Mapping[str, object], *, goes_on: bool) -> None:
        """Begin a run in each tracker, or go on with the one that was begun for this folder.

        Arguments:
            folder: the run's folder, which keeps what trackers call their runs.
            settings: what the run was asked for.
            goes_on: whether the run goes on from a checkpoint.
        """
        runs = _read_runs(folder / RUNS_NAME) if goes_on else {}
        if not goes_on:
            with suppress(OSError):  # else a run that goes on from this one would go on with an earlier one's
                check_own(folder / RUNS_NAME).unlink(missing_ok=True)
        flat = flattened(settings)
        for name in self._names:
            with self._border(name):
                self._open[name] = _KINDS[name](Start(folder, flat, runs.get(name, ""), goes_on))
        named = {name: tracker.run for name, tracker in self._open.items() if tracker.run}
        if named:
            with suppress(OSError):  # the run is tracked all the same, and a later one begins anew
                _write_runs(folder / RUNS_NAME, runs | named)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Add numbers of a step."""
        for name, tracker in list(self._open.items()):
            with self._border(name):
                tracker.log(numbers, step)

    def close(self) -> None:
        """Finish all runs."""
        while self._open:
            name, tracker = self._open.popitem()
            with self._border(name):
                tracker.close()

    def _border(self, name: str) -> "_Border":
        return _Border(name, self._open, self._warn)


class _Border:
    """Ends what a tracker raises, and the tracker with it."""

    def __init__(self, name: str, trackers: dict[str, Tracker], warn: Callable[[str], None]) -> None:
        self._name, self._trackers, self._warn = name, trackers, warn

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception | SystemExit):  # libraries end the process where nobody is logged in
            return False
        self._trackers.pop(self._name, None)
        self._warn(f"warning: {self._name} stopped: {one_line(error)}; the run goes on without it")
        return True


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers whose library is not installed.

    Raises:
        ConfigError: one is not. The message says how to install it.
    """
    for name in names:
        spec = find_spec(name)
        # A folder of that name is found too, such as the one that W&B writes, but has no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"--report-to {name} needs {name}, which is not installed. Install it with: pip install "
                f"{_INSTALL[name]}"
            )


def flattened(settings: Mapping[str, object], above: str = "") -> dict[str, str | int | float | bool]:
    """Write settings as trackers take them: names of nested ones joined by dots, values that are no numbers as text."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{above}{name}.")
        elif isinstance(value, list | tuple):
            flat[above + name] = " ".join(map(str, value))
        elif value is not None:
            flat[above + name] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat


def _name(start: Start) -> str:
    """Name a run after its folder."""
    return start.folder.resolve().name or _PROJECT


def _read_runs(path: Path) -> dict[str, str]:
    """Read what the trackers have called their runs; what cannot be one is left out."""
    try:
        runs = parse_object(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return {name: run for name, run in runs.items() if name in _KINDS and isinstance(run, str) and _RUN.fullmatch(run)}


def _write_runs(path: Path, runs: Mapping[str, str]) -> None:
    """Write what the trackers call their runs, whole or not at all."""
    write_whole(check_own(path), json.dumps(runs) + "\n")
