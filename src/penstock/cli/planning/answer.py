"""What `penstock plan` tells: the plan's table, whether a step is short enough, and the command that does it."""

import shlex
from pathlib import Path

from penstock.cli.planning.config import PlanConfig, told
from penstock.cli.planning.question import Question
from penstock.cli.planning.within import is_within
from penstock.cli.training.settings.state import HOMES
from penstock.planner import Plan, compare, explain

_FILE = "plan.json"


def about(found: Plan, question: Question) -> str:
    """Write what was found, in lines."""
    config = question.config
    parts = [str(found)]
    if config.what_if:
        parts.append(f"what if: {', '.join(config.what_if)}; not a plan of the machine as it is")
    if config.explain:
        parts.append(explain(found))
    if config.max_step is not None and found.fits:
        met = "met" if is_short_enough(found, config) else "not met"
        parts.append(f"step of at most {config.max_step:g} s: {met}")
    if config.out:
        parts.append(f"written: {config.out}")
    if found.fits and (found.mesh or is_within(config)):  # which penstock train has no option for
        parts.append("run: a script of yours, with prepare(placement='auto', mesh=..., plan=...)")
    elif found.fits and not config.what_if:
        first = "" if is_found_again(config) else f", planned with --out {_FILE}"
        parts.append(f"run{first}: {command(found, question)}")
    return "\n".join(parts)


def is_short_enough(found: Plan, config: PlanConfig) -> bool:
    """Whether a step takes no longer than it may."""
    return config.max_step is None or found.step_s <= config.max_step


def is_found_again(config: PlanConfig) -> bool:
    """Whether a run can tell its placement by itself: from a file, from its own homes, or by planning for itself."""
    # For less memory than there is, `train --plan auto` would find another placement.
    return bool(config.out) or config.is_given or not (config.device_memory or config.host_memory)


def command(found: Plan, question: Question) -> str:
    """Write the command that trains as the plan says, with the arguments that it was made for."""
    config, recipe = question.config, question.recipe
    words = ["penstock", "train"]
    if recipe.world_size > 1:
        hosts = ["--nnodes", str(config.hosts)] if config.hosts > 1 else []
        words = ["torchrun", *hosts, "--nproc-per-node", str(config.gpus), "-m", *words]
    words += _where(found, config) + told(config)
    # Of a configuration's file: a run needs the folder, with weights beside it.
    words += ["--model", str(question.source.folder) if Path(config.model).is_file() else config.model]
    words += ["--batch-size", str(recipe.batch_size), "--seq-length", str(recipe.seq_length)]
    return shlex.join([*words, "--precision", question.precision])


def side_by_side(first: str, second: str) -> str:
    """Write the plans of two files side by side."""
    return compare(Plan.read(first), Plan.read(second), names=(first, second))


def _where(found: Plan, config: PlanConfig) -> list[str]:
    """Say where state lives: by the plan's file, by another search, or by what was given."""
    if config.out:
        words = ["--plan", config.out]
    elif config.is_given:
        words = [word for name in HOMES for word in _home(name, getattr(config, name))]
    else:
        words = ["--plan", "auto" if is_found_again(config) else _FILE]
    return words + _folders(found, config)


def _home(name: str, home: str | dict[str, float]) -> list[str]:
    if home == "auto":
        return []
    text = home if isinstance(home, str) else ",".join(f"{tier}={part:g}" for tier, part in home.items())
    return [f"--{name}", text]


def _folders(found: Plan, config: PlanConfig) -> list[str]:
    """Name the folders of the nvme tier where there are some, or say how many are to be named."""
    if config.folders and config.folder_count is None:
        return [] if config.out else ["--nvme-path", *config.folders]
    number = len(found.placement.nvme_folders())
    return ["--nvme-path", *(f"DIR{place}" for place in range(1, number + 1))] if number else []
