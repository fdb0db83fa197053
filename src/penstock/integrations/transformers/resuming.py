"""What a run of a trainer goes on from: a checkpoint that is whole, as many rows a step, the runs of its trackers."""

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from penstock.errors import CheckpointError, ConfigError
from penstock.integrations.engine_internals import Checkpoint, read_manifest

#: The folder of a Trainer's checkpoint that has what `penstock.Optimizer.save` wrote.
STATE = "penstock"

#: Callbacks of transformers that copy a checkpoint as they are told of it, if a variable of the environment is set.
_COPYING = {
    "WandbCallback": "WANDB_LOG_MODEL",
    "MLflowCallback": "HF_MLFLOW_LOG_ARTIFACTS",
    "SwanLabCallback": "",
    "TrackioCallback": "",
}
#: By library of trackers: the callback of transformers, and what the library calls the run that is open.
_RUNS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "wandb": ("WandbCallback", lambda wandb: wandb.run.id),
    "mlflow": ("MLflowCallback", lambda mlflow: mlflow.active_run().info.run_id),
    "swanlab": ("SwanLabCallback", lambda swanlab: swanlab.get_run().id),
    "trackio": ("TrackioCallback", lambda trackio: trackio.context_vars.current_run.get().name),
}
#: The variable that names the run, and what goes with it. MLflow refuses parameters of a run that have changed.
_VARIABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "wandb": ("WANDB_RUN_ID", {"WANDB_RESUME": "allow"}),
    "mlflow": ("MLFLOW_RUN_ID", {"MLFLOW_MAX_LOG_PARAMS": "0"}),
    "swanlab": ("SWANLAB_RUN_ID", {"SWANLAB_RESUME": "allow"}),
}

logger = logging.getLogger(__name__)


# Checkpoints


def is_whole(folder: Path) -> bool:
    """Return True if a trainer's checkpoint was written to its end."""
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        if (folder / STATE).is_dir():
            read_manifest(folder / STATE)
    except (OSError, ValueError, CheckpointError):
        return False
    return True


def choose_checkpoint(asked: str | PathLike[str] | bool | None, output_dir: str) -> Any:
    """Choose the checkpoint to go on from: the one that is asked for, or the newest before it that is whole.

    Arguments:
        asked: as `Trainer.train` is told; True for the newest in `output_dir`.
        output_dir: the folder of checkpoints.

    Returns:
        The checkpoint, for `Trainer.train`; what is asked for where that is none of Penstock's.

    Raises:
        CheckpointError: none is whole.
    """
    newest = get_last_checkpoint(output_dir) if asked is True else asked or None
    if newest is None or (asked is not True and not Path(newest, STATE).is_dir()):
        return asked
    first = Path(newest)
    found = [Path(path) for path in reversed(sort_checkpoints(str(first.parent)))]
    found = found[found.index(first) :] if first in found else [first]
    whole = next((folder for folder in found if is_whole(folder)), None)
    unfinished = ", ".join(folder.name for folder in found[: None if whole is None else found.index(whole)])
    if whole is None:
        raise CheckpointError(
            f"{first.parent} has no checkpoint that was written to its end, but {unfinished}. Train without "
            "resume_from_checkpoint, or go on from another folder.",
            file=str(first),
        )
    if unfinished:
        logger.warning("%s was not written to its end. Going on from %s.", unfinished, whole)
    return str(whole)


