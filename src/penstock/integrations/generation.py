"""Generation with a prepared model: room on the device, one gather for all tokens, ranks in step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from penstock import Optimizer

#: The share of the device's free memory that whole parameters may take; keys and values of the tokens take the rest.
WHOLE_SHARE = 0.7
_IDLE: tuple[Literal["master", "optimizer", "grad"], ...] = ("master", "optimizer", "grad")


@contextmanager
def generating(
    accelerator: Accelerator, optimizer: Optimizer, model: nn.Module, *, whole: bool = True
) -> Iterator[bool]:
    """Prepare a model for the tokens of a `with` block, at which ranks may stop after different numbers. Collective.

    Masters, optimizer states and gradients make room on the device (`move_away`), and parameters are gathered once for
    all tokens where they fit. Else each unit is gathered for each token, and `generate` has ranks run as many forwards
    as the one with most tokens. Afterwards all is where it was.

    Arguments:
        accelerator: the accelerator, for its device and ranks.
        optimizer: the result of `penstock.prepare` for the model.
        model: the model that generates.
        whole: True to gather the model whole if it fits.

    Yields:
        True if it is whole, the same on every rank. The block then issues no collective, and ranks need not be in step.
    """
    moved = move_away(optimizer)
    try:
        is_whole = whole and fits(accelerator, optimizer, model)
        with optimizer.gathered() if is_whole else in_step(accelerator, model):
            yield is_whole
    finally:
        if moved:
            optimizer.reload_states()


def move_away(optimizer: Optimizer) -> bool:
    """Move masters, optimizer states and gradients off the device, until `reload_states`. Collective.

    They go to host memory. A kind of which a part is on nvme goes there as a whole, because the host had no room for
    it. A kind without a byte on the device stays.

    Returns:
        True if anything moved.
    """
    report, moved = optimizer.locations(), False
    for kind in _IDLE:
        if report.bytes(kind=kind, tier="device"):
            optimizer.offload_states({kind}, to="nvme" if report.bytes(kind=kind, tier="nvme") else "cpu")
            moved = True
    return moved


def fits(accelerator: Accelerator, optimizer: Optimizer, model: nn.Module) -> bool:
    """Return True if whole parameters leave room for generation on every device, or are there already. Collective.

    Arguments:
        accelerator: the accelerator, for its device and ranks.
        optimizer: the result of `penstock.prepare` for the model.
        model: the model that generates.
    """
    device = accelerator.device
    wanted = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    resting = optimizer.locations().bytes(kind="param", tier="device")  # all of them, where they are not sharded
    enough = torch.tensor([resting >= wanted or wanted <= WHOLE_SHARE * free_bytes(device)], device=device)
    return bool(accelerator.gather(enough).all())


def free_bytes(device: torch.device) -> float:
    """Return the bytes of a device that torch holds unused, or can allocate. A cpu has no limit here."""
    if device.type == "cpu":
        return math.inf
    module: Any = torch.get_device_module(device)
    free: int = module.mem_get_info(device)[0]
    return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


@contextmanager
def in_step(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Make `model.generate` run as many forwards on each rank as on the one with most tokens, in a `with` block.

    transformers does so by itself only for models that DeepSpeed or FSDP shards.
    """
    if accelerator.num_processes == 1:
        yield
        return
    own = vars(model).get("generate")
    model.generate = partial(model.generate, synced_gpus=True)
    try:
        yield
    finally:
        del model.generate
        if own is not None:
            model.generate = own
