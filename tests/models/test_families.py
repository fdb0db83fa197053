"""Every family of models trains as in plain torch, wherever its state lives."""

from dataclasses import replace

import pytest
import torch

from tests.lib.engines import prepare_on
from tests.lib.models import Buffered
from tests.lib.streams import inline, released, separate, simulated
from tests.models.adapters_rows import ADAPTERS
from tests.models.contract import (
    HYPER,
    ON_CPU,
    ON_DEVICE,
    assert_close,
    assert_equal,
    assert_gradients,
    assert_same,
    penstock_run,
    plain_run,
    to_bf16,
)
from tests.models.family import Batch
from tests.models.graphs_rows import GRAPHS
from tests.models.mixing_rows import MIXING
from tests.models.modules_rows import MODULES, squared
from tests.models.transformers_rows import TRANSFORMERS

FAMILIES = [*TRANSFORMERS, *MODULES, *GRAPHS, *ADAPTERS]
#: What a dtype meets: layers and buffers; graphs, and how modules are called, differ in fp32 as they do in bf16.
OF_DTYPES = (
    *("conv_batch_norm", "tutorial", "lstm", "attention_blocks", "tied_by_functional", "integers"),
    *("non_contiguous", "odd_sizes", "only_empty", "parameter_lists", "mixed_dtypes", "parametrized", "frozen_block"),
    *("autocast", "trained_forces"),
)
IN_BF16 = [*TRANSFORMERS, *ADAPTERS, *MIXING, *(f for f in (*MODULES, *GRAPHS) if f.name in OF_DTYPES)]
#: Of each family one in turn: at world size 1 nothing of them is a matter of the family.
RUNS = [
    (inline, ON_DEVICE, 3),
    (released, ON_DEVICE, 1),
    (separate, ON_CPU, 3),  # what is released is freed
    (inline, ON_CPU, 1),
    (released, ON_CPU, 2),
]


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=map(str, FAMILIES))
def test_fp32_equals_plain_torch(number):
    family = FAMILIES[number]
    plain = plain_run(family, "fp32")
    make, *how = RUNS[number % len(RUNS)]
    first = penstock_run(family, make(), *how, "fp32")
    assert_gradients(first, plain, exact=family.exact, relative=1e-6)
    assert_close(first, plain, relative=1e-6)
    # Nobody looks in between: only the engine's own waits order anything.
    unseen = penstock_run(family, simulated(seed=1), ON_CPU, 3, "fp32", look=False)
    assert_equal(replace(unseen, gradients=first.gradients), first)


@pytest.mark.parametrize("family", IN_BF16, ids=str)
def test_bf16_equals_plain_torch(family):
    plain = plain_run(family, "bf16")
    first = penstock_run(family, simulated(), ON_CPU, 3, "bf16")
    assert_gradients(first, plain, exact=family.exact, relative=2e-2)
    if family.exact:
        assert_same(first.observed[:1], plain.observed[:1])
    assert_close(first, plain, relative=2e-2)


def test_batch_norms_keep_their_statistics_and_weights_in_fp32():
    torch.manual_seed(0)
    plain, model = Buffered(), Buffered()
    model.load_state_dict(plain.state_dict())
    to_bf16(plain)
    optimizer = prepare_on(simulated(), model, torch.optim.AdamW(model.parameters(), **HYPER), placement=ON_CPU)
    images = Batch(0).floats(4, 3, 6, 6)
    squared(plain(images.bfloat16()))
    optimizer.backward(squared(model(images)))
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    with optimizer.gathered():
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    norms = {name for name in dtypes if name.startswith(("stages.0.1", "stages.1.1"))}
    assert {name for name, found in dtypes.items() if found == torch.float32} == norms
    assert len(norms) == 4
    optimizer.step()
    optimizer.close()
