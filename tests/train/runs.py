"""Runs of `penstock train` and of TRL's own `trl sft` in this process, from one YAML file, and what both leave.

TRL's is its script (`trl.scripts.sft`), with its own parser: what `trl sft --config FILE` runs.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers.trainer
import trl.trainer.utils
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from penstock.errors import PenstockError
from tests.lib.memory import disks
from tests.lib.ranks import PRELOADED
from tests.lib.ranks import run_ranks as run_ranks_here

if trl.trainer.utils._ChunkedLogProbFunction is None:  # TRL 1.15 has on GPUs alone what its loss is made of
    import tests.integrations.trl_cases  # noqa: F401

ROOT = Path(__file__).parents[2]
STEPS = 6
SEED = 5

#: Six steps of four rows in fp32, everything told. Not said: what TRL has by default and nothing here needs.
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "bf16": False,
    "use_cpu": True,
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "max_length": 128,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": SEED,
}

DEVICE: dict[str, Any] = {"optimizer": "device"}
CPU: dict[str, Any] = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
NVME: dict[str, Any] = {"params": "nvme", "grads": "cpu", "optimizer": "nvme", "nvme_path": [str(disks()[0])]}
MIXED: dict[str, Any] = {
    "params": {"device": 0.5, "cpu": 0.5},
    "optimizer": {"device": 0.3, "cpu": 0.3, "nvme": 0.4},
    "nvme_path": [str(disks()[0])],
}

#: Numbers of a log that are no result: times, and what Penstock alone tells.
UNLIKE = ("runtime", "per_second", "step_time", "total_flos", "memory/", "penstock/", "mfu", "bytes")


@dataclass
class Outcome:
    """What a run was.

    Attributes:
        logs: the lines that the trainer logged, without numbers that differ from run to run.
        weights: what it saved, by name.
        out: its folder.
        status: of `penstock train`; 0 of TRL's.
    """

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    out: Path
    status: int = 0

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.logs if "loss" in line]


Hook = Callable[[str, Any], None]  # of the event's name, and the state of the trainer


def event(name: str) -> Callable[..., None]:
    """A method of a callback, which calls its hook."""

    def happened(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hook is not None:
            self.hook(name, state)

    return happened


class Listener(TrainerCallback):
    """Notes the logs of every trainer that is made while it listens, and calls a hook at its events."""

    def __init__(self) -> None:
        """Made by the trainer, as one of its default callbacks."""

    logs: list[dict[str, float]]
    hook: Hook | None

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
        self.logs.append({key: value for key, value in logs.items() if not any(part in key for part in UNLIKE)})

    on_step_begin = event("step begins")
    on_step_end = event("step ends")
    on_prediction_step = event("evaluates")


@contextmanager
def listening(hook: Hook | None = None) -> Iterator[list[dict[str, float]]]:
    """Have a listener among the callbacks that every trainer has by default, and yield what it hears."""
    heard: list[dict[str, float]] = []
    listener = type("Listener", (Listener,), {"logs": heard, "hook": staticmethod(hook) if hook else None})
    transformers.trainer.DEFAULT_CALLBACKS.append(listener)
    try:
        yield heard
    finally:
        transformers.trainer.DEFAULT_CALLBACKS.remove(listener)


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Leave nothing to the next run of what accelerate and a command keep in a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    if PORTS:
        os.environ["MASTER_PORT"] = str(PORTS.pop(0))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (GradientState, AcceleratorState, PartialState):
            state._reset_state()


def written(settings: Mapping[str, Any], folder: Path, name: str) -> Path:
    """Write a file of settings: at once, as ranks write and read the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".{name}-{os.getpid()}"
    mine.write_text(yaml.safe_dump(dict(settings)))
    return mine.replace(folder / f"{name}.yaml")


