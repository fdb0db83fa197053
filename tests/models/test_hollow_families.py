"""A step of every family on hollow tensors is the step for real: its operations, gradients, saved tensors and memory."""

import pytest
import torch

from tests.models.adapters_rows import ADAPTERS
from tests.models.family import Batch, Family
from tests.models.graphs_rows import GRAPHS
from tests.models.modules_rows import MODULES
from tests.models.transformers_rows import TRANSFORMERS
from tests.rehearsing import differences, for_real, rehearsed
from tests.support import sampled


def build(family: Family):
    torch.manual_seed(0)
    return family.build()


@pytest.mark.parametrize("family", [*TRANSFORMERS, *MODULES, *GRAPHS, *ADAPTERS], ids=str)
def test_a_rehearsed_step_is_the_step(family: Family) -> None:
    def work(model):
        family.work(model, Batch(0), lambda loss, **how: loss.backward(**how))

    real = for_real(lambda: build(family), work)
    hollow = rehearsed(lambda: build(family), work)
    assert list(differences(hollow, real)) == []
