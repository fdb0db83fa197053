"""One sequence over several ranks gives the gradients, and the training, of one rank that has all of it."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from penstock.integrations.chunked import chunk_loss
from penstock.integrations.ulysses import sequence_parallel
from penstock.parallel import cut, token_mean
from tests.lib import models
from tests.lib.engines import prepared, sgd
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

LENGTH = 11  # which neither 2 nor 4 divides


def llama(attention: str, dtype: torch.dtype = torch.float32) -> Any:
    sizes: dict[str, Any] = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return models.llama(vocab_size=40, use_cache=False, attn_implementation=attention, **sizes).to(dtype)


def batch(kind: str, seed: int = 1) -> dict[str, Tensor]:
    """Two rows, most labels of the first half of which do not count: the ranks have different numbers of tokens."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(40, (2, LENGTH), generator=made)
    labels = tokens.clone()
    labels[:, :4] = -100
    found = {"input_ids": tokens, "labels": labels}
    if kind == "padded":
        found["attention_mask"] = torch.ones_like(tokens)
        found["attention_mask"][0, -3:] = 0
        found["attention_mask"][1, :2] = 0
        labels[found["attention_mask"] == 0] = -100
    if kind == "packed":
        found["position_ids"] = torch.tensor([[*range(5), *range(6)], [*range(2), *range(7), *range(2)]])
        labels[found["position_ids"] == 0] = -100
    return found


def sum_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def sum_over(model: Any, chunk: dict[str, Any], labels: Tensor, *, chunked: bool) -> Tensor:
    """The sum of the losses of a rank's chunk, with logits that are never whole where `chunked`."""
    if not chunked:
        return sum_of(model(**chunk).logits, labels)
    chunk_loss(model, chunk_bytes=1)  # blocks of 128 classes, the least
    loss: Tensor = model(**chunk, shift_labels=labels, num_items_in_batch=1).loss
    return loss


def whole_loss(model: Any, rows: list[dict[str, Tensor]]) -> Tensor:
    """The mean over all tokens of all rows, on one rank."""
    total, tokens = torch.zeros(()), 0
    for row in rows:
        inputs = {name: values for name, values in row.items() if name != "labels"}
        labels = row["labels"][:, 1:]
        total = total + sum_of(model(**inputs).logits[:, :-1], labels)
        tokens += int((labels != -100).sum())
    return total / tokens


#: Of each parameter, the gradient of one rank and the mean of those of all.
Pairs = list[tuple[str, Tensor, Tensor]]


def pairs_of(model: Any, other: Any, kind: str, rank: int, ranks: int, *, chunked: bool = False) -> Pairs:
    whole_loss(model, [batch(kind)]).backward()
    mine = cut(batch(kind), rank, ranks)
    labels = mine.pop("shift_labels")
    assert labels is not None
    with sequence_parallel(other):
        loss = token_mean(sum_over(other, mine, labels, chunked=chunked), (labels != -100).sum())
    loss.backward()
    pairs = []
    for (name, one), many in zip(model.named_parameters(), other.parameters(), strict=True):
        if one.grad is None:
            assert many.grad is None
            continue
        summed = torch.zeros_like(many) if many.grad is None else many.grad
        dist.all_reduce(summed)
        pairs.append((name, one.grad, summed / ranks))
    return pairs


def assert_alike(found: dict[str, Pairs], in_fp32: float) -> None:
    for row, pairs in found.items():
        assert pairs
        for name, one, many in pairs:
            close = 1e-10 if one.dtype == torch.float64 else in_fp32
            least = close * one.abs().max().item()  # elements that are sums of larger ones
            torch.testing.assert_close(many, one, rtol=close, atol=least, msg=lambda text: f"{row} {name} {text}")  # noqa: B023


def gradients(rank: int, ranks: int) -> dict[str, Pairs]:
    found = {}
    for attention, chunked, kinds in (
        ("sdpa", False, ("causal", "padded", "packed")),
        ("eager", False, ("padded", "packed")),
        ("sdpa", True, ("padded",)),
    ):
        for kind in kinds:
            # In fp64 the eager mask of a row that sees nothing (padding on the left) is -inf in its fp32 softmax: NaN.
            dtype = torch.float32 if attention == "eager" else torch.float64
            model, other = llama(attention, dtype), llama(attention, dtype)
            pairs = pairs_of(model, other, kind, rank, ranks, chunked=chunked)
            found[f"{attention} {kind}{' chunked' * chunked}"] = pairs
            assert other.config._attn_implementation == attention
    return found


