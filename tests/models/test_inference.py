"""What hooks of the user see of the model in training."""

import pytest
import torch
from torch import Tensor, nn

from tests.lib.engines import prepared
from tests.models.family import Batch
from tests.models.transformers_rows import language_loss, llama


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
    _, optimizer = prepared(model, params="cpu")
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
