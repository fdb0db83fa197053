"""A trained model with adapters as a whole model: merged, and written, a part at a time."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.integrations.engine_internals import (
    ADAPTER,
    ADAPTER_CONFIG,
    Merge,
    TensorSpec,
    adapter_name,
    base_name,
    batches,
    configuration,
    describe,
    merged,
    plan_merges,
)
from penstock.integrations.streaming import MOST_SHARD_BYTES, ModelFiles, stream
from penstock.integrations.weights import GATHER_BYTES, state_entries

_BLOCK_NUMEL = 1 << 24  # merged at once
_ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class _Plan:
    """What is written.

    Attributes:
        merges: which weights are made of several tensors, by name in the model.
        specs: what becomes of each tensor of the base, by name in the model.
        adapters: what becomes of those of the adapter.
        texts: small files, by their paths in the folder.
    """

    merges: Mapping[str, Merge]
    specs: Mapping[str, TensorSpec]
    adapters: Mapping[str, TensorSpec]
    texts: Mapping[str, str]


def save_merged(
    model: nn.Module,
    optimizer: Any,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MOST_SHARD_BYTES,
    is_first_rank: bool = True,
) -> None:
    """Save a model with its LoRA adapters merged into it, so that `from_pretrained(out)` reads it. Every rank calls it.

    Weights are W + alpha / r B A, of the adapters' fp32 masters, computed in fp32 and rounded once; codes of a base in
    int8 become numbers. Parameters are gathered 1 GiB at a time and written as they come: no rank holds the model.
    The adapters alone are in `out/adapter`, in fp32, for `PeftModel.from_pretrained`.

    Arguments:
        model: what `add_adapters` or `get_peft_model` has made; it stays as it is.
        optimizer: what `penstock.prepare` returned for it.
        out: the folder, made when missing. A model that is in it is replaced once this one is on the disk.
        dtype: of the weights; `None` for the dtype that was computed in.
        max_shard_bytes: the most bytes of a file of tensors; a larger tensor has one of its own.
        is_first_rank: whether this rank writes.

    Raises:
        ConfigError: the model has no adapters, or some of another kind.
        CheckpointError: a file cannot be written. Raised on the rank that writes, when all have come to the end.
    """
    entries = {name: entry for name, entry in state_entries(model).items() if isinstance(entry, Tensor)}
    # Tied ones once, under the first of their names, as `from_pretrained` ties them again.
    firsts = {tensor: name for name, tensor in reversed(entries.items())}
    entries = {name: tensor for name, tensor in entries.items() if firsts[tensor] == name}
    plan = _plan(model, entries, dtype)
    adapters = {f"{ADAPTER}/{_ADAPTER_FILE}": list(plan.adapters.values())}
    stream(
        lambda: ModelFiles(out, list(plan.specs.values()), plan.texts, most_bytes=max_shard_bytes, beside=adapters),
        _gathered(plan, entries, optimizer),
        lambda files, piece: _write(files, plan, *piece),
        is_first_rank=is_first_rank,
    )


def _plan(model: nn.Module, entries: Mapping[str, Tensor], dtype: torch.dtype | None) -> _Plan:
    """Decide what is written; nothing is read."""
    texts = describe(model)
    if ADAPTER_CONFIG not in texts:
        raise ConfigError(f"{type(model).__name__} has no adapters to merge. Save it as it is.")
    adapter, settings = texts[ADAPTER], json.loads(texts[ADAPTER_CONFIG])
    parameters = {name: entry for name, entry in entries.items() if isinstance(entry, nn.Parameter)}
    try:
        merges = plan_merges(parameters, settings, adapter)
    except ConfigError as error:
        raise ConfigError(f"{type(model).__name__} cannot be merged: {error}.") from error
    of_adapter = [name for merge in merges.values() for name in merge.adapter or ()]
    left_out = {*of_adapter, *(merge.scale for merge in merges.values())}
    dtype = dtype or next(entries[name].dtype for name in of_adapter)
    specs = {}
    for name, entry in entries.items():
        if name not in left_out:
            converts = name in merges or (name in parameters and entry.is_floating_point() and entry.dtype.itemsize > 1)
            specs[name] = TensorSpec(base_name(name), tuple(entry.shape), dtype if converts else entry.dtype)
    adapters = {n: TensorSpec(adapter_name(n, adapter), tuple(entries[n].shape), torch.float32) for n in of_adapter}
    beside = {f"{ADAPTER}/{ADAPTER_CONFIG}": texts[ADAPTER_CONFIG], **configuration(texts, dtype)}
    return _Plan(merges, specs, adapters, beside)


def _gathered(
    plan: _Plan, entries: Mapping[str, Tensor], optimizer: Any
) -> Iterator[tuple[str, Tensor, Mapping[str, Tensor]]]:
    """Give each tensor of the base on the cpu, and with it what it is merged with, some at a time. Collective."""
    names = {entries[name]: name for name in plan.specs}
    parameters = [entries[name] for name in plan.specs if isinstance(entries[name], nn.Parameter)]
    for group in batches(parameters, GATHER_BYTES):
        merges = [plan.merges[names[p]] for p in group if names[p] in plan.merges]
        held = {name: optimizer.full_param(entries[name]).cpu() for merge in merges for name in merge.needs}
        trained = {p: optimizer.full_param(p).cpu() for p in group if p.requires_grad}
        with optimizer.gathered([p for p in group if not p.requires_grad]):
            for parameter in group:
                value = trained[parameter] if parameter.requires_grad else parameter.detach().cpu()
                yield names[parameter], value, held
    for name in plan.specs:
        if not isinstance(entries[name], nn.Parameter):
            yield name, entries[name].detach().cpu(), {}


def _write(files: ModelFiles, plan: _Plan, name: str, value: Tensor, held: Mapping[str, Tensor]) -> None:
    """Write a tensor of the base, merged block by block, and the adapter that it is merged with."""
    spec, merge = plan.specs[name], plan.merges.get(name)
    flat = value.reshape(-1)
    for start in range(0, flat.numel(), _BLOCK_NUMEL):
        block = flat[start : start + _BLOCK_NUMEL]
        whole = block if merge is None else merged(block, start, merge, held)
        files.write(spec.name, start, whole.to(spec.dtype))
    for own in () if merge is None or merge.adapter is None else merge.adapter:
        files.write(plan.adapters[own].name, 0, held[own])
