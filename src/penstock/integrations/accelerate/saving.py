"""What an accelerator writes and reads: weights in shards, and states for `save_state` and `load_state`."""

import inspect
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
)
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from penstock.errors import CheckpointError, EngineError
from penstock.files import check_own, write_whole
from penstock.integrations.accelerate.pairs import Pair
from penstock.integrations.weights import saved_entries, state_entries

_STEP = "accelerate_step"
_logger = logging.getLogger("penstock")
_OF_SEVERAL = "-" + "[0-9]" * 5 + "-of-" + "[0-9]" * 5


# Weights


def write_model(
    accelerator: Any, model: nn.Module, pair: Pair, folder: Path, max_shard_size: int | str, safe: bool
) -> None:
    """Write a model's weights in shards, with one of them in memory at a time. Collective.

    Arguments:
        accelerator: whose `save` writes a file, on the rank that writes.
        model: the model, with the names that it was given with.
        pair: its pair.
        folder: made where it is missing; shards of a save before go.
        max_shard_size: as for `Accelerator.save_model`.
        safe: safetensors, or torch's own format.
    """
    entries = state_entries(model)
    if safe:  # as accelerate: of tied weights the first name alone
        first = {id(entry): name for name, entry in reversed(entries.items()) if isinstance(entry, Tensor)}
        entries = {name: entry for name, entry in entries.items() if first.get(id(entry), name) == name}
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    sized = {name: _without_memory(entry, pair.masters) for name, entry in entries.items()}
    split = split_torch_state_dict_into_shards(sized, filename_pattern=pattern, max_shard_size=max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        for shard_before in folder.glob(pattern.format(suffix=_OF_SEVERAL)):
            if shard_before.name not in split.filename_to_tensors:
                shard_before.unlink()
    for file, names in split.filename_to_tensors.items():
        shard = accelerator.gather_entries(model, {name: entries[name] for name in names}, keep=saves(accelerator))
        whole = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in shard.items()}
        accelerator.save(whole, str(folder / file), safe_serialization=safe)
    if split.is_sharded and saves(accelerator):
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        path = folder / (SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME)
        write_whole(check_own(path), json.dumps(index, indent=2, sort_keys=True) + "\n")


def saves(accelerator: Any) -> bool:
    """Whether this rank writes what `Accelerator.save` is given."""
    on_each_node = accelerator.project_configuration.save_on_each_node
    return bool(accelerator.is_local_main_process if on_each_node else accelerator.is_main_process)


def _without_memory(entry: Any, masters: Container[nn.Parameter]) -> Any:
    if not isinstance(entry, Tensor):
        return entry
    dtype = torch.float32 if entry in masters else entry.dtype
    return torch.empty(entry.shape, dtype=dtype, device="meta")


def plant_save_pretrained(accelerator: Any, pair: Pair) -> None:
    """Have a model's own `save_pretrained` gather what it writes, until the pair is closed."""
    original = getattr(pair.model, "save_pretrained", None)
    if original is not None:
        patches = pair.handle._engine.patches  # type: ignore[union-attr]  # it has just been prepared
        patches.plant(pair.model, "save_pretrained", partial(_save_pretrained, accelerator, pair, original))


