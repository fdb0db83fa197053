"""The file of a run, `OUT/run.yaml`: every option with the value that the run has, and where it was made."""

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.cli.keys import ABOUT, key_value
from penstock.cli.options import about_of, options_of
from penstock.cli.training.about import about
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.optimizer_arguments import takes_weight_decay, weight_decay_of
from penstock.cli.training.recipe import Course
from penstock.errors import ConfigError
from penstock.files import check_own, write_whole, yaml_of

RUN_NAME = "run.yaml"
_HEAD = "# penstock train --config of this file makes the run again. What is typed beside it wins.\n"


def write_run_file(
    config: TrainConfig,
    resolved: Mapping[str, Any],
    *,
    world_size: int,
    plan: Mapping[str, Any] | None = None,
) -> Path:
    """Write what a run is, so that `--config` makes it again. The first rank calls it.

    Arguments:
        config: the settings.
        resolved: by the names of fields, values that were left to the run and are known now, such as `lr` and `steps`.
        world_size: how many ranks there are.
        plan: what training state takes, in bytes by tier.

    Returns:
        The path of the file. One that was there is replaced as a whole.

    Raises:
        ConfigError: it cannot be written.
    """
    path = config.out / RUN_NAME
    described = about(world_size=world_size) | ({"plan": dict(plan)} if plan else {})
    text = run_file(resolved_settings(config, resolved), described)
    try:
        write_whole(check_own(path), text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Free space there, or use another --out."
        ) from error
    return path


def resolved_by(config: TrainConfig, course: Course) -> dict[str, Any]:
    """List the fields that a course has worked out, as `write_run_file` takes them.

    A run that was asked for by its global batch has no accumulation of its own: other numbers of ranks have another.
    """
    values: dict[str, Any] = {name: getattr(course, name) for name in ("seq_length", "lr", "batch_size", "steps")}
    values["warmup"] = float(course.warmup_steps)
    if takes_weight_decay(config.optimizer_name):
        values["weight_decay"] = weight_decay_of(config)
    return values | ({} if config.global_batch else {"accumulation": course.accumulation})


def resolved_settings(config: TrainConfig, resolved: Mapping[str, Any]) -> TrainConfig:
    """Put the values of a run in the place of those that were left to it.

    What says the same in another way is left out: a run of so many `steps` is not one of `epochs` too.
    """
    options = options_of(TrainConfig)
    rivals = {rival: None for name in resolved for rival in about_of(options[name]).rivals}
    return replace(config, **(rivals | dict(resolved)))


def run_file(config: TrainConfig, described: Mapping[str, Any]) -> str:
    """Write the text of the file: the options under the headings of `--help`, and a key that is passed over."""
    parts = [_HEAD]
    # The first heading's come first, as in --help.
    ordered = sorted(fields(config), key=lambda each: about_of(each).panel is not None)
    for panel, each_of_panel in groupby(ordered, key=lambda each: about_of(each).panel):
        values = {each.name: key_value(each, getattr(config, each.name)) for each in each_of_panel}
        parts.append(f"\n# {panel}\n" if panel else "\n")
        parts.append(yaml_of(values))
    parts.append("\n# Where it was made: not read again.\n")
    parts.append(yaml_of({ABOUT: dict(described)}))
    return "".join(parts)
