"""The states of the random number generators that a training loop draws from: torch's, Python's and numpy's."""

import random
import sys
from typing import Any, NamedTuple

import torch

from penstock.checkpoint.fields import Field
from penstock.checkpoint.values import decode, encode


def read_random(device: torch.device) -> object:
    """The states of this process, as JSON. `device` has a generator of its own, unless it is a cpu."""
    states: dict[str, object] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device).cpu().numpy().tobytes()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, [int(key) for key in keys], *rest)
    return encode(states, {}, what="random")


class RandomStates(NamedTuple):
    """States that generators take; `None` for one that was not saved, or is not here."""

    torch: torch.Tensor
    python: Any
    device: torch.Tensor | None
    numpy: Any


def decode_random(field: Field, device: torch.device) -> RandomStates:
    """Check and take the states of a process. None of its generators changes.

    Raises:
        CheckpointError: these are no states.
    """
    found: Any = decode(field, {})
    try:
        own = found.get(device.type) if device.type != "cpu" else None
        states = RandomStates(
            _tensor(found["torch"]),
            found["python"],
            None if own is None else _tensor(own),
            found.get("numpy") if "numpy" in sys.modules else None,
        )
        torch.Generator().set_state(states.torch)
        random.Random().setstate(states.python)
        if states.device is not None:
            torch.Generator(device).set_state(states.device)
        if states.numpy is not None:
            sys.modules["numpy"].random.RandomState().set_state(states.numpy)
            if not 0 <= states.numpy[2] <= len(states.numpy[1]):  # numpy would read there
                raise ValueError(f"position {states.numpy[2]}")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise field.fail(f"is no state of a random number generator ({error})") from error
    return states


def write_random(states: RandomStates, device: torch.device) -> None:
    """Set the generators of this process."""
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    if states.device is not None:
        torch.get_device_module(device).set_rng_state(states.device, device)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
