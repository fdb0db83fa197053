"""Models without values, and the weights of a folder for a model that is prepared already."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import is_peft_available

from penstock import Optimizer
from penstock.checkpoint.beside import persistent_buffers
from penstock.checkpoint.tensorfiles import WeightFiles
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations.huggingface import build_empty, find_model


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


def values_of(model: nn.Module) -> Path | None:
    """Find the folder that a model on the meta device has its values in; `None` where it has values.

    Raises:
        ConfigError: it has none, and names no such folder.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return None
    named = getattr(model, "name_or_path", "")
    if named and any(Path(named).glob("*.safetensors")):
        return Path(named)
    raise ConfigError(
        f"The {type(model).__name__} is on the meta device, and names no folder of .safetensors weights. Use "
        "from_pretrained_on_meta(folder), or give trainer_class(weights=): a folder, or 'init'."
    )


def is_adapted(model: nn.Module) -> bool:
    """Tell whether peft has put adapters into a model, which are all that is saved of it."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def adapter_parameters(model: Any, adapter: str) -> dict[str, Tensor]:
    """List what peft saves of an adapter: parameters (and buffers) of the model by their names in its files."""
    from peft import get_peft_model_state_dict

    # Given the tensors themselves, peft picks and renames them, and reads none.
    own = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)
    picked: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter)
    return picked


def saved_state(optimizer: Optimizer, model: Any, dtypes: Mapping[Tensor, torch.dtype]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)
    if is_adapted(model):
        wanted = {id(t) for adapter in model.peft_config for t in adapter_parameters(model, adapter).values()}
        named = {name: tensor for name, tensor in named.items() if id(tensor) in wanted}
    values: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in values:
            values[id(tensor)] = optimizer.full_param(tensor).to(dtypes[tensor]) if isinstance(tensor, nn.Parameter) else tensor.detach().cpu()
    return {name: values[id(tensor)] for name, tensor in named.items()}


def load_weights(optimizer: Optimizer, model: Any, folder: Path) -> LoadResult:
    """Read a folder's weights into a prepared model, one parameter at a time, at master precision. Collective.

    Arguments:
        optimizer: what `penstock.prepare` returned for it.
        model: a model, or one with adapters of peft, of which the active one is read.
        folder: .safetensors files, as `save_pretrained` writes them, which all ranks see.

    Raises:
        CheckpointError: there are none, or a tensor has another shape than its parameter. In the latter case those
            before it are loaded.
    """
    if is_adapted(model):
        targets: Mapping[str, Tensor] = adapter_parameters(model, model.active_adapters[0])
    else:
        targets = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)
    files = WeightFiles(folder)
    try:
        read: set[Tensor] = set()
        for name in sorted(files.entries.keys() & targets.keys()):
            target, shape = targets[name], files.entries[name].shape
            if tuple(target.shape) != shape:
                raise CheckpointError(f"{files.entries[name].file}: '{name}' is {shape}, and {tuple(target.shape)} here.")
            _write(optimizer, target, files.read(name, 0, target.numel()).reshape(shape))
            read.add(target)
        return LoadResult(
            [name for name, target in targets.items() if target not in read],
            sorted(files.entries.keys() - targets.keys()),
        )
    finally:
        files.close()


def _write(optimizer: Optimizer, target: Tensor, value: Tensor) -> None:
    """Overwrite a parameter wherever it rests, or a buffer in place."""
    if isinstance(target, nn.Parameter):
        optimizer.set_full_param(target, value.float())
    else:
        with torch.no_grad():
            target.copy_(value)
