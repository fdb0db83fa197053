"""What a run takes of the device, the host and the disks: refused before its data is read, planned where that is asked.

Activations are counted by plans alone.
"""

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer
from transformers.integrations import get_available_reporting_integrations

from penstock.errors import ConfigError, MemoryBudgetError
from penstock.footprint import Footprint, footprint, free_space
from penstock.integrations.chunked import chunk_loss
from penstock.integrations.huggingface import enable_activation_checkpointing
from penstock.integrations.transformers import settings
from penstock.integrations.trl import check_arguments
from penstock.train.arguments import Request
from penstock.train.collator import collator_for
from penstock.train.model import Built
from penstock.train.run_file import checkpoints_of
from penstock.train.trainer import RULES

if TYPE_CHECKING:
    from penstock.planner import Plan

#: Bytes that a checkpoint of adapters has for each trained parameter, at most: its fp32 value and the rule's states.
_OF_TRAINED = 16


@dataclass(frozen=True)
class Outlook:
    """How a run will be.

    Attributes:
        arguments: those of `penstock.prepare`.
        found: what it takes: training state, and in `output_dir` checkpoints and the model.
    """

    arguments: dict[str, Any]
    found: Footprint

    def check(self) -> None:
        """Refuse a run for which there is no room.

        Raises:
            MemoryBudgetError: the device, the host or a disk is too small.
        """
        if self.found.lacks:
            raise MemoryBudgetError(" ".join(self.found.lacks))

    def __str__(self) -> str:
        chosen = self.arguments.get("plan")
        table = "\n".join(line for line in str(self.found).splitlines() if line not in self.found.lacks)
        if chosen is None:
            return f"{table}\nactivations come beside that: --placement auto counts them"
        return f"{chosen}\n{table}"


def look(request: Request, built: Built, *, say: Callable[[str], None]) -> Outlook:
    """Find out how a run will be. Collective.

    Arguments:
        request: what is asked for.
        built: the model, before it is prepared.
        say: is told what takes long.

    Raises:
        ConfigError: what is asked for cannot be done, or a plan is of another run.
    """
    own, training = request.penstock, request.training
    settings.check_training(training, {})
    check_arguments(training)
    if own.rule is None:
        settings.check_optim(training)
    absent = set(training.report_to) - set(get_available_reporting_integrations())
    if absent:
        raise ConfigError(f"--report_to {', '.join(sorted(absent))} is not installed. Install it with pip.")
    collator_for(built.model.config, training, built.tokenizer)  # refuses rows that would see each other
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = _mesh(request, ranks)
    precision = settings.choose_precision(training, {}, built.model)
    optimizer = _optimizer(request, built)
    common = {"stage": own.stage, "precision": precision, "weights": built.weights}
    options = own.to_options()
    arguments: dict[str, Any] = {"stage": own.stage, "options": options, "placement": own.to_placement()}
    if own.plan or own.placement:
        chosen = _plan(request, built, optimizer, common, ranks, say=say)
        arguments |= {"placement": "auto", "plan": chosen}
        by_hand = {**common, **chosen.prepare_arguments(options)}
    else:
        by_hand = {**common, "placement": arguments["placement"], "options": options}
    if own.dp_replicate > 1:
        arguments["mesh"] = init_device_mesh(training.device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    found = _of_adapters(footprint(built.model, optimizer, mesh=mesh, **by_hand), request, built)
    if built.weights is not None:
        arguments["weights"] = built.weights
    return Outlook(arguments, replace(found, rooms=[*found.rooms, _disk(request, built, found)]))


def _mesh(request: Request, ranks: int) -> dict[str, int]:
    """Count the ranks along each dimension."""
    own = request.penstock
    if own.dp_replicate < 1 or ranks % own.dp_replicate:
        raise ConfigError(f"--dp_replicate {own.dp_replicate} does not divide the {ranks} ranks that there are.")
    if own.dp_replicate > 1 and (not own.stage or own.placement or own.plan):
        what = "--stage 0 has a copy on every rank" if not own.stage else "plans are for one copy"
        raise ConfigError(f"--dp_replicate {own.dp_replicate}: {what}. Leave one of them out.")
    return {"dp_replicate": own.dp_replicate, "dp_shard": ranks // own.dp_replicate}


def _optimizer(request: Request, built: Built) -> torch.optim.Optimizer:
    """Make the optimizer that the trainer will make, as far as its states go."""
    own, training, model = request.penstock, request.training, built.model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("No parameter of the model is trained: all are frozen. Name another model.")
    if own.rule is not None:
        return RULES[own.rule](model, training, set(trained))
    made, arguments = Trainer.get_optimizer_cls_and_kwargs(training, model)
    optimizer: torch.optim.Optimizer = made(list(trained.values()), **arguments)
    return optimizer


def _plan(
    request: Request,
    built: Built,
    optimizer: torch.optim.Optimizer,
    common: dict[str, Any],
    ranks: int,
    *,
    say: Callable[[str], None],
) -> "Plan":
    """Read the plan that a run names, or find the best one; the first rank's, on every rank. Collective."""
    from penstock.planner import Plan, machine_for, plan  # what other runs do without
    from penstock.planner.this_machine import machine_of_ranks

    own, training, folders = request.penstock, request.training, request.penstock.nvme_path or ()
    recomputes = bool(training.gradient_checkpointing)
    if recomputes:
        enable_activation_checkpointing(built.model)
    chosen: Plan | None = None
    if own.plan:
        chosen = Plan.read(own.plan)
        chosen.check_for(built.model, None, ranks, own.stage, common["precision"])
        if chosen.placement.nvme_path and own.nvme_path:
            chosen = replace(chosen, placement=replace(chosen.placement, nvme_path=own.nvme_path))
    else:
        say("planning")
        machine = machine_for(None, folders) if ranks == 1 else machine_of_ranks(folders)
        if machine is not None:  # the first rank's
            options = own.to_options()
            model, optimizer = _planned_model(request, built, optimizer)
            chosen = plan(
                model,
                optimizer,
                _batches(request),
                machine=machine,
                device_bytes=options.device_bytes,
                host_bytes=options.host_bytes,
                folders=folders,
                world_size=ranks,
                hosts=max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))),
                micro_batches=training.gradient_accumulation_steps,
                options=options,
                overlap="forward",  # the trainer asks for the norm of all gradients
                **{name: value for name, value in common.items() if name != "weights"},
            )
    chosen = _shared(chosen, training.device) if ranks > 1 else chosen
    assert chosen is not None
    if chosen.recompute and not recomputes:
        training.gradient_checkpointing = training.activation_checkpointing = True
    return replace(chosen, recompute=chosen.recompute or recomputes)