def remove_old(folder: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beside a new one that is whole; first those that are not.

    Arguments:
        folder: the new one, which stays.
        limit: how many stay; `None` for all.
        best: one that stays.
    """
    if limit is None or limit <= 0:
        return
    kept = {folder, folder if best is None else Path(best)}
    others = [path for path in map(Path, sort_checkpoints(str(folder.parent), use_mtime=True)) if path not in kept]
    others.sort(key=is_whole)  # stable: the older first
    for other in others[: max(0, len(others) + len(kept) - limit)]:
        shutil.rmtree(other, ignore_errors=True)


def may_copy(callback: TrainerCallback) -> bool:
    """Return True if a callback may read a checkpoint's folder as soon as it is told of it."""
    if type(callback).on_save is TrainerCallback.on_save:
        return False
    variable = next((variable for name, variable in _COPYING.items() if _is_a(callback, name)), None)
    return variable is None or os.environ.get(variable, "false").lower() not in ("", "0", "false", "no")


def read_extra(checkpoint: Any) -> Mapping[str, Any]:
    """Read what a trainer on Penstock has saved beside the state of training; nothing where there is none."""
    if not isinstance(checkpoint, str) or not Path(checkpoint, STATE).is_dir():
        return {}
    opened = Checkpoint.open(Path(checkpoint, STATE))
    extra: Mapping[str, Any] = opened.value("extra", opened.manifest.extra)
    return extra


# Rows of a step


def batch_of(trainer: Any) -> dict[str, Any]:
    """Return what makes the rows of a step: ranks, rows of each at once, micro-batches; and of GRPO's generations."""
    args = trainer.args
    return {
        "ranks": 1 if args.accelerator_config.split_batches else args.world_size,
        "rows": trainer._train_batch_size,
        "micro_batches": args.gradient_accumulation_steps,
        "generation": getattr(args, "generation_batch_size", None),
    }


def keep_batch(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Have a trainer take as many micro-batches as make the rows of a step that a run had at other ranks.

    Arguments:
        trainer: goes on with the run. Its arguments are changed.
        saved: `batch_of` the run before; empty where it is not known.

    Raises:
        ConfigError: no number of micro-batches makes them. Names the nearest settings that do.
    """
    now, args = batch_of(trainer), trainer.args
    if not saved or saved["ranks"] == now["ranks"]:
        return
    if args.auto_find_batch_size:
        now["rows"] = saved["rows"]  # which Trainer goes on with, too
    step, at_once = saved["ranks"] * saved["rows"] * saved["micro_batches"], now["ranks"] * now["rows"]
    before = f"{step} rows a step, {saved['ranks']} ranks x {saved['rows']} x {saved['micro_batches']} micro-batches"
    if step % at_once or (saved["generation"] or 0) % at_once:
        what = f"the run had {before}, which {now['ranks']} ranks of {now['rows']} rows cannot make"
        if not args.ignore_data_skip:
            raise ConfigError(
                f"resume_from_checkpoint: {what}. Use {_nearest(step, now['ranks'], now['rows'])}; or set "
                "ignore_data_skip=True to go on with other batches."
            )
        logger.warning("Steps have other rows than before: %s.", what)
        return
    args.gradient_accumulation_steps = step // at_once
    if saved["generation"]:
        args.steps_per_generation, args.generation_batch_size = saved["generation"] // at_once, saved["generation"]
    if trainer.is_world_process_zero() and now["micro_batches"] != step // at_once:
        logger.warning(
            "gradient_accumulation_steps=%d in place of %d: the run had %s, and goes on at %d ranks x %d.",
            *(step // at_once, now["micro_batches"], before, now["ranks"], now["rows"]),
        )
    why = _other_rows(trainer, saved)
    if why is not None and trainer.is_world_process_zero():
        logger.warning("Steps have other rows than before, though as many: %s.", why)


def _nearest(step: int, ranks: int, rows: int) -> str:
    """Name the settings that make the rows of a step: the nearest number of ranks, and of rows there."""
    ranks = min((n for n in range(1, step + 1) if step % n == 0), key=lambda n: abs(n - ranks))
    share = step // ranks
    rows = min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: abs(n - rows))
    return f"per_device_train_batch_size={rows} at {ranks} ranks"


def _other_rows(trainer: Any, saved: Mapping[str, Any]) -> str | None:
    """Return why steps have other rows at another number of ranks; `None` where they have the same."""
    args, dataset = trainer.args, trainer.train_dataset
    dispatched = args.accelerator_config.dispatch_batches
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        divided = dispatched is False and getattr(dataset, "n_shards", 1) > 1
        return "with dispatch_batches=False each rank reads files of its own" if divided else None
    if args.train_sampling_strategy == "group_by_length":
        return "train_sampling_strategy='group_by_length' groups the rows of one rank"
    if dispatched:
        return "dispatch_batches=True skips others"
    batches = [(len(dataset) // (b["ranks"] * b["rows"]), b["micro_batches"]) for b in (saved, batch_of(trainer))]
    if args.dataloader_drop_last and len({math.ceil(count / each) for count, each in batches}) > 1:
        return "dataloader_drop_last=True drops others, and epochs have another number of steps"
    return None


# Runs of trackers


def tracker_runs(trainer: Any) -> dict[str, str]:
    """Return what the trackers of a trainer call the runs that are open, by library; of TensorBoard, the folder."""
    runs: dict[str, str] = {}
    for callback in trainer.callback_handler.callbacks:
        for library, (name, ask) in _RUNS.items():
            if _is_a(callback, name):
                with suppress(Exception):  # no run is open; and no tracker ends a training
                    runs[library] = str(ask(sys.modules[library]))
        if _is_a(callback, "TensorBoardCallback") and callback.logging_dir is not None:
            runs["tensorboard"] = os.path.relpath(callback.logging_dir, trainer.args.output_dir)
    return runs


@contextmanager
def same_runs(trainer: Any, runs: Mapping[str, str]) -> Iterator[None]:
    """Have trackers that open a run in a `with` block go on with the run before.

    Arguments:
        trainer: whose callbacks they are.
        runs: `tracker_runs` of the run before. One that is open already, or that the environment names, counts first.
    """
    open_runs = tracker_runs(trainer)
    runs = {library: run for library, run in runs.items() if library not in open_runs}
    variables: dict[str, str] = {}
    for library, (variable, others) in _VARIABLES.items():
        if library in runs and variable not in os.environ:
            variables |= {name: value for name, value in others.items() if name not in os.environ}
            variables[variable] = runs[library]
    if "trackio" in runs and trainer.args.run_name is None:
        trainer.args.run_name = runs["trackio"]
    for callback in trainer.callback_handler.callbacks:
        if "tensorboard" in runs and _is_a(callback, "TensorBoardCallback"):
            callback.logging_dir = os.path.join(trainer.args.output_dir, runs["tensorboard"])
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _is_a(callback: TrainerCallback, name: str) -> bool:
    return any(base.__name__ == name for base in type(callback).__mro__)
