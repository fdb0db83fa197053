"""A prepared model's `state_dict`, gathered in batches: whole values in host memory, never on a device."""

import os
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Placement
from penstock.integrations.engine_internals import batches, failed

GATHER_BYTES = 1 << 30


def state_entries(model: nn.Module) -> dict[str, Any]:
    """List the entries of `model.state_dict()`, by name and in its order: parameters and buffers themselves.

    Parameters may be released: their shape and dtype are right. Other entries are extra states of modules.
    """
    entries: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(entries, f"{path}." if path else "", keep_vars=True)
    return entries


def is_adapted(model: nn.Module) -> bool:
    """Return True if peft has put adapters into the model. Only they are saved."""
    peft: Any = sys.modules.get("peft")  # which made the model, if it is one of its own
    return isinstance(model, getattr(peft, "PeftModel", ()))


def adapter_entries(model: Any, adapter: str) -> dict[str, Tensor]:
    """List the tensors that peft saves of an adapter, by their names in its files."""
    from peft import get_peft_model_state_dict

    # Given the tensors themselves, peft picks and renames them, and reads none.
    picked: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=state_entries(model), adapter_name=adapter)
    return picked


def saved_entries(model: Any) -> dict[str, Any]:
    """List the entries of `model.state_dict()` that `save_pretrained` writes: all, or those of adapters."""
    entries = state_entries(model)
    if not is_adapted(model):
        return entries
    of_adapters = {id(entry) for adapter in model.peft_config for entry in adapter_entries(model, adapter).values()}
    return {name: entry for name, entry in entries.items() if id(entry) in of_adapters}


def nvme_folders(optimizer: Any, arguments: Mapping[str, Any]) -> Sequence[Path]:
    """List the folders of the nvme tier of a prepared model.

    Arguments:
        optimizer: the result of `penstock.prepare` for it.
        arguments: the arguments of `penstock.prepare`. A placement that was planned is the plan's.
    """
    placement = arguments.get("placement") if optimizer.plan is None else optimizer.plan.placement
    return placement.nvme_folders() if isinstance(placement, Placement) else ()


def gather_entries(
    entries: Mapping[str, Any],
    optimizer: Any,
    *,
    keep: bool = True,
    folders: Sequence[Path] = (),
    masters: Container[nn.Parameter] = (),
) -> dict[str, Any]:
    """Copy entries of a state to the host, `GATHER_BYTES` of parameters at a time. Collective.

    Arguments:
        entries: some or all of `state_entries`, the same on every rank.
        optimizer: the result of `penstock.prepare` for the model.
        keep: True if this rank keeps the copies.
        folders: folders for files without a name that hold the values, which the kernel writes out when memory is
            short. Without folders the values are in memory.
        masters: parameters that are copied at master precision, in fp32. One at a time, on the host of every rank.

    Returns:
        The copies, on the cpu, the others in the dtypes of training; one for parameters that are tied. Empty without
        `keep`.

    Raises:
        CheckpointError: a folder has no room.
    """
    names = {entry: name for name, entry in entries.items() if isinstance(entry, Tensor)}
    copies: dict[Tensor, Tensor] = {}
    with gathering({name: entry for entry, name in names.items()}, optimizer, masters=masters) as tensors:
        if keep:
            for name, value in tensors:
                copies[entries[name]] = _copied(value, folders)
    if not keep:
        return {}
    return {name: copies[entry] if isinstance(entry, Tensor) else entry for name, entry in entries.items()}


@contextmanager
def gathering(
    entries: Mapping[str, Tensor], optimizer: Any, *, masters: Container[nn.Parameter] = ()
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Gather the tensors of a state for a `with` block, `GATHER_BYTES` of parameters at a time. Collective.

    A rank whose block ends early, or fails, gathers what is left: the other ranks wait for it in each gather.

    Arguments:
        entries: some or all tensors of `state_entries`, each once, the same on every rank.
        optimizer: the result of `penstock.prepare` for the model.
        masters: parameters that are yielded at master precision, in fp32. One at a time, on the host of every rank.

    Yields:
        An iterator over names and values. A value is valid until the next one is asked for.
    """
    tensors = _gathered(entries, optimizer, masters)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


def _gathered(
    entries: Mapping[str, Tensor], optimizer: Any, masters: Container[nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    names = {entry: name for name, entry in entries.items()}
    parameters = [entry for entry in names if isinstance(entry, nn.Parameter)]
    for parameter in parameters:
        if parameter in masters:
            yield names[parameter], optimizer.full_param(parameter)
    for group in batches((parameter for parameter in parameters if parameter not in masters), GATHER_BYTES):
        with optimizer.gathered(group):
            for parameter in group:
                yield names[parameter], parameter.detach()
    for entry, name in names.items():
        if not isinstance(entry, nn.Parameter):
            yield name, entry.detach()


def _copied(value: Tensor, folders: Sequence[Path]) -> Tensor:
    """Copy a tensor to memory, or to a mapped file without a name, which ends with the tensor."""
    if not folders or not value.nbytes:
        return value.to("cpu", copy=True)
    try:
        with tempfile.NamedTemporaryFile(dir=folders[0]) as file:
            os.posix_fallocate(file.fileno(), 0, value.nbytes)  # a write to a mapping of a full disk ends the process
            held = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype)
    except OSError as error:
        raise failed(folders[0], error) from error
    return held.view(value.shape).copy_(value)
