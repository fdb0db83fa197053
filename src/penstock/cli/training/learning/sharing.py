"""Sequences that several ranks share: each has a chunk of the tokens, and attends over all of them for some heads."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.sequences.batches import NOT_TRAINED, Batch
from penstock.cli.training.learning.loss import Loss
from penstock.errors import ConfigError
from penstock.integrations.ulysses import check_shareable, sequence_parallel
from penstock.parallel import cut


class SharedLoss(Loss):
    """Calls a model with this rank's chunk of a batch, which all ranks that share it were given whole.

    Every rank of a group makes every call.

    Arguments:
        model: a causal language model of transformers, or a peft model around one; before it is prepared.
        mesh: of all ranks, as `mesh_of` makes it.
        chunks_loss: whether the model makes its loss without whole logits, by `chunk_loss`.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, chunks_loss: bool = False) -> None:
        super().__init__(model)
        self._chunks_loss = chunks_loss
        self._group = mesh.get_group("cp")
        self._rank, self._ranks = mesh.get_local_rank("cp"), self._group.size()

    def around(self) -> AbstractContextManager[None]:
        """Surround calls, and what goes backward from them: activations may be computed again there."""
        return sequence_parallel(self._model, self._group)

    def __call__(self, batch: Batch, label_count: int) -> Tensor:
        """Run the model, and return the 0-dim sum of the losses of this rank's chunk over `label_count`, in nats.

        Summed over the ranks that share the batch it is what `Loss` returns.
        """
        inputs = batch.inputs()
        # Padding is on the right, and no label is in it: causal attention alone keeps it out of what counts.
        inputs.pop("attention_mask", None)
        chunk: dict[str, Any] = cut({**inputs, "labels": batch.labels}, self._rank, self._ranks)
        if self._chunks_loss and torch.is_grad_enabled():
            loss: Tensor = self._model(**chunk, num_items_in_batch=max(1, label_count), use_cache=False).loss
            return loss
        labels = chunk.pop("shift_labels")
        logits: Tensor = self._model(**chunk, use_cache=False).logits
        total = F.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=NOT_TRAINED, reduction="sum"
        )
        return total / max(1, label_count)


def loss_of(model: nn.Module, mesh: DeviceMesh | None, *, chunks_loss: bool) -> Loss:
    """Make the loss of a model that is not prepared yet: of whole sequences, or of those that ranks of `mesh` share."""
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return Loss(model)
    return SharedLoss(model, mesh, chunks_loss=chunks_loss)


def mesh_of(ranks: Ranks) -> DeviceMesh | None:
    """Make the mesh (dp_replicate, dp_shard, cp) of the ranks; `None` where all share one copy, and no sequence.

    Every rank calls it.
    """
    if ranks.dp_replicate == ranks.cp == 1:
        return None
    # One rank along a dimension needs no groups of its own.
    sizes = {name: size for name, size in ranks.mesh.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_mesh(config: TrainConfig, world_size: int) -> None:
    """Refuse what `--dp-replicate` and `--cp` cannot be beside.

    Raises:
        ConfigError: they do not divide the ranks, or another option does not go with them.
    """
    asked = {"--dp-replicate": config.dp_replicate, "--cp": config.cp}
    given = " x ".join(f"{name} {size}" for name, size in asked.items() if size > 1)
    if not given:
        return
    least = config.dp_replicate * config.cp
    if world_size % least:
        mesh = f"mesh (dp_replicate {config.dp_replicate} x dp_shard {world_size}/{least} x cp {config.cp})"
        raise ConfigError(
            f"{given} does not divide the {world_size} rank{'s' * (world_size > 1)} there are: {mesh}. Start a "
            f"multiple of {least} with torchrun, or use sizes whose product divides {world_size}."
        )
    if config.dp_replicate > 1 and not config.stage:
        raise ConfigError(f"--dp-replicate {config.dp_replicate} is for --stage 1 to 3: at 0 every rank has a copy.")
    if config.plan:
        raise ConfigError(f"--plan is for ranks that share one copy and no sequence, unlike {given}. Leave one out.")
    if config.compile and config.cp > 1:
        raise ConfigError(f"--compile is for whole sequences, which --cp {config.cp} cuts. Leave one of them out.")


def check_model(model: nn.Module, cp: int) -> None:
    """Refuse a model whose sequences ranks cannot share, once it is built.

    Raises:
        ConfigError: its attention or its loss are others than they are shared, or its heads cannot be divided.
    """
    known: Any = model
    try:
        if getattr(known.config, "output_router_logits", False):
            raise ConfigError("the model's loss has a part of its router, which is of whole sequences")
        check_shareable(model, cp)
    except ConfigError as error:
        raise ConfigError(f"--cp {cp}: {error}. Leave --cp out, or use another model.") from error