@pytest.mark.parametrize("ranks", [2, 4])  # over 4, two heads of keys are copied
def test_gradients_are_those_of_one_rank(ranks: int) -> None:
    for found in run_ranks(gradients, ranks, ranks):
        assert_alike(found, 1e-6)


def train(rank: int, ranks: int, shape: tuple[int, int], how: dict[str, Any], recompute: bool) -> dict[str, Tensor]:
    """The parameters after two steps of two micro-batches; the rows are shared out over `dp_shard`."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "cp"))
    group, place, cp = mesh["cp"].get_group(), mesh["cp"].get_local_rank(), shape[1]
    model = llama("sdpa")
    if recompute:
        model.gradient_checkpointing_enable()
    stock = partial(sgd, lr=0.5, momentum=0.9)
    _, optimizer = prepared(model, inline, stock=stock, mesh=mesh, **{"max_grad_norm": 0.5} | how)
    for step in range(2):
        chunks = [
            cut(batch("packed", 100 * step + 10 * micro + mesh["dp_shard"].get_local_rank()), place, cp)
            for micro in range(2)
        ]
        labels = [chunk.pop("shift_labels") for chunk in chunks]
        tokens = sum((each != -100).sum() for each in labels if each is not None)
        for micro, (chunk, label) in enumerate(zip(chunks, labels, strict=True)):
            assert label is not None
            with sequence_parallel(model, group), nullcontext() if micro else optimizer.no_sync():
                optimizer.backward(token_mean(sum_of(model(**chunk).logits.float(), label), tokens))
        assert not optimizer.step().skipped
        optimizer.zero_grad()
    found = {name: optimizer.full_param(values) for name, values in model.named_parameters()}
    optimizer.close()
    return found


def trained_on_one(data: int, most: float | None) -> dict[str, Tensor]:
    model = llama("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(2):
        rows = [batch("packed", 100 * step + 10 * micro + rank) for micro in range(2) for rank in range(data)]
        whole_loss(model, rows).backward()
        if most is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
    return {name: values.detach().clone() for name, values in model.named_parameters()}


@pytest.mark.parametrize(
    ("shape", "params", "activations", "overlap", "recompute"),
    [
        ((2, 2), "cpu", "cpu", "forward", True),
        ((1, 2), "cpu", "cpu", "backward", True),
        ((1, 4), "device", "nvme", "auto", False),
    ],
)
def test_training_is_that_of_one_rank(
    shape: tuple[int, int], params: str, activations: str, overlap: str, recompute: bool
) -> None:
    """With clipping, where there can be any, and accumulation, wherever the state is."""
    most = None if overlap == "backward" else 0.5
    expected = trained_on_one(shape[0], most)
    for found in run_ranks(
        train,
        shape[0] * shape[1],
        shape[0] * shape[1],
        shape,
        how_of(params, activations, overlap, most),
        recompute,
    ):
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6, msg=lambda t: f"{name} {t}")  # noqa: B023


def how_of(params: str, activations: str, overlap: str, most: float | None) -> dict[str, Any]:
    # The host updates what rests there, so in backward too.
    placed = {"params": params, "grads": "cpu", "optimizer": "cpu", "activations": activations}
    return placed | {"overlap": overlap, "max_grad_norm": most}


def test_training_in_half_precision_is_that_of_one_rank_to_rounding() -> None:
    how = how_of("nvme", "cpu", "forward", 0.5)
    how |= {"precision": "fp16", "initial_loss_scale": 256.0}
    start = dict(llama("sdpa").named_parameters())
    (expected,) = run_ranks(train, 1, 1, (1, 1), how, False)
    for found in run_ranks(train, 2, 2, (1, 2), how, False):
        for name, values in expected.items():
            made, wanted = found[name] - start[name], values - start[name]
            # A few roundings of what is summed in another order, beside the largest change of the parameter.
            least = 0.02 * wanted.abs().max().item()
            assert least > 0
            torch.testing.assert_close(made, wanted, rtol=0, atol=least, msg=lambda t: f"{name} {t}")  # noqa: B023
