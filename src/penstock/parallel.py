"""One sequence over several ranks: cut it, attend over all of it, and take the mean over all of its tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError

IGNORED = -100


def cut(
    batch: Mapping[str, Tensor], rank: int, ranks: int, *, ignore_index: int = IGNORED, pad_token: int = 0
) -> dict[str, Tensor | None]:
    """Return a rank's contiguous chunk of whole sequences. Every rank of its group has the same sequences.

    Labels are shifted before the cut, so the last token of a chunk still learns the next one. A length that
    `ranks` does not divide is padded on the right, with labels that do not count.

    Arguments:
        batch: `input_ids` of shape (batch, length), int64; where it has them `labels` (not shifted), `attention_mask`
            (1 for a token, 0 for padding) and `position_ids` (starting again with each packed document), of that shape.
        rank: the rank of this process in its group.
        ranks: the number of ranks of the group.
        ignore_index: the label of tokens that do not count.
        pad_token: the token that pads `input_ids`.

    Returns:
        `input_ids`, `position_ids` and, if there were labels, `shift_labels`, each of shape (batch, chunk), and
        `attention_mask`: bool of shape (batch, 1, length, length) over the whole padded sequence, true where a token
        is seen, or `None` where plain causal attention says the same.

    Raises:
        ConfigError: a shape or a rank does not fit, or the batch has another tensor, which cannot be cut.

    Example:
        >>> cut({"input_ids": torch.arange(6)[None]}, rank=1, ranks=2)["input_ids"]
        tensor([[3, 4, 5]])
    """
    tokens = _checked(batch, rank, ranks)
    length = tokens.shape[1]
    whole = -(-length // ranks) * ranks
    chunk = slice(rank * whole // ranks, (rank + 1) * whole // ranks)

    def widen(values: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, whole - length), value=value)

    positions = batch.get("position_ids")
    plain = torch.arange(whole, device=tokens.device).expand(len(tokens), whole)
    places = plain if positions is None else torch.cat((positions, plain[:, : whole - length]), 1)
    result: dict[str, Tensor | None] = {
        "input_ids": widen(tokens, pad_token)[:, chunk].contiguous(),
        "position_ids": places[:, chunk].contiguous(),
    }
    if "labels" in batch:
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, whole - length + 1), value=ignore_index)
        result["shift_labels"] = shifted[:, chunk].contiguous()
    padding = batch.get("attention_mask")
    # Right padding needs no mask: no token that counts comes after it.
    result["attention_mask"] = None
    if padding is not None or positions is not None:
        real = plain < length if padding is None else widen(padding, 0).bool()
        result["attention_mask"] = _mask(places, real)
    return result


def token_mean(loss_sum: Tensor, tokens: Tensor | int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a loss whose mean over the ranks of a group, and its gradient's, is the mean over all of their tokens.

        sum of the losses on this rank * ranks / tokens of all ranks

    The engine takes the mean of gradients over its data ranks. With different numbers of tokens on the ranks, that
    would give tokens different weights. With gradient accumulation, pass the tokens of all micro-batches of the step
    on this rank to each call. Collective: every rank of the group makes the same number of calls.

    Arguments:
        loss_sum: the sum of the losses of this rank's tokens, 0-dim.
        tokens: the number of tokens of this rank that count; zero is allowed.
        group: all ranks over which the engine takes the mean of gradients; `None` for all ranks.

    Returns:
        The loss to call `backward` on, 0-dim. It is zero where no rank has a token.

    Example:
        >>> loss = token_mean(loss_sum, (labels != -100).sum())  # doctest: +SKIP
    """
    total = torch.as_tensor(tokens, device=loss_sum.device).detach().to(torch.int64).clone()
    dist.all_reduce(total, group=group)
    return loss_sum * (dist.get_world_size(group) / total.clamp(min=1).to(loss_sum.dtype))


def ulysses_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the attention over a sequence of which each rank has a chunk: each rank computes it for some heads.

    With fewer heads of keys than ranks, each head is copied to all ranks that need it.

    Arguments:
        attend: the attention of (batch, some heads, length, width) queries, keys and values, the latter two maybe with
            fewer heads; returns the shape of its queries (its values' width may differ).
        query: (batch, heads, chunk, width), of any floating dtype.
        key: (batch, heads of keys, chunk, width).
        value: (batch, heads of keys, chunk, width).
        group: the ranks that share the sequence, chunks in their order; `None` for all ranks.

    Returns:
        (batch, heads, chunk, width).

    Raises:
        ConfigError: the ranks do not divide the heads.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    ranks = dist.get_world_size(group)
    check_heads(query.shape[1], key.shape[1], ranks)
    if key.shape[1] < ranks:
        copies = ranks // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    mine = attend(*(_exchange(part, group, to_heads=True) for part in (query, key, value)))
    return _exchange(mine, group, to_heads=False)


def check_heads(heads: int, key_heads: int, ranks: int) -> None:
    """Refuse heads that ranks cannot share.

    Raises:
        ConfigError: the ranks do not divide the heads, nor the heads of keys the ranks or the other way round.
    """
    if heads % ranks:
        raise ConfigError(f"{heads} attention heads cannot be shared by {ranks} ranks: take a divisor of {heads}")
    if key_heads % ranks and ranks % key_heads:
        raise ConfigError(
            f"{key_heads} heads of keys cannot be shared by {ranks} ranks: take a divisor or a multiple of {key_heads}"
        )


def _exchange(values: Tensor, group: dist.ProcessGroup | None, *, to_heads: bool) -> Tensor:
    result: Tensor = _Exchange.apply(values, group, to_heads)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all between (batch, heads, chunk, width) and (batch, heads / ranks, length, width); its own adjoint."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _moved(values, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.group, to_heads=not ctx.to_heads), None, None


def _moved(values: Tensor, group: dist.ProcessGroup | None, to_heads: bool) -> Tensor:
    ranks = dist.get_world_size(group)
    # The leading dimension is the receiving rank of `sent`, and the sending rank of `received`.
    sent = torch.unflatten(values, 1 if to_heads else 2, (ranks, -1)).movedim(1 if to_heads else 2, 0).contiguous()
    received = torch.empty_like(sent)
    # As bytes: not every backend supports every dtype, and nothing is computed.
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    return received.movedim(0, 2).flatten(2, 3) if to_heads else received.movedim(0, 1).flatten(1, 2)


def _mask(places: Tensor, real: Tensor) -> Tensor:
    """Return the mask, bool of shape (batch, 1, length, length): a token sees earlier tokens of its document.

    Padding is a document of its own, so no row is empty: a softmax over no tokens would be NaN.
    """
    starts = torch.diff(places, prepend=places[:, :1] - 1) != 1
    documents = torch.where(real, starts.cumsum(1), -1)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def _checked(batch: Mapping[str, Tensor], rank: int, ranks: int) -> Tensor:
    known = ("input_ids", "labels", "attention_mask", "position_ids")
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} is not one of {ranks}: give the place in the group that shares the sequence")
    if "input_ids" not in batch:
        raise ConfigError("the batch has no input_ids: a sequence is cut by its tokens")
    tokens = batch["input_ids"]
    for name, values in batch.items():
        if name not in known:
            raise ConfigError(f"{name!r} of the batch cannot be cut: leave only {', '.join(known)} in it")
        if values.dim() != 2 or values.shape != tokens.shape:
            raise ConfigError(
                f"{name} has the shape {tuple(values.shape)} beside input_ids of {tuple(tokens.shape)}: "
                "both have to be (batch, length)"
            )
    return tokens
