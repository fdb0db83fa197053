"""The code of a page, in a module of its own, between two states of torch that are the same."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.docs.blocks import ROOT, Block


def execute(block: Block, module: dict[str, object]) -> None:
    """Run a block; the lines of an error are those of the page."""
    exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec"), module)


@contextlib.contextmanager
def started_anew(page: str) -> Iterator[dict[str, object]]:
    """A module for a page's code, so that classes which it makes can be found; and torch as it was, afterwards."""
    module = type(sys)(f"page_{Path(page).stem.replace('-', '_')}")
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    sys.modules[module.__name__] = module
    try:
        torch.manual_seed(0)
        yield module.__dict__
    finally:
        del sys.modules[module.__name__]
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
        torch.compiler.reset()
