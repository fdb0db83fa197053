"""Everything in this folder is run by `make test-integrations`: it needs libraries that the other tests do not."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.costs import runs_integrations
from tests.lib.ranks import PRELOADED
from tests.lib.releases import leave_out

HERE = Path(__file__).parent
OWN = "tests.integrations.preloaded"
#: Files that say of Penstock alone what it does: they are run in the pinned releases, and not in those before.
ONCE = ("test_pages.py", "test_record.py", "test_trainer_ranks.py")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the files alone where they are not asked for: importing those libraries takes longer than many tests."""
    return None if runs_integrations(config) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integrations)
            if OWN not in PRELOADED:  # for runs of these tests alone: others do without
                PRELOADED.append(OWN)
    leave_out(config, items, HERE, ONCE)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Leave nothing to the next test of what these libraries keep in a process: ranks in the environment, a group."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    for state in (GradientState, AcceleratorState, PartialState):
        state._reset_state()
