"""What plans know of a device and of the ranks, without streams and without groups."""

import pytest
import torch

from penstock.runtime.accelerator import reach_for, streams_for
from penstock.runtime.topology import Reach

CPU = torch.device("cpu")


@pytest.mark.parametrize("debug_release", [False, True])
def test_reach_is_that_of_the_streams_that_would_be_made(debug_release: bool) -> None:
    streams = streams_for(CPU, debug_release=debug_release)
    try:
        assert streams.reach == reach_for(CPU, debug_release=debug_release)
    finally:
        streams.close()


def test_an_accelerator_reaches_its_own_memory_alone() -> None:
    assert reach_for(torch.device("cuda:0")) == Reach(aliases_host=False, reads_in_place=True)
    assert reach_for(torch.device("cuda:0"), debug_release=True) == Reach(aliases_host=False, reads_in_place=False)