def _planned_model(
    request: Request, built: Built, optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """Return the model as TRL computes with it, without whole logits, where that can be told; and its optimizer."""
    if built.weights is None:
        return built.model, optimizer
    model = copy.deepcopy(built.model)  # on the meta device
    with suppress(ConfigError):  # of a class that is not known to allow it
        chunk_loss(model)
    return model, _optimizer(request, Built(model, built.tokenizer))


def _batches(request: Request) -> Callable[[], dict[str, Any]]:
    """Make a function that makes a micro-batch of the run's sizes, without its data."""
    training = request.training
    ids = torch.zeros(training.per_device_train_batch_size, training.max_length or 1024, dtype=torch.int64)
    return lambda: {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _shared(chosen: "Plan | None", device: torch.device) -> "Plan":
    """Give the first rank's plan to all, as text: no object of another rank is unpickled. Collective."""
    from penstock.planner import Plan

    text = b"" if chosen is None else chosen.to_json().encode()
    length = torch.tensor(len(text), device=device)
    dist.broadcast(length, src=0)
    held = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(held, src=0)
    return chosen or Plan.from_json(bytes(held.tolist()).decode())


def _of_adapters(found: Footprint, request: Request, built: Built) -> Footprint:
    """Count what checkpoints of adapters take: nothing of the base."""
    if not request.model.use_peft:
        return found
    trained = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    return replace(found, checkpoint_bytes=min(found.checkpoint_bytes, _OF_TRAINED * trained // found.world_size))


def _disk(request: Request, built: Built, found: Footprint) -> Any:
    """Count what a run writes in `output_dir`, of all ranks, and what is free there. What is there is replaced."""
    training, out = request.training, Path(str(request.training.output_dir))
    saved = [p for p in built.model.parameters() if p.requires_grad or not request.model.use_peft]
    model_bytes = sum(p.numel() * p.element_size() for p in saved)
    each = model_bytes if training.save_only_model else found.checkpoint_bytes * found.world_size
    saves = str(getattr(training.save_strategy, "value", training.save_strategy)) != "no"
    count = (training.save_total_limit or 0) + 1 if saves else 0  # with the one that is being written
    there = sum(map(_bytes_of, checkpoints_of(out)))
    needed, (_, free) = max(count * each - there, min(count, 1) * each) + model_bytes, free_space(out)
    lack = (
        f"--output_dir {str(out)!r} has {free:,} bytes free, and {count} checkpoints with the model need {needed:,}. "
        "Use a smaller --save_total_limit, or another disk."
    )
    room = {"name": "checkpoints and model", "needed": needed, "available": free}
    return replace(found.rooms[0], **room, lack=lack if needed > free else None)


def _bytes_of(folder: Path) -> int:
    """Add up the files of a folder at any depth."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
