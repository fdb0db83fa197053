"""Long sequences: the loss of a linear head without all of its logits, and torch's attention in a ring."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from penstock.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------------------
# The cross-entropy of a linear head, block by block of the vocabulary.
# ----------------------------------------------------------------------------------------------------------------------


CHUNK_BYTES = 256 << 20
LEAST_WIDTH = 128  # a narrower product of matrices leaves most of a device idle
REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias`, without ever having all of these logits in memory.

        loss = sum over tokens of (log sum_v exp(hidden . weight_v + bias_v) - hidden . weight_label - bias_label)

    The logits are made for a block of the vocabulary at a time: in forward for a running log-sum-exp, and again in
    backward, where the gradient of a block of `weight` is one product over all tokens and that of `hidden` is added up
    over the blocks in fp32. Between forward and backward live the arguments and two fp32 numbers per token. It costs
    one product more than `torch.nn.functional.cross_entropy`, computes the same in the same precision (logits in the
    dtype of `hidden`, all else in fp32) and never makes the host wait for the device.

    Call it in the `forward` of the module that owns `weight`, so that Penstock has the parameter gathered.

    Arguments:
        hidden: what the head is applied to, of shape (..., width), in fp32, bf16, fp16 or fp64. Under autocast it is
            cast to autocast's dtype.
        weight: the head's weight, of shape (vocabulary, width), in the dtype of `hidden`; under autocast in any
            floating dtype, and cast by blocks.
        labels: the class of each token, of shape (...), int64: from 0 to vocabulary - 1, or `ignore_index`.
        bias: the head's bias, of shape (vocabulary,), in the dtype of the weight; `None` without one.
        ignore_index: the label of tokens that do not count.
        reduction: "sum", or "mean" over the tokens that count.
        chunk_bytes: the size of the fp32 logits of a block, in bytes. About one and a half times as much is in use at
            once; a block is never narrower than 128 classes.

    Returns:
        The loss, a 0-dim tensor in fp32 (fp64 for fp64). As in torch, the mean over no token is NaN, with gradients of
        zero.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit, or, on a cpu, a label is no class. On other devices, which
            would have to be waited for, such a label makes the loss and the gradients NaN.

    Example:
        >>> head = torch.nn.Linear(16, 50_000, bias=False)
        >>> hidden, labels = torch.randn(2, 8, 16), torch.randint(50_000, (2, 8))
        >>> linear_cross_entropy(hidden, head.weight, labels).backward()

    Source: the running log-sum-exp is that of Milakov and Gimelshein, "Online normalizer calculation", 2018.
    """
    device_type = hidden.device.type
    in_autocast = torch.is_autocast_enabled(device_type)
    _check_loss(hidden, weight, bias, labels, ignore_index, reduction, chunk_bytes, any_dtype=in_autocast)
    if in_autocast:
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    tokens, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    column_bytes = 4 * max(1, len(tokens))
    width = max(1, chunk_bytes // (column_bytes * LEAST_WIDTH)) * LEAST_WIDTH
    total: Tensor = _SumOfLosses.apply(tokens, weight, bias, labels, ignore_index, width)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


class _SumOfLosses(torch.autograd.Function):
    """The sum of the losses of all tokens, block by block of the vocabulary.

    Shapes: hidden (T, D), weight (V, D), bias (V,) or None, labels (T,); a block has `width` of the V rows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, width: int
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Of the blocks so far, for each token: the largest logit, and the sum of exp(logit - largest).
        most = torch.full(labels.shape, torch.finfo(dtype).min, dtype=dtype, device=hidden.device)
        total, of_label = torch.zeros_like(most), torch.zeros_like(most)
        for start, stop in _blocks(weight, width):
            logits = _logits(hidden, weight, bias, start, stop)
            place, inside = _places(labels, start, stop)
            of_label = torch.where(inside, logits.gather(1, place[:, None])[:, 0], of_label)
            # The running log-sum-exp: when a larger logit comes, the sum so far is brought to it, so nothing overflows.
            before, most = most, torch.maximum(most, logits.amax(1))
            total = total * (before - most).exp() + logits.sub_(most[:, None]).exp_().sum(1)
            del logits  # before the next block takes memory for its own: one block's logits at a time
        counts = labels != ignore_index
        total.masked_fill_(counts & ((labels < 0) | (labels >= len(weight))), torch.nan)
        # The weight goes through save_for_backward: its memory may be released and filled again until backward.
        ctx.save_for_backward(hidden, weight, bias, labels, most, total)
        ctx.ignore_index, ctx.width = ignore_index, width
        return torch.where(counts, most - of_label + total.log(), 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, most, total = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros(hidden.shape, dtype=most.dtype, device=hidden.device) if of_hidden else None
        grad_weight = weight.new_empty(weight.shape) if of_weight else None
        grad_bias = bias.new_empty(bias.shape) if of_bias else None
        # `grad` carries the loss scale, so it is multiplied in before anything is rounded to fp16.
        of_token = torch.where(labels != ctx.ignore_index, grad, 0)
        factor = (of_token / total)[:, None]
        for start, stop in _blocks(weight, ctx.width):
            # d loss / d logits = (softmax(logits) - one_hot(label)) * d loss, of this block.
            grad_logits = _logits(hidden, weight, bias, start, stop)
            grad_logits.sub_(most[:, None]).exp_().mul_(factor)
            place, inside = _places(labels, start, stop)
            of_label = grad_logits.gather(1, place[:, None])
            grad_logits.scatter_(1, place[:, None], of_label - torch.where(inside, of_token, 0)[:, None])
            if grad_bias is not None:
                grad_bias[start:stop] = grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                if grad_weight is not None:
                    grad_weight[start:stop] = grad_logits.T @ hidden
                if grad_hidden is not None:
                    grad_hidden += grad_logits @ weight[start:stop].to(hidden.dtype)
            del grad_logits
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def _blocks(weight: Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each block of the weight, and the one after its last."""
    for start in range(0, len(weight), width):
        yield start, min(start + width, len(weight))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """Return a block's logits in fp32, (T, stop - start), rounded to the dtype of `hidden` before as a head would."""
    with torch.autocast(hidden.device.type, enabled=False):
        part = None if bias is None else bias[start:stop].to(hidden.dtype)
        logits = F.linear(hidden, weight[start:stop].to(hidden.dtype), part)
    return logits.to(torch.promote_types(hidden.dtype, torch.float32))


def _places(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the column of each token's label in a block, and a mask of labels that are in it, (T,) each."""
    place = labels - start
    return place.clamp(0, stop - start - 1), (place >= 0) & (place < stop - start)


def _check_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
    chunk_bytes: int,
    *,
    any_dtype: bool,
) -> None:
    """Refuse arguments of `linear_cross_entropy` that do not fit; with `any_dtype` they need not have one dtype."""
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r}: use one of {', '.join(REDUCTIONS)}.")
    if chunk_bytes <= 0:
        raise ConfigError(f"chunk_bytes={chunk_bytes} is too small. Use 1 or more.")
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(f"{shapes}: use a hidden of (..., width) and a weight of (vocabulary, width).")
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(f"{shapes}: use one label for each vector of hidden.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"{shapes}, bias {tuple(bias.shape)}: use one number for each row of the weight.")
    if labels.dtype != torch.int64:
        raise ConfigError(f"labels are {labels.dtype}. Use torch.int64.")
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
    if not all(tensor.is_floating_point() for tensor in tensors.values()):
        raise ConfigError(f"{dtypes}: use floating point.")
    if not any_dtype and len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise ConfigError(f"{dtypes}: use one dtype, or autocast.")
    tensors["labels"] = labels
    if len({tensor.device for tensor in tensors.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ConfigError(f"{devices}: use one device.")
    if labels.device.type == "cpu":  # elsewhere the host would wait for the device
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= len(weight)))
        if wrong.any():
            raise ConfigError(
                f"Label {labels[wrong][0]} is none of the {len(weight):,} classes of the weight, and not "
                f"ignore_index={ignore_index}."
            )


# ----------------------------------------------------------------------------------------------------------------------
# Attention in a ring, where the device has it (`torch.distributed.tensor.experimental.context_parallel`).
# ----------------------------------------------------------------------------------------------------------------------


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
    tokens = _checked_batch(mesh, batch)
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


def _checked_batch(mesh: DeviceMesh, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the `input_ids` of a batch; refuse meshes and batches that ring attention cannot take."""
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
