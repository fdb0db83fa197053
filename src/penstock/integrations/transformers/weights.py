"""Models without values, and the weights of a folder for a model that is prepared already."""

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from penstock import Optimizer
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations._common import put_entry
from penstock.integrations.engine_internals import WeightFiles
from penstock.integrations.huggingface import build_empty, find_model
from penstock.integrations.weights import adapter_entries, is_adapted, state_entries


class LoadResult(NamedTuple):
    """What `load_state_dict` returns: names that the files lack, and names that the model lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def from_pretrained_on_meta(folder: str | PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Build a folder's causal language model without values, which Trainer on Penstock reads from the folder.

    No rank ever holds the whole model: each reads what it keeps, straight to where it rests. So models start that are
    larger than host memory.

    Arguments:
        folder: config.json and .safetensors files, as `save_pretrained` writes them.
        trust_remote_code: run the code of a folder whose model is none of transformers' own.

    Returns:
        A transformers model on the meta device, its parameters in the dtype that config.json names.

    Raises:
        ConfigError: the folder cannot be read, or its weights have other names or shapes than the model: use
            `from_pretrained`.

    Example:
        >>> model = from_pretrained_on_meta("Llama-3.1-70B")  # doctest: +SKIP
        >>> trainer_class(Trainer, placement={"params": "nvme", "nvme_path": "/nvme"})(model=model)  # doctest: +SKIP
    """
    source = find_model(str(folder), seq_length=1, trust_remote_code=trust_remote_code)
    model = build_empty(source)
    if model is None:
        raise ConfigError(
            f"{folder}: transformers reads these weights under other names or in other shapes than the model has. Use "
            "from_pretrained, which needs host memory for the model."
        )
    return model


def is_empty(model: nn.Module) -> bool:
    """Tell whether a model is on the meta device, without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def folder_of(model: nn.Module) -> Path:
    """Find the folder that a model without values has them in.

    Raises:
        ConfigError: it names none.
    """
    named = getattr(model, "name_or_path", "")
    if named and any(Path(named).glob("*.safetensors")):
        return Path(named)
    raise ConfigError(
        f"The {type(model).__name__} is on the meta device, and names no folder of .safetensors weights. Use "
        "from_pretrained_on_meta(folder), or give trainer_class(weights=): a folder, or 'init'."
    )


def load_weights(optimizer: Optimizer, model: Any, folder: Path) -> LoadResult:
    """Read a folder's weights into a prepared model, one parameter at a time, at master precision. Collective.

    Arguments:
        optimizer: what `penstock.prepare` returned for it.
        model: a model, or one with adapters of peft, of which the active one is read.
        folder: .safetensors files, as `save_pretrained` writes them, which all ranks see.

    Raises:
        CheckpointError: there are none, or a tensor has another shape than its parameter. Nothing has changed.
    """
    targets = adapter_entries(model, model.active_adapters[0]) if is_adapted(model) else state_entries(model)
    files = WeightFiles(folder)
    try:
        shared = sorted(files.entries.keys() & targets.keys())
        for name in shared:
            shape, here = files.entries[name].shape, tuple(targets[name].shape)
            if shape != here:
                raise CheckpointError(f"{files.entries[name].file}: '{name}' is {shape}, and {here} in the model.")
        for name in shared:
            target = targets[name]
            put_entry(optimizer, target, files.read(name, 0, target.numel()).reshape(target.shape))
        read = {id(targets[name]) for name in shared}  # tied weights are in the files once
        missing = [name for name, target in targets.items() if id(target) not in read]
        return LoadResult(missing, sorted(files.entries.keys() - targets.keys()))
    finally:
        files.close()
