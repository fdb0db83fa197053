"""The states of the random number generators that a training loop draws from: torch's, Python's and numpy's."""

import random
import sys
from typing import Any

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


def write_random(field: Field, device: torch.device) -> None:
    """Set the generators of this process. One that was not saved, or is not here, stays as it is.

    Raises:
        CheckpointError: these are no states.
    """
    states: Any = decode(field, {})
    if states is None:  # the checkpoint was made of another library's
        return
    try:
        torch.set_rng_state(_tensor(states["torch"]))
        random.setstate(states["python"])
        if device.type in states and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(_tensor(states[device.type]), device)
        if "numpy" in sys.modules and "numpy" in states:
            sys.modules["numpy"].random.set_state(states["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise field.fail(f"is no state of a random number generator ({error})") from error


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
