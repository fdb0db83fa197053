"""The plan of a run: read from a file or found, held against the run, and the same on every rank."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.sequences.batches import Batch
from penstock.cli.training.learning.loss import Loss
from penstock.cli.training.learning.optimizer import Preparation
from penstock.cli.training.recipe import Recipe
from penstock.cli.training.settings.common import AUTO, ON
from penstock.errors import ConfigError
from penstock.files import write_whole
from penstock.integrations.huggingface import enable_activation_checkpointing
from penstock.planner import Machine, Plan, machine_for, plan
from penstock.planner.here import machine_of_ranks

PLAN_NAME = "plan.json"
#: Segments of a packed sequence that is rehearsed: more of them cost the same.
_SEGMENTS = 2


def machine_of(ranks: Ranks, config: TrainConfig) -> Machine | None:
    """Give the machine that a plan is to be found for, on the first rank. Every rank calls it.

    Several ranks have met: what lies between them is measured by all.
    """
    return machine_for(None, config.nvme_path) if ranks.world_size == 1 else machine_of_ranks(config.nvme_path)


def plan_for(
    prepared: Preparation,
    config: TrainConfig,
    recipe: Recipe,
    machine: Machine | None,
    *,
    packed: bool,
    hosts: int,
) -> Plan:
    """Read the plan that a run names, or find the best one for it. The first rank calls it.

    Arguments:
        prepared: the model, which is told to recompute where that is asked for, its optimizer, and other arguments.
        config: the settings.
        recipe: what a step is, of how many ranks.
        machine: what a plan is found for.
        packed: whether several rows may be in a sequence.
        hosts: on how many hosts the ranks are.

    Raises:
        ConfigError: the plan is of another run, or does not fit; or none can be found.
    """
    told = config.recompute == ON
    if told:
        enable_activation_checkpointing(prepared.model)
    if config.plan != AUTO:
        found = Plan.read(config.plan)
        found.check_for(prepared.model, None, recipe.world_size, config.stage, prepared.arguments["precision"])
        if found.placement.nvme_path and config.nvme_path:
            found = replace(found, placement=replace(found.placement, nvme_path=config.nvme_path))
    else:
        asked = {name: value for name, value in prepared.arguments.items() if name not in ("placement", "weights")}
        found = plan(
            prepared.model,
            prepared.optimizer,
            batches_of(prepared, recipe, packed=packed),
            machine=machine,
            device_bytes=config.device_bytes,
            host_bytes=config.host_bytes,
            folders=config.nvme_path,
            world_size=recipe.world_size,
            hosts=hosts,
            micro_batches=recipe.accumulation,
            **asked,
        )
    # The planner says what it adds, the run what there is.
    return replace(found, recompute=found.recompute or told)


def batches_of(prepared: Preparation, recipe: Recipe, *, packed: bool) -> Callable[[], dict[str, Any]]:
    """Make a function that makes what the model is called with: a micro-batch of the run's sizes, without its data."""
    loss = Loss(prepared.model)
    batch = micro_batch(recipe.batch_size, recipe.seq_length, packed=packed)
    return lambda: loss.arguments(batch, batch.label_count)


def micro_batch(batch_size: int, seq_length: int, *, packed: bool) -> Batch:
    """Make a micro-batch of sequences of one length, as the run's own are arranged, of one and the same token.

    Arguments:
        batch_size: sequences.
        seq_length: tokens of each.
        packed: whether a sequence has several segments; else the last token of the first one is padding, where there
            are more of them.
    """
    ids = torch.zeros(batch_size, seq_length, dtype=torch.int64)
    positions = torch.arange(seq_length) % -(-seq_length // _SEGMENTS)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return Batch(
        input_ids=ids,
        labels=ids.clone(),
        position_ids=positions.expand(batch_size, seq_length).clone() if packed else None,
        attention_mask=mask if batch_size > 1 and not packed else None,
        label_count=ids.numel(),
        token_count=ids.numel(),
    )


def planned(prepared: Preparation, chosen: Plan, config: TrainConfig) -> Preparation:
    """Do what a plan says: tell the model to recompute, and hand the rest to `prepare`.

    Raises:
        ConfigError: the plan does not fit, or an option says something else than it.
    """
    if chosen.recompute and config.recompute != ON:
        enable_activation_checkpointing(prepared.model)
    made = replace(prepared, plan=chosen)
    made.by_hand()  # which refuses what contradicts the plan
    return made


def shared(chosen: Plan | None, ranks: Ranks) -> Plan:
    """Hand the first rank's plan to all. Every rank calls it; others than the first have none."""
    text = b"" if chosen is None else chosen.to_json().encode()
    length = int(ranks.from_first(torch.tensor(len(text))))
    held = torch.frombuffer(bytearray(text or bytes(length)), dtype=torch.uint8)
    ranks.from_first(held)
    if chosen is not None:
        return chosen
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PLAN_NAME
        path.write_bytes(held.numpy().tobytes())
        return Plan.read(path)


def write_plan(chosen: Plan, path: Path) -> None:
    """Write a plan's file. One that was there is replaced as a whole, or stays as it was.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, chosen.to_json())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Use another --out.") from error


def about_batch(chosen: Plan, recipe: Recipe) -> str:
    """Say that a plan is for other batches than those of a run; nothing where it is for the same."""
    own = f"{recipe.batch_size}x{recipe.seq_length}"
    count = f"{recipe.accumulation} of " if recipe.accumulation > 1 else ""
    if not chosen.batch or chosen.batch.startswith(f"{count}{own} "):
        return ""
    return f"the plan is for batches of {chosen.batch}; this run has {count}{own}: its steps and its peaks are others"