def saved(folder: Path) -> dict[str, Tensor]:
    """Read the weights that a run has saved: of the model, or of its adapters."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def command(argv: Sequence[str]) -> int:
    """Run `penstock train` with some words, in this process."""
    from penstock.train import main

    with process_as_it_was():
        return main(list(argv))


def ours(
    settings: Mapping[str, Any],
    out: Path,
    *words: str,
    penstock: Mapping[str, Any] | None = None,
    hook: Hook | None = None,
) -> Outcome:
    """Run `penstock train --config FILE --output_dir OUT WORDS`.

    Arguments:
        settings: of TRL, which are the file's.
        penstock: the file's block of that name.
    """
    block = {"penstock": dict(penstock)} if penstock else {}
    file = written({**settings, **block}, out.parent, f"{out.name}-ours")
    with listening(hook) as heard:
        status = command(["--config", str(file), "--output_dir", str(out), *words])
    return Outcome(heard, saved(out), out, status)


def theirs(settings: Mapping[str, Any], out: Path) -> Outcome:
    """Run what `trl sft --config FILE` runs."""
    from trl.scripts import sft

    file = written({**settings, "output_dir": str(out)}, out.parent, f"{out.name}-theirs")
    # The command destroys the group before DistributedDataParallel. As its last owner that would wait, with the lock of
    # the interpreter, for threads of gloo that may wait for this lock: the group is held until both are gone.
    groups: list[object] = []
    with process_as_it_was(), listening(lambda event, state: groups.append(dist.group.WORLD)) as heard:
        sft.main(*sft.make_parser().parse_args_and_config(["--config", str(file)]))
    return Outcome(heard, saved(out), out)


def refused(argv: Sequence[str]) -> str:
    """Run what is a mistake, and return what is said of it."""
    try:
        status = command(argv)
    except PenstockError as error:
        return str(error)
    raise AssertionError(f"it ran, with status {status}")


def assert_same_logs(ours: Iterable[dict[str, float]], theirs: Iterable[dict[str, float]], within: float) -> None:
    """Hold every number of every line of theirs against ours."""
    expected = [{key: float(value) for key, value in line.items()} for line in theirs]
    found = [{key: float(value) for key, value in line.items()} for line in ours]
    assert len(found) == len(expected) > 1
    shared = [{key: mine[key] for key in line} for mine, line in zip(found, expected, strict=True)]
    torch.testing.assert_close(shared, expected, rtol=within, atol=within, equal_nan=True)


def assert_same_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], within: float) -> None:
    """Hold every element of what is saved against each other; Adam makes much of gradients that are almost nothing."""
    assert theirs
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=within, atol=within)


def assert_same(ours: Outcome, theirs: Outcome, within: float = 1e-6) -> None:
    """Hold two runs against each other: what was logged, and what was saved."""
    assert_same_logs(ours.logs, theirs.logs, within)
    assert any(line.get("grad_norm", 0) > 0 for line in ours.logs)
    assert max(ours.losses) - min(ours.losses) > 0.01, "something is learned, so another order would show"
    assert_same_weights(ours.weights, theirs.weights, within)


def steps_of(logs: Iterable[Mapping[str, float]]) -> list[tuple[float, float, float]]:
    """Loss, norm of the gradient and learning rate of each step."""
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in logs if "loss" in line]


def metrics(out: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def checkpoints(out: Path) -> list[str]:
    """Name the checkpoints of a run, the oldest first."""
    return sorted((path.name for path in out.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))


# Processes


MOST_RUNS = 16  # of one call of `run_ranks`
#: In ranks: of stores, one for each run. Another group that met in the same one would read what the first has left.
PORTS: list[int] = []


def run_ranks(work: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run a function in several processes, with the variables of a launcher and no group yet.

    As torchrun does, the launcher serves the stores that they meet at: a port that is chosen and closed again may be
    another's when rank 0 opens it. The server of forks finds what it imports in the folder that it is started in.
    """
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(MOST_RUNS)]
    with chdir(ROOT):
        return run_ranks_here(_as_launched, world_size, [store.port for store in stores], work, args, fresh=True)


def _as_launched(rank: int, ports: list[int], work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()
    PORTS[:] = ports
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORTS.pop(0)), TORCHELASTIC_USE_AGENT_STORE="True")
    return work(rank, *args)


def run_child(work: Callable[..., None], *args: Any) -> int:
    """Run a function in a process of its own, and return its exit status."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=work, args=args)
    with chdir(ROOT):
        process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode
