"""The held-out loss is a mean over tokens, the step's loss one over labels, and neither divides by nothing."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.cli.ranks import Ranks
from penstock.cli.training.data.feed import Batch
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.learning.best import Best
from penstock.cli.training.learning.evaluation import Evaluations
from penstock.cli.training.learning.loss import Loss

ALONE = Ranks(0, 1, torch.device("cpu"))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def batch_of(count: int, length: int, label_count: int) -> Batch:
    """Random tokens, of which the last so many of the first row are labels."""
    ids = torch.randint(3, 32, (count, length), generator=torch.Generator().manual_seed(count * length))
    labels = torch.full_like(ids, -100)
    if label_count:
        labels[0, -label_count:] = ids[0, -label_count:]
    return Batch(ids, labels, None, None, label_count=label_count, token_count=ids.numel())


def sum_of_losses(model: nn.Module, batch: Batch) -> float:
    """By hand: minus the log of the probability of each label, given what is before it."""
    logits: Tensor = model(input_ids=batch.input_ids).logits.detach().double().log_softmax(-1)
    total = 0.0
    for row, labels in zip(logits, batch.labels, strict=True):
        total -= sum(float(row[n - 1, label]) for n, label in enumerate(labels.tolist()) if n and label != -100)
    return total


class Told:
    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.bests: list[bool | None] = []

    def evaluation(
        self, step: int, loss: float, seconds: float, *, token_name: str, is_best: bool | None = None
    ) -> None:
        assert token_name == "token"
        assert seconds >= 0
        self.losses.append((step, loss))
        self.bests.append(is_best)


class Given:
    def __init__(self, *batches: tuple[Batch, bool]) -> None:
        self._batches = batches

    def held_out(self) -> Iterator[tuple[Batch, bool]]:
        for batch in self._batches:
            assert not torch.is_grad_enabled()
            yield batch


def evaluations(model: nn.Module, *batches: tuple[Batch, bool]) -> tuple[Evaluations, Told, Interruption]:
    told, asking, feed = Told(), Interruption(), Given(*batches)
    given: list[Any] = [feed, ALONE, told, asking]
    return Evaluations(model, Loss(model), *given, token_name="token"), told, asking


@pytest.mark.parametrize("takes_count", [True, False])
def test_a_long_batch_weighs_more_than_a_short_one(takes_count: bool) -> None:
    model = llama().train()
    model.accepts_loss_kwargs = takes_count
    one, two, none, idle = batch_of(2, 8, 7), batch_of(1, 5, 1), batch_of(1, 4, 0), batch_of(3, 4, 3)
    measures, told, _ = evaluations(model, (one, True), (two, True), (none, True), (idle, False))
    wanted = (sum_of_losses(model, one) + sum_of_losses(model, two)) / 8
    of_batches = (sum_of_losses(model, one) / 7 + sum_of_losses(model, two)) / 2
    assert abs(wanted - of_batches) > 1e-3, "a mean over batches would be another number"
    measured = measures.measure(4)
    assert measured is not None
    assert measured.loss == pytest.approx(wanted, rel=1e-6)
    assert told.losses == [(4, measured.loss)]
    assert model.training


def test_it_is_told_whether_the_loss_is_the_lowest_where_somebody_keeps_count() -> None:
    measures, told, _ = evaluations(llama(), (batch_of(2, 8, 7), True))
    best = Best()
    assert [measures.measure(step, each) for step, each in ((0, None), (1, best), (2, best))]  # the same loss
    assert told.bests == [None, True, False]
    assert best == Best(loss=told.losses[1][1], step=1, counted_step=2, since_count=1)


def test_dropout_is_off_and_on_again_whatever_happens() -> None:
    model = llama()
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.training))
    batch = batch_of(1, 4, 3)
    evaluations(model, (batch, True))[0].measure(1)
    assert seen == [False]
    broken = Batch(batch.input_ids + 1000, batch.labels, None, None, 3, 4)
    with pytest.raises(IndexError):
        evaluations(model, (broken, True))[0].measure(1)
    assert model.training


def test_nothing_to_measure_is_no_number() -> None:
    measures, told, _ = evaluations(llama(), (batch_of(1, 4, 0), True))
    measured = measures.measure(1)
    assert measured is not None
    assert math.isnan(measured.loss)
    assert len(told.losses) == 1


def test_who_is_asked_to_end_reports_nothing() -> None:
    measures, told, asking = evaluations(llama(), (batch_of(1, 4, 3), True))
    asking.asked = True
    assert measures.measure(1) is None
    assert told.losses == []


@pytest.mark.parametrize("takes_count", [True, False])
def test_the_loss_is_a_sum_over_the_labels_of_the_whole_step(takes_count: bool) -> None:
    model = llama()
    model.accepts_loss_kwargs = takes_count
    batch = batch_of(2, 8, 5)
    loss = Loss(model)(batch, 20)
    assert loss.item() == pytest.approx(sum_of_losses(model, batch) / 20, rel=1e-5)


@pytest.mark.parametrize("takes_count", [True, False])
def test_a_step_without_a_label_has_a_loss_of_zero(takes_count: bool) -> None:
    model = llama()
    model.accepts_loss_kwargs = takes_count
    loss = Loss(model)(batch_of(2, 8, 0), 0)
    loss.backward()
    assert loss.item() == 0
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)


def test_a_model_says_that_its_loss_takes_a_count_by_its_forward_or_by_name() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False) -> Any: ...

    class Open(nn.Module):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any: ...

    class Said(Open):
        accepts_loss_kwargs = False

    assert [Loss(kind())._takes_count for kind in (Plain, Open, Said)] == [False, True, False]
