"""What a step, and whatever else needs whole gradients or whole state, refuses before anything has changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.engine.engine import Engine
from penstock.engine.passes.under_way import in_backward
from penstock.errors import EngineError

_TRAINING = ("backward", "step", "clip_grad_norm_", "no_sync", "save", "close", "EMA", "EMA.update", "EMA.applied")
_MOVING = ("offload_states", "reload_states")


def check_step(engine: Engine) -> None:
    """Refuse a step that would lose something: gradients, or values that somebody wrote.

    Raises:
        EngineError: says what.
    """
    engine.gradients.check_whole("step")
    if any(unit.holding.blocks for unit in engine.rig.units):
        raise EngineError("step() was called inside gathered(). Leave the block first: step changes what it shows.")
    for unit in engine.rig.units:
        if unit.trained is None:
            for parameter in unit.parameters:
                parameter.check_frozen()
    engine.passes.hooks.forward.membership.check()
    for unit in engine.rig.units:
        unit.check_written()


def check_not_averaged(verb: str, engine: Engine, *, writes: bool) -> None:
    """Refuse a method that would train, keep or lose an average in the place of the parameters.

    Arguments:
        verb: the method that was called.
        engine: the one that may show an average.
        writes: whether it writes parameters or state, or moves them.
    """
    if engine.state.averages.shown is not None and (verb in _TRAINING or (writes and verb not in _MOVING)):
        raise EngineError(
            f"{verb}() was called inside EMA.applied(), where the parameters are the average's. Leave the block first."
        )


def check_at_rest(verb: str, engine: Engine) -> None:
    """Refuse a method inside a forward, a backward or a `gathered` block: the state is in use there."""
    check_outside(verb, engine)
    if any(unit.holding.blocks for unit in engine.rig.units):
        raise EngineError(f"{verb}() was called inside gathered(). Leave the block first.")


def check_outside(verb: str, engine: Engine) -> None:
    """Refuse a method inside a forward or a backward: it would write, move or gather what the pass reads."""
    if in_backward() or engine.passes.hooks.in_forward:
        raise EngineError(f"{verb}() was called inside a forward or a backward. Call it between steps.")


def scalars_of(param_groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    """List what an update reads of param groups, for ranks to compare: each updates its own shard with its own."""
    for number, group in enumerate(param_groups):
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value):
                value = list(value)
            if value is None or isinstance(value, bool | int | float | str) or type(value) is list:
                yield f"param_groups[{number}]['{name}']", value