def _save_pretrained(accelerator: Any, pair: Pair, original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Gather the state that `save_pretrained` writes, on the ranks that write. Collective, unless it is given.

    Raises:
        EngineError: called on one rank of several, which gathers nothing; it says what to do.
    """
    named = {**inspect.signature(original).bind(*args, **given).arguments, **given}
    state = named.get("state_dict")
    if state is None and accelerator.num_processes > 1 and "is_main_process" not in named:
        return _save_alone(pair, original, *args, **given)
    writes = bool(named.get("is_main_process", True))
    if state is None:
        state = accelerator.gather_entries(pair.model, saved_entries(pair.model), keep=writes)
    if not writes:
        return None
    dtypes = [value.dtype for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
    # Classes of other libraries have no argument for it: what they ask the model for is the same.
    attributes = vars(pair.model)
    before = {name: attributes[name] for name in ("state_dict",) if name in attributes}
    attributes["state_dict"] = lambda *_, **__: dict(state)
    try:
        returned = original(*args, **given)
    finally:
        del attributes["state_dict"]
        attributes.update(before)
    config: Any = getattr(pair.model, "config", None)
    folder = Path(args[0] if args else given.get("save_directory", ""))
    if dtypes and (folder / "config.json").is_file() and getattr(config, "dtype", None) is not None:
        # transformers has written the dtype of training, in which `from_pretrained` would load the weights.
        config.dtype = str(dtypes[0]).removeprefix("torch.")
        config.save_pretrained(folder)
    return returned


def _save_alone(pair: Pair, original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Save on one rank what it has, where it has whole parameters."""
    advice = (
        "Call it on every rank, with is_main_process=accelerator.is_main_process; or give it "
        "state_dict=accelerator.get_state_dict(model), called on every rank."
    )
    try:
        returned = original(*args, **given)
    except EngineError as error:
        raise EngineError(
            f"save_pretrained() without is_main_process= on a rank of several: parameters of "
            f"{type(pair.model).__name__} are released, and one rank cannot gather them. {advice}"
        ) from error
    if pair.masters:
        _logger.warning("save_pretrained() on one rank of several wrote the dtype of training, not fp32. %s", advice)
    return returned


# States


@contextmanager
def saving_states(accelerator: Any, pairs: Sequence[Pair], *, blocking: bool) -> Iterator[None]:
    """Have `Accelerator.save_state` inside save pairs as checkpoints, and gather nothing but for hooks.

    Arguments:
        accelerator: the one whose method runs inside.
        pairs: what is saved, each in a folder of its own.
        blocking: as for `penstock.Optimizer.save`.
    """
    hooks, models = list(accelerator._save_model_state_pre_hook.values()), list(accelerator._models)

    def save(_models: object, _weights: object, folder: str) -> None:
        weights: list[dict[str, Tensor]] = [{} for _ in models]
        with _whole(pairs if hooks else (), modify=False):
            for hook in hooks:
                hook(models, weights, folder)
        for number, pair in enumerate(pairs):
            pair.handle.save(_checkpoint(folder, number), extra={_STEP: accelerator.step}, blocking=blocking)

    with _in_place_of_hooks(accelerator, "_save_model_state_pre_hook", save):
        yield


@contextmanager
def loading_states(accelerator: Any, pairs: Sequence[Pair]) -> Iterator[None]:
    """Have `Accelerator.load_state` inside load pairs from their checkpoints.

    Arguments:
        accelerator: the one whose method runs inside.
        pairs: what is loaded, in the order in which it was saved.

    Raises:
        CheckpointError: the folder has others, or none: plain accelerate wrote it. Nothing has changed.
    """
    hooks, models = list(accelerator._load_model_state_pre_hook.values()), list(accelerator._models)
    extras: list[dict[str, Any]] = []

    def load(_models: object, folder: str) -> None:
        _check_checkpoints(folder, len(pairs))
        left = list(models)
        with _whole(pairs if hooks else (), modify=True):
            for hook in hooks:
                hook(left, folder)
        extras.extend(pair.handle.load(_checkpoint(folder, number)) for number, pair in enumerate(pairs))

    with _in_place_of_hooks(accelerator, "_load_model_state_pre_hook", load):
        yield
    # accelerate has it in the file of each rank, and a rank that was not there then would count otherwise.
    for extra in extras:
        accelerator.step = extra[_STEP]


@contextmanager
def _whole(pairs: Sequence[Pair], *, modify: bool) -> Iterator[None]:
    """Show whole parameters to hooks, on every rank: a hook may save or load a model on the first one alone."""
    with ExitStack() as gathered:
        for pair in pairs:
            gathered.enter_context(pair.handle.gathered(modify=modify))
        yield


@contextmanager
def _in_place_of_hooks(accelerator: Any, name: str, only: Callable[..., None]) -> Iterator[None]:
    """Let a method of accelerate see no models, no optimizers, and one hook: it would gather each state dict."""
    replaced = {name: OrderedDict([(0, only)]), "_models": [], "_optimizers": []}
    before = {attribute: getattr(accelerator, attribute) for attribute in replaced}
    for attribute, value in replaced.items():
        setattr(accelerator, attribute, value)
    try:
        yield
    finally:
        for attribute, value in before.items():
            setattr(accelerator, attribute, value)


def _checkpoint(folder: str | os.PathLike[str], number: int) -> Path:
    return Path(folder, f"penstock_{number}" if number else "penstock")


def _check_checkpoints(folder: str, count: int) -> None:
    """Refuse a folder in which there is not a checkpoint for each pair."""
    there = [number for number in range(count) if _checkpoint(folder, number).is_dir()]
    more = _checkpoint(folder, count).is_dir()
    if len(there) < count or more:
        raise CheckpointError(
            f"{folder} holds {'more than ' * more}{len(there)} checkpoints of prepared models, and {count} are "
            "prepared. Prepare those that were saved, in that order. Weights that plain accelerate saved "
            "(model.safetensors) go into the model before prepare(), or through penstock={'weights': FILE}.",
            file=folder,
        )
