"""Evaluation and generation from the model in training."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.lib.engines import prepare_on
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate, simulated
from tests.models.contract import HYPER, ON_CPU
from tests.models.family import Batch
from tests.models.transformers_rows import language_loss, llama, t5, t5_loss

MODELS = {"llama": (llama, language_loss), "t5": (t5, t5_loss)}
SAMPLING = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled": {"do_sample": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_generate_between_steps(name):
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
            o.backward(loss_of(m, Batch(step)))
            o.step()
            o.zero_grad()
        with torch.no_grad(), optimizer.gathered():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.copy_(q)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(p), undisturbed.full_param(q))
    optimizer.close()
    undisturbed.close()


def gathers_once(rank: int) -> None:
    """Entering gathers each unit once; without it every token would."""
    torch.manual_seed(0)
    model = llama().eval()
    optimizer = prepare_on(
        separate(), model, torch.optim.AdamW(model.parameters(), **HYPER), placement=ON_CPU, precision="fp32"
    )
    counts, units = optimizer._engine.context.ranks.counts, len(optimizer._engine.context.units)
    generate = partial(model.generate, Batch(5).ids(30, 2, 4), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    counts.clear()
    with optimizer.gathered():
        inside = generate()
    assert dict(counts) == {"all_gather": units}
    counts.clear()
    assert torch.equal(generate(), inside)
    assert counts["all_gather"] >= 4 * (units - 1)
    optimizer.close()


def test_entering_gathered_is_all_that_travels():
    run_ranks(gathers_once, 2)


@pytest.mark.parametrize("registered", ["before prepare", "after prepare"])
def test_hooks_of_the_user_see_whole_parameters(registered):
    """In evaluation and in training, before and after the forward of a block, of a layer of it, and of the model."""
    torch.manual_seed(0)
    plain, model = llama(), llama()
    model.load_state_dict(plain.state_dict())
    seen: dict[nn.Module, list[dict[str, Tensor]]] = {plain: [], model: []}

    def watch(whole: nn.Module) -> None:
        def look(module: nn.Module, *_: object) -> None:
            # A block's hook sees the block, the model's the layers that are in no block.
            shown = whole.lm_head if module is whole else module
            seen[whole].append({n: p.detach().clone() for n, p in shown.named_parameters()})

        for module in (whole, whole.model.layers[0], whole.model.layers[1].mlp.up_proj):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)

    watch(plain)
    if registered == "before prepare":
        watch(model)
    optimizer = prepare_on(
        separate(), model, torch.optim.AdamW(model.parameters(), **HYPER), placement=ON_CPU, precision="fp32"
    )
    if registered == "after prepare":
        watch(model)
    for m, backward in ((plain, lambda loss: loss.backward()), (model, optimizer.backward)):
        with torch.no_grad():
            language_loss(m, Batch(1))
        backward(language_loss(m, Batch(0)))
    calls = 3 * 2 * 2 + 2  # torch calls no backward hook of a model whose output is an object
    assert len(seen[plain]) == len(seen[model]) == calls
    for ours, theirs in zip(seen[model], seen[plain], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    optimizer.close()
