"""How runs are compared: with plain torch step by step, and with each other bit by bit."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.parity.rows import STATE_NAMES, Arithmetic, Net, Plain, Snapshot, Trace

NAMES = [name for name, _ in Net().named_parameters()]


def beyond(ours: Tensor, theirs: Tensor, *, relative: float, of_largest: float) -> str | None:
    """The worst element outside `relative` of itself plus `of_largest` of the tensor's largest."""
    difference = (ours.double() - theirs.double()).abs()
    allowed = theirs.double().abs() * relative + theirs.double().abs().max() * of_largest
    if bool((difference <= allowed).all()):  # False for NaN
        return None
    index = int((difference - allowed).nan_to_num(nan=float("inf")).argmax())
    return f"element {index} is {ours.flatten()[index].item()!r}, plain torch {theirs.flatten()[index].item()!r}"


def against_plain_by_step(what: Arithmetic, trace: Trace, rank: int = 0, world_size: int = 1) -> Iterator[str]:
    """Each step from the state that Penstock had before it.

    Losses and gradients after every micro-batch are equal bit for bit: forward and backward see the same weights, and
    two ranks have one order of summation. Moments are equal bit for bit without clipping; with it, torch's own fp32
    norm is a few ulp off. Parameters may differ in the last bit of what is added to them, through torch's square root.
    """
    plain = Plain(what, world_size)
    accumulation = what.accumulation
    exact = {"relative": 0.0, "of_largest": 0.0}
    within = {"relative": 1e-6, "of_largest": 1e-6}
    for step in range(len(trace.norms)):
        plain.load(trace.snapshots[step], step)
        gradients, losses = plain.accumulate(step)
        if losses[rank::world_size] != trace.losses[step * accumulation : (step + 1) * accumulation]:
            yield f"step {step}: losses"
        if len(gradients) != len(trace.gradients[step]):
            yield f"step {step}: {len(trace.gradients[step])} gradients, not {len(gradients)}"
        for micro, (ours, theirs) in enumerate(zip(trace.gradients[step], gradients, strict=False)):
            for name, a, b in zip(NAMES, ours, theirs, strict=True):
                if not torch.equal(a, b):
                    yield f"step {step}: gradient of {name} after micro-batch {micro}"
        norm = plain.step(gradients[-1])
        if abs(norm - trace.norms[step]) > 1e-6 * norm:
            yield f"step {step}: norm {trace.norms[step]!r}, plain torch {norm!r}"
        moments = exact if what.clip is None else within
        tolerances = {"param": {"relative": 1e-6, "of_largest": 1e-7}, **dict.fromkeys(STATE_NAMES, moments)}
        for message in _snapshots(trace.snapshots[step + 1], plain.snapshot(), tolerances):
            yield f"step {step}: {message}"


def bits(trace: Trace) -> list[object]:
    """Everything that a run gave."""
    return [trace.losses, trace.norms, *(t.tolist() for values in trace.final.values() for t in values)]


def _snapshots(ours: Snapshot, theirs: Snapshot, tolerances: dict[str, dict[str, float]]) -> Iterator[str]:
    for kind, tolerance in tolerances.items():
        for name, a, b in zip(NAMES, ours[kind], theirs[kind], strict=True):
            message = beyond(a, b, **tolerance)
            if message:
                yield f"{kind} of {name}: {message}"
