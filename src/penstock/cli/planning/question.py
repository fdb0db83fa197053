"""From options to a plan: the model is built of its configuration, and the planner is asked."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.cli.planning.config import PlanConfig
from penstock.cli.planning.within import check_mesh, chunks_of, is_within, part_of, sharing
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.fitting import ITEMSIZES
from penstock.cli.training.learning.model import Built, build_described
from penstock.cli.training.learning.optimizer import Preparation, preparation
from penstock.cli.training.learning.optimizer_arguments import optimizer_arguments
from penstock.cli.training.planning import batches_of
from penstock.cli.training.precision import Precision, resolve_precision
from penstock.cli.training.recipe import Recipe, recipe_for
from penstock.cli.training.request import chunks_loss_of, packing_of
from penstock.cli.training.settings.common import AUTO, OFF, ON
from penstock.cli.training.sizes import step_sizes
from penstock.errors import ConfigError
from penstock.integrations.chunked import check_chunkable
from penstock.integrations.huggingface import PRESETS, ModelSource, enable_activation_checkpointing, find_model
from penstock.integrations.lora import Lora, check_precision, parse_lora
from penstock.integrations.tokenizers import has_tokenizer, tokenizer_for
from penstock.integrations.vocabulary import vocabulary_for
from penstock.planner import Machine, Plan, imagined_mesh, machine_for, parse_figure, plan


@dataclass(frozen=True)
class _Changes:
    """What becomes of a model before it is trained.

    Attributes:
        vocab_size: rows of its embedding.
        lora: the adapters; `None` trains all of it.
        chunks_loss: whether logits are never whole.
    """

    vocab_size: int
    lora: Lora | None
    chunks_loss: bool


@dataclass(frozen=True)
class Question:
    """What is planned: a run that was found to be possible, on a machine.

    Attributes:
        config: the options.
        run: the settings of such a run.
        source: where the model comes from.
        machine: what it runs on.
        precision: what is computed in.
        recipe: what a step is.
        packed: whether several rows are in a sequence.
        changes: what becomes of the model before it is trained.
    """

    config: PlanConfig
    run: TrainConfig
    source: ModelSource
    machine: Machine
    precision: Precision
    recipe: Recipe
    packed: bool
    changes: _Changes

    def answer(self) -> Plan:
        """Build the model without values, and have the planner find the best placement, or look at the one given."""
        if not is_within(self.config):
            prepared = self._prepared(None)
            return self._answer(prepared, batches_of(prepared, self.recipe, packed=self.packed))
        cp = (self.config.mesh or {}).get("cp", 1)
        with imagined_mesh(self.config.mesh or {}) as mesh:
            prepared = self._prepared(mesh)
            whole = batches_of(prepared, self.recipe, packed=self.packed)
            with sharing(prepared.model, mesh):
                return self._answer(prepared, whole if cp == 1 else chunks_of(self.recipe, cp, packed=self.packed))

    def _answer(self, prepared: Preparation, batch: Callable[[], Mapping[str, Any]]) -> Plan:
        arguments = {name: value for name, value in prepared.arguments.items() if name not in ("placement", "weights")}
        found = plan(
            prepared.model,
            prepared.optimizer,
            batch,
            machine=self.machine,
            device_bytes=self.config.device_memory,
            host_bytes=self.config.host_memory,
            folders=self.config.folder_names,
            world_size=self.recipe.world_size,
            hosts=self.config.hosts,
            mesh=self.config.mesh,
            placement=self.run.placement() if self.config.is_given else "auto",
            micro_batches=self.recipe.accumulation,
            measure=self.config.measure,
            trace=self.config.trace or None,
            **arguments,
        )
        # The planner says what it adds, and the model may have been told already.
        return replace(found, recompute=found.recompute or self.config.recompute == ON)

    def _prepared(self, mesh: DeviceMesh | None) -> Preparation:
        built: Built = build_described(
            self.source,
            vocab_size=self.changes.vocab_size,
            lora=self.changes.lora,
            chunks_loss=self.changes.chunks_loss,
            seed=self.run.seed,
        )
        part_of(built.model, mesh)
        if self.config.recompute == ON:
            enable_activation_checkpointing(built.model)
        if self.config.recompute == OFF:
            made: Any = built.model
            made.supports_gradient_checkpointing = False  # what the planner asks before it tells a model
        return preparation(built, self.run, self.recipe, self.precision)


def ask(config: PlanConfig) -> Question:
    """Find everything that can be wrong with what is asked, before a model is built. A machine may be probed.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name, file in (("--out", config.out), ("--trace", config.trace)):
        if file:
            check_target(name, Path(file))
    run = config.training()
    optimizer_arguments(run)
    figures = dict(_figure(text) for text in config.what_if)
    lora = parse_lora(run.lora, option="--lora") if run.lora else None
    source = _source(run)
    recipe = recipe_for(run, positions=source.max_seq_length, world_size=config.gpus * config.hosts)
    packed, _ = packing_of(config.packing, source)
    if run.chunked_loss == ON:
        check_chunkable(source.model_class)
    machine = _machine(config, figures)
    precision = precision_on(machine, run.precision)
    if lora is not None:
        check_precision(lora, precision, option="--lora")
    check_mesh(config)
    folders = config.folder_names or tuple(_folders_of(machine))
    on_disk = [name for name in ("params", "grads", "optimizer", "activations") if "nvme" in getattr(run, name)]
    if on_disk and not folders:
        raise ConfigError(f"--{on_disk[0]} puts state on nvme, and the machine has no folder. Name some: --folders.")
    vocab_size = vocabulary_of(source, multiple=run.pad_vocab_to)
    sizes = step_sizes(
        source.config,
        vocab_size=vocab_size,
        batch_size=recipe.batch_size,
        seq_length=recipe.seq_length,
        itemsize=ITEMSIZES[precision],
    )
    return Question(
        config=config,
        run=config.training(nvme_path=folders),
        source=source,
        machine=machine,
        precision=precision,
        recipe=recipe,
        packed=packed,
        changes=_Changes(vocab_size, lora, not is_within(config) and chunks_loss_of(run, source, sizes)),
    )


