"""Packed sequences keep their segments apart however the model is run."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import penstock
from penstock.cli.training.data.sequences.batches import Corpus, Padding, train_batches
from penstock.cli.training.data.sequences.order import Dealer, Order
from penstock.cli.training.data.sequences.packing import arrange, whole_rows
from penstock.cli.training.learning.loss import Loss
from penstock.integrations.chunked import chunk_loss
from penstock.integrations.huggingface import enable_activation_checkpointing
from tests.unit.cli.sequences.samples import Sample, prepared_of, sample
from tests.unit.integrations.families_rows import SIZES

LENGTHS = (9, 4, 7)


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).train()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    firsts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
    labels[:, firsts] = -100
    labels[:, 5] = -100
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def count() -> Tensor:
    return (batch()["labels"] != -100).sum()


def alone(model: nn.Module) -> Tensor:
    """The loss of all labels, each segment by itself."""
    whole = batch()
    parts = zip(*(whole[name].split(LENGTHS, dim=1) for name in ("input_ids", "labels")), strict=True)
    losses = [
        model(input_ids=ids, labels=labels, num_items_in_batch=count(), use_cache=False).loss for ids, labels in parts
    ]
    return torch.stack(losses).sum()


def together(model: nn.Module) -> Tensor:
    return model(**batch(), num_items_in_batch=count(), use_cache=False).loss


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("way", ["plain", "checkpointing", "chunked", "checkpointing and chunked", "compiled"])
def test_loss_and_gradients_are_those_of_the_segments_alone(family: str, way: str) -> None:
    reference, model = make(family), make(family)
    expected = alone(reference)
    expected.backward()
    if "checkpointing" in way:
        enable_activation_checkpointing(model)
    if "chunked" in way:
        chunk_loss(model, chunk_bytes=1)
    if way == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    loss = together(model)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found = gradients(model)
    assert len(found) == len(list(model.parameters()))
    for gradient, other in zip(found, gradients(reference), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_prepared_model_keeps_segments_apart(checkpointing: bool, chunked: bool) -> None:
    reference, model = make("llama"), make("llama")
    expected = alone(reference)
    expected.backward()
    if checkpointing:
        enable_activation_checkpointing(model)
    if chunked:
        chunk_loss(model, chunk_bytes=1)
    names = [name for name, _ in model.named_parameters()]
    optimizer = penstock.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        placement=penstock.Placement(params="cpu", optimizer="cpu"),
        precision="fp32",
    )
    loss = together(model)
    optimizer.backward(loss)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    own = dict(model.named_parameters())
    for name in names:
        gradient = optimizer.full_grad(own[name])
        assert gradient is not None
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    optimizer.close()


def epoch(model: nn.Module, corpus: Corpus, world_size: int) -> Tensor:
    """The loss of one step that takes a whole epoch, as the ranks add it up."""
    count = len(corpus.sequences)
    order, losses = Order([count], None, 0), []
    for rank in range(world_size):
        dealer = Dealer(2, count // (2 * world_size), rank, world_size)
        batches = train_batches([corpus], order, dealer, Padding(24, pad_id=0))
        for batch, label_count in itertools.islice(batches, dealer.accumulation):
            losses.append(Loss(model)(batch, label_count))
    return torch.stack(losses).sum()


def mean_of_rows(model: nn.Module, rows: list[Sample]) -> Tensor:
    """The mean over all labels of all rows, each row by itself."""
    losses = []
    for row in rows:
        ids, trained = torch.from_numpy(row.ids), torch.from_numpy(row.trained)
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[trained[1:]])
    return torch.cat(losses).mean()


def test_an_epoch_has_the_same_loss_packed_or_padded_on_any_number_of_ranks(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = [24, *[14, 6, 4] * 5, *[20, 4] * 4]
    rows = [sample(random.integers(3, 64, length), [0, *random.integers(0, 2, length - 2), 1]) for length in lengths]
    prepared = prepared_of(tmp_path, *rows)
    model = make("llama")
    counts = []
    losses = [mean_of_rows(model, rows)]
    for packed in (True, False):
        sequences, report = arrange(
            prepared.offsets,
            prepared.trained,
            whole_rows(prepared.lengths),
            seq_length=24,
            truncation="error",
            packed=packed,
            where=prepared.where,
        )
        counts.append((report.sequence_count, report.label_count))
        with torch.no_grad():
            losses += [epoch(model, Corpus(prepared, sequences), world_size) for world_size in (1, 5 if packed else 2)]
    assert counts == [(10, counts[1][1]), (24, counts[0][1])]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-6)
