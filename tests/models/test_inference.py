"""Evaluation and generation from the model in training."""

import pytest
import torch

from tests.models.contract import HYPER, ON_CPU
from tests.models.family import Batch
from tests.models.transformers_rows import language_loss, llama, t5, t5_loss
from tests.support import prepare_on, run_ranks, simulated

MODELS = {"llama": (llama, language_loss), "t5": (t5, t5_loss)}
SAMPLING = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled": {"do_sample": True},
}


def generate_and_train(rank: int, name: str) -> None:
    """Generate as the plain model does, between steps that generation does not change."""
    build, loss_of = MODELS[name]
    torch.manual_seed(0)
    plain, model, other = build(), build(), build()
    model.load_state_dict(plain.state_dict())
    other.load_state_dict(plain.state_dict())
    optimizer, undisturbed = (
        prepare_on(simulated(), m, torch.optim.AdamW(m.parameters(), **HYPER), placement=ON_CPU, precision="fp32")
        for m in (model, other)
    )
    ids = Batch(5).ids(30, 2, 4) + 2
    for step in range(3):
        for options in SAMPLING.values():
            outputs = []
            for m in (plain, model):
                torch.manual_seed(1)
                outputs.append(
                    m.eval().generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, pad_token_id=0, **options
                    )
                )
                m.train()
            assert torch.equal(*outputs)
            assert optimizer._engine.gatherer.live_bytes == 0
        for m, o in ((model, optimizer), (other, undisturbed)):
            torch.manual_seed(step)
            o.backward(loss_of(m, Batch(step, rank)))
            o.step()
            o.zero_grad()
        with torch.no_grad(), optimizer.gathered():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.copy_(q)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(p), undisturbed.full_param(q))
    optimizer.close()
    undisturbed.close()


@pytest.mark.parametrize("name", MODELS)
def test_generate_between_steps(name):
    generate_and_train(0, name)


def generate_all(rank: int) -> None:
    for name in MODELS:
        generate_and_train(rank, name)


def test_generate_between_steps_on_two_ranks():
    run_ranks(generate_all, 2)


def test_evaluation_without_no_grad_does_not_count():
    """A forward whose graph is dropped leaves gradients and parameters alone."""
    torch.manual_seed(0)
    model, other = llama(), llama()
    other.load_state_dict(model.state_dict())
    runs = []
    for m, evaluates in ((model, True), (other, False)):
        optimizer = prepare_on(
            simulated(), m, torch.optim.AdamW(m.parameters(), **HYPER), placement=ON_CPU, precision="fp32"
        )
        for step in range(3):
            if evaluates:
                language_loss(m, Batch(step + 10))
            optimizer.backward(language_loss(m, Batch(step)))
            if evaluates:
                language_loss(m, Batch(step + 10))
            optimizer.step()
            if evaluates:
                language_loss(m, Batch(step + 10))
            optimizer.zero_grad()
        runs.append([optimizer.full_param(p) for p in m.parameters()])
        optimizer.close()
    for ours, expected in zip(*runs, strict=True):
        assert torch.equal(ours, expected)
