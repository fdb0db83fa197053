"""Sequences that several ranks share: each has a chunk of the tokens, and attends over all of them for some heads."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.sequences.batches import NOT_TRAINED, Batch
from penstock.cli.training.learning.loss import Loss
from penstock.cli.training.settings.common import ON
from penstock.errors import ConfigError
from penstock.integrations.ulysses import check_shareable, sequence_parallel
from penstock.parallel import cut


class SharedLoss(Loss):
    """Calls a model with this rank's chunk of a batch, which all ranks that share it were given whole.

    Every rank of a group makes every call.

    Arguments:
        model: a causal language model of transformers, or a peft model around one; before it is prepared.
        mesh: of all ranks, as `mesh_of` makes it.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model)
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
        labels = chunk.pop("shift_labels")
        logits: Tensor = self._model(**chunk, use_cache=False).logits
        total = F.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=NOT_TRAINED, reduction="sum"
        )
        return total / max(1, label_count)


def mesh_of(ranks: Ranks) -> DeviceMesh | None:
    """Make the mesh (dp_shard, cp) of the ranks; `None` where none share a sequence. Every rank calls it."""
    if ranks.cp == 1:
        return None
    shape = (ranks.dp_world_size, ranks.cp)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("dp_shard", "cp"))


def check_cp(config: TrainConfig, world_size: int) -> None:
    """Refuse what `--cp` cannot be beside.

    Raises:
        ConfigError: it does not divide the ranks, or another option does not go with it.
    """
    if config.cp == 1:
        return
    if world_size % config.cp:
        raise ConfigError(
            f"--cp {config.cp} does not divide the {world_size} rank{'s' * (world_size > 1)} there are. Start a "
            f"multiple of {config.cp} with torchrun, or use a divisor of {world_size}."
        )
    others = {
        "--plan": bool(config.plan),
        "--chunked-loss on": config.chunked_loss == ON,
        "--compile": config.compile,
    }
    if asked := next((name for name, is_asked in others.items() if is_asked), None):
        raise ConfigError(f"{asked} is for whole sequences, which --cp {config.cp} cuts. Leave one of them out.")


def check_model(model: nn.Module, cp: int) -> None:
    """Refuse a model whose sequences ranks cannot share, once it is built.

    Raises:
        ConfigError: its attention or its loss are others than they are shared, or its heads cannot be divided.
    """
    known: Any = model
    config = known.config
    try:
        if not getattr(known, "_supports_attention_backend", False):
            raise ConfigError("the model's attention is its own, not one of transformers'")
        if getattr(config, "output_router_logits", False):
            raise ConfigError("the model's loss has a part of its router, which is of whole sequences")
        check_shareable(config, cp)
    except ConfigError as error:
        raise ConfigError(f"--cp {cp}: {error}. Leave --cp out, or use another model.") from error
