"""A prepared model's `state_dict`, gathered batch by batch: whole values on the host of one rank, never on a device."""

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
    """List what `model.state_dict()` holds: by its names, in its order, parameters and buffers themselves.

    Parameters may be released; shape and dtype are right all the same. Other things are extra states of modules.
    """
    entries: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(entries, f"{path}." if path else "", keep_vars=True)
    return entries


def is_adapted(model: nn.Module) -> bool:
    """Return True if peft has put adapters into the model: they are all that is saved of it."""
    peft: Any = sys.modules.get("peft")  # which made the model, if it is one of its own
    return isinstance(model, getattr(peft, "PeftModel", ()))


def adapter_entries(model: Any, adapter: str) -> dict[str, Tensor]:
    """List what peft saves of an adapter: parameters (and buffers) of the model, by their names in its files."""
    from peft import get_peft_model_state_dict

    # Given the tensors themselves, peft picks and renames them, and reads none.
    picked: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=state_entries(model), adapter_name=adapter)
    return picked


def saved_entries(model: Any) -> dict[str, Any]:
    """List what `save_pretrained` writes of a model, by names of its `state_dict`: of one with adapters, those."""
    entries = state_entries(model)
    if not is_adapted(model):
        return entries
    of_adapters = {id(entry) for adapter in model.peft_config for entry in adapter_entries(model, adapter).values()}
    return {name: entry for name, entry in entries.items() if id(entry) in of_adapters}


def nvme_folders(optimizer: Any, arguments: Mapping[str, Any]) -> Sequence[Path]:
    """List the folders of the nvme tier of a prepared model, for what is large and there for a while.

    Arguments:
        optimizer: what `penstock.prepare` returned for it.
        arguments: what `penstock.prepare` was given; a placement that was planned is the plan's.
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
        optimizer: what `penstock.prepare` returned for the model.
        keep: whether this rank wants the copies.
        folders: where values lie in files without a name, which the kernel writes out and maps again as memory is
            short; else they are in memory.
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
    """Copy a tensor to memory, or to a file that is mapped and has lost its name: it ends with the tensor."""
    nbytes = value.numel() * value.element_size()
    if not folders or not nbytes:
        return value.to("cpu", copy=True)
    try:
        descriptor, name = tempfile.mkstemp(dir=folders[0])
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # a write to a mapping of a full disk would end the process
            storage: Any = torch.UntypedStorage.from_file(name, True, nbytes)
        finally:
            os.unlink(name)
            os.close(descriptor)
    except OSError as error:
        raise failed(folders[0], error) from error
    held: Tensor = torch.empty(0, dtype=value.dtype).set_(storage)
    return held.view(value.shape).copy_(value)
