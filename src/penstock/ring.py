"""Ring attention: torch's own, where the device has it (`torch.distributed.tensor.experimental.context_parallel`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError


@contextmanager
def ring_attention(
    mesh: DeviceMesh, batch: Mapping[str, Tensor], *, ignore_index: int = -100
) -> Iterator[dict[str, Tensor]]:
    """Have torch's sdpa attend over whole sequences while each rank of a mesh holds a part of them.

    Keys and values go around in a ring, so there may be more ranks than heads. Which tokens are a rank's torch decides
    (it takes early and late ones together, for equal work), so labels are shifted before. Forward and backward are both
    inside. Attention is causal: padding and packed documents are not told apart; `penstock.integrations.ulysses` does.

    Arguments:
        mesh: of one dimension, the `cp` one, on a device for which torch has ring attention: none on the cpu.
        batch: `input_ids` and, where there are any, `labels` (not shifted), int64, (batch, length), the same on every
            rank of the mesh, on its device.
        ignore_index: the label of tokens that do not count.

    Yields:
        This rank's `input_ids`, `position_ids` and, if there were labels, `shift_labels`.

    Raises:
        ConfigError: the mesh is on the cpu or has several dimensions, twice its ranks do not divide the length, or the
            batch has something else.

    Example:
        >>> with ring_attention(mesh["cp"], batch) as part:  # doctest: +SKIP
        ...     labels = part.pop("shift_labels")
        ...     logits = model(**part).logits
        ...     losses = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        ...     optimizer.backward(token_mean(losses, (labels != -100).sum()))

    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
    """
    tokens = _checked(mesh, batch)
    from torch.distributed.tensor.experimental import context_parallel  # seconds to import

    length = tokens.shape[1]
    part = {
        "input_ids": tokens.clone(),
        "position_ids": torch.arange(length, device=tokens.device).repeat(len(tokens), 1),
    }
    if "labels" in batch:
        part["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=ignore_index)
    buffers = list(part.values())  # torch gives each of them the memory of this rank's part meanwhile
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
        yield part


def _checked(mesh: DeviceMesh, batch: Mapping[str, Tensor]) -> Tensor:
    if mesh.ndim != 1:
        raise ConfigError(f"The mesh of ring attention has {mesh.ndim} dimensions. Give one of them: mesh['cp'].")
    if mesh.device_type == "cpu":
        raise ConfigError(
            "torch has no ring attention on the cpu. Use penstock.integrations.ulysses.sequence_parallel() there."
        )
    others = sorted(batch.keys() - {"input_ids", "labels"})
    if "input_ids" not in batch or others:
        raise ConfigError(
            f"Ring attention takes input_ids and labels, and the batch has {', '.join(batch) or 'nothing'}. Padding "
            "and packed documents are for penstock.integrations.ulysses.sequence_parallel()."
        )
    tokens = batch["input_ids"]
    if tokens.ndim != 2 or tokens.shape[1] % (2 * mesh.size()):
        raise ConfigError(
            f"input_ids have shape {tuple(tokens.shape)}, and {mesh.size()} ranks take a length that "
            f"{2 * mesh.size()} divides."
        )
    return tokens
