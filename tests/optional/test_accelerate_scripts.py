"""The scripts by which accelerate tests itself, by their own names, with `PenstockAccelerator` in place of its own.

A script passes with ours, or says the refusal that docs/accelerate.md names. What reads parameters that are released is
run where they rest on the device. Scripts that never make an accelerator are left out: they test accelerate alone.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError, EngineError
from tests.lib.ranks import run_ranks

pytestmark = [
    pytest.mark.optional,
    pytest.mark.integrations,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]
PASSES = ""
NOT_TRAINED = r"was prepared for inference, by prepare\(model, None\)"
NO_ELEMENTS = "it stands for a gradient that is sharded"
UNEVEN = "join_uneven_inputs: ranks gather parameters together"

#: By number of ranks: the module, the function, whether it is given an accelerator, and what ours says instead.
SCRIPTS: dict[int, list[tuple[str, str, bool, str]]] = {
    1: [
        ("test_script", "check_seedable_sampler", False, PASSES),
        ("test_script", "test_trigger", False, PASSES),
        ("test_script", "test_reinstantiated_state", False, PASSES),
        ("test_sync", "test_dataloader_break", False, PASSES),
        ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", False, PASSES),
        ("test_sync", "test_noop_sync", True, NOT_TRAINED),
    ],
    2: [
        ("test_script", "check_seedable_sampler_with_data_seed", False, PASSES),
        ("test_script", "test_trigger", False, PASSES),
        ("test_sync", "test_dataloader_break", False, PASSES),
        ("test_sync", "test_distributed_sync", True, NOT_TRAINED),
        ("test_sync", "test_distributed_sync_multiple_fwd", True, NOT_TRAINED),
        ("test_sync", "test_gradient_accumulation", False, NOT_TRAINED),
        ("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", False, NO_ELEMENTS),
        ("test_distributed_data_loop", "test_default_ensures_even_batch_sizes", False, PASSES),
        ("test_distributed_data_loop", "test_can_disable_even_batches", False, PASSES),
        ("test_distributed_data_loop", "test_pickle_accelerator", False, PASSES),
        ("test_distributed_data_loop", "test_can_join_uneven_inputs", False, UNEVEN),
        ("test_distributed_data_loop", "test_join_can_override_even_batches", False, UNEVEN),
    ],
}


def make_ours(**arguments: Any) -> Any:
    from penstock.integrations.accelerate import PenstockAccelerator

    return PenstockAccelerator(penstock={"stage": 2, "placement": {"grads": "cpu", "optimizer": "cpu"}}, **arguments)


def call(script: tuple[str, str, bool, str]) -> None:
    """Call a function of a script as a process would that has just begun."""
    from tests.integrations.accelerate_loops import fresh

    module_name, function, takes_one, _ = script
    module: Any = importlib.import_module(f"accelerate.test_utils.scripts.{module_name}")
    original = module.Accelerator
    fresh()
    module.Accelerator = make_ours
    try:
        accelerator = make_ours()  # as the script's own `main` has made one before
        getattr(module, function)(*[accelerator][: int(takes_one)])
    finally:
        module.Accelerator = original
        fresh()


def call_ours(script: tuple[str, str, bool, str]) -> None:
    """Call it with our accelerator: it passes, or says what it cannot have."""
    if script[-1] == PASSES:
        call(script)
        return
    with pytest.raises((ConfigError, EngineError), match=script[-1]):
        call(script)


def on_each_rank(rank: int, scripts: Any) -> None:
    for script in scripts:
        call_ours(script)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    state, enabled = torch.get_rng_state(), torch.is_grad_enabled()
    yield
    torch.set_rng_state(state)
    torch.set_grad_enabled(enabled)


@pytest.mark.parametrize("script", SCRIPTS[1], ids=lambda script: "::".join(script[:2]))
def test_a_script_of_accelerates_own_on_one_rank(script: tuple[str, str, bool, str]) -> None:
    call_ours(script)


@pytest.mark.parametrize("module", sorted({script[0] for script in SCRIPTS[2]}))
def test_scripts_of_accelerates_own_on_two_ranks(module: str) -> None:
    run_ranks(on_each_rank, 2, [script for script in SCRIPTS[2] if script[0] == module], fresh=True)