def precision_on(machine: Machine, wanted: str) -> Precision:
    """Choose the precision asked for; for "auto", what a run on that machine would choose, as far as one can tell."""
    if wanted != AUTO or (machine.device == "cpu" and machine.probed):
        return resolve_precision(wanted, torch.device("cpu"))
    return "bf16" if machine.device != "cpu" and machine.has("flops_bfloat16") else "fp32"


def vocabulary_of(source: ModelSource, *, multiple: int) -> int:
    """Say how many rows the embedding will have: those for the tokenizer, where there is one beside the model."""
    if source.folder is not None and has_tokenizer(source.folder):
        trusts = source.trust_remote_code
        tokenizer = tokenizer_for(source.folder, vocab_size=source.vocab_size, trust_remote_code=trusts)
        return vocabulary_for(tokenizer, source.vocab_size, multiple=multiple)
    return -(-source.vocab_size // multiple) * multiple


def check_target(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Raises:
        ConfigError: it is something else than a file, or its folder is none or not ours to write to.
    """
    try:
        is_other = os.path.lexists(path) and not path.is_file()
        folder = path.absolute().parent
        is_writable = folder.is_dir() and os.access(path if path.is_file() else folder, os.W_OK)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r} cannot be written: {error.strerror}. Name another file.") from error
    if is_other or not is_writable:
        why = "it is no file" if is_other else "its folder is none, or not writable"
        raise ConfigError(f"{option} {str(path)!r} cannot be written: {why}. Name another file.")


@contextmanager
def stating_figures() -> Iterator[None]:
    """Say in errors by which option a figure is stated that a machine lacks."""
    try:
        yield
    except ConfigError as error:
        error.args = (str(error).replace("state it: ", "state it: --what-if "),)
        raise


def _source(run: TrainConfig) -> ModelSource:
    """Find the model, and refuse sequences that it has no positions for."""
    wanted, trusts = run.seq_length or 2, run.trust_remote_code
    # Of a preset, which has positions for what is asked for, only.
    shortest = wanted if run.model in PRESETS else 2
    source = find_model(run.model, seq_length=shortest, trust_remote_code=trusts, needs_weights=False)
    if source.max_seq_length is not None and wanted > source.max_seq_length:
        raise ConfigError(
            f"--batch {run.batch_size}x{wanted} has longer sequences than the {source.max_seq_length} positions of "
            f"{run.model}. Use shorter ones."
        )
    return source


def _figure(text: str) -> tuple[str, float]:
    """Read a figure to change."""
    try:
        return parse_figure(text)
    except ConfigError as error:
        raise ConfigError(f"--what-if: {error}") from error


def _machine(config: PlanConfig, figures: Mapping[str, float]) -> Machine:
    """Find the machine that is meant, and change what is to be changed."""
    if not config.machine:
        print("penstock: this machine is measured, unless it was before; about a minute", file=sys.stderr)
    machine = machine_for(config.machine or None, () if config.machine else config.folders)
    try:
        machine = machine.replace(**figures)
    except ConfigError as error:
        raise ConfigError(f"--what-if: {error}") from error
    devices = int(machine.value("devices")) if machine.has("devices") else None
    if devices is not None and machine.device != "cpu" and config.gpus > devices:
        raise ConfigError(
            f"--gpus {config.gpus} is more than the {devices} of a host of {machine.name}. Use more --hosts, or "
            f"--what-if devices={config.gpus}."
        )
    if config.folders:
        missing = [name for name in ("disk_read", "disk_write", "disk_free") if not machine.has(name)]
        if missing:
            raise ConfigError(
                f"--folders: the machine {machine.name} has no figure {missing[0]}. Say it with --what-if "
                f"{missing[0]}=..., or use a machine that has disks."
            )
    return machine


def _folders_of(machine: Machine) -> list[str]:
    """Name the folders that a machine has by its figures, as the planner does."""
    if not (machine.has("folders") and machine.has("disk_free")):
        return []
    return [f"nvme{number}" for number in range(int(machine.value("folders")))]
