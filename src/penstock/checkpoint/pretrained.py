"""What a model is called in the files of transformers and peft: its tensors, and the configuration beside them.

A model that transformers loads has `model*.safetensors`, `config.json` and `generation_config.json`. Adapters that peft
loads have `adapter_model.safetensors` and `adapter_config.json`; in the model, the name of each of its parameters has
the adapter's name in it:

    base_model.model.lm_head.base_layer.weight         base      lm_head.weight
    base_model.model.lm_head.lora_A.default.weight     adapter   base_model.model.lm_head.lora_A.weight
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.checkpoint.adapters import (
    COMPILED,
    PEFT_PREFIX,
    Form,
    Merge,
    base_name,
    plan_merges,
    without,
)
from penstock.checkpoint.fields import dtype_name
from penstock.checkpoint.opened import Checkpoint
from penstock.errors import ConfigError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter"
CLASS = "class"

_OF_ADAPTER = "modules_to_save"


# What a checkpoint keeps


def describe(model: nn.Module) -> dict[str, str]:
    """Read what `export` needs of a model beside its values: its class, and its configuration files if it has some.

    Of a model with adapters (peft): those of the model that they adapt, the adapters' own, and their name.
    """
    model = getattr(model, "_orig_mod", model)  # that torch.compile has wrapped
    files: dict[str, str] = {}
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        name = "default" if "default" in adapters else next(iter(adapters))
        files |= {ADAPTER: name, ADAPTER_CONFIG: _adapter_config(adapters[name])}
        model = getattr(model, "get_base_model", lambda: model)()
    files[CLASS] = type(model).__name__
    for attribute, name in (("config", CONFIG), ("generation_config", GENERATION_CONFIG)):
        text = getattr(getattr(model, attribute, None), "to_json_string", None)
        if callable(text):
            files[name] = str(text())
    return files


def _adapter_config(config: Any) -> str:
    """Write adapters' configuration as peft saves it: its sets are lists."""
    return json.dumps(
        config.to_dict(),
        indent=2,
        sort_keys=True,
        default=lambda value: sorted(value) if isinstance(value, set) else str(value),
    )


# What an export is made of


@dataclass(frozen=True)
class FileSet:
    """Files of an export that are read together: those of a model, or those of its adapters.

    Attributes:
        folder: the folder inside the export; empty for the export itself.
        stem: what names of tensor files begin with.
        one_file: whether all tensors must be in one file.
        names: what the tensors are called, by name in the checkpoint.
        beside: further files: text by name.
        merges: which of them are made of several tensors, and how.
    """

    folder: str
    stem: str
    one_file: bool
    names: Mapping[str, str]
    beside: Mapping[str, str]
    merges: Mapping[str, Merge] = field(default_factory=dict)


def file_sets(
    checkpoint: Checkpoint, dtype: torch.dtype, *, adapters_only: bool, merge_adapters: bool = False
) -> list[FileSet]:
    """Decide what an export of a checkpoint consists of.

    Arguments:
        checkpoint: the checkpoint.
        dtype: the dtype of the weights, which the configuration names.
        adapters_only: of a model with adapters, write those alone.
        merge_adapters: write the model with its adapters merged into it, whatever `adapters_only` says.

    Raises:
        CheckpointError: names collide, adapters are of a kind that is not known, or there are none to merge.
    """
    model = checkpoint.manifest.model
    names = [*checkpoint.manifest.parameters, *checkpoint.manifest.buffers]
    plain = {name: without(name, (COMPILED,)) for name in names}
    if ADAPTER_CONFIG not in model and merge_adapters:
        raise checkpoint.fail(f"model.{ADAPTER_CONFIG}", "is missing: there are no adapters. Export without merging.")
    if ADAPTER_CONFIG not in model:
        return [FileSet("", "model", False, _distinct(checkpoint, plain), _configuration(checkpoint, dtype))]

    kind = _parse(checkpoint, ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise checkpoint.fail(f"model.{ADAPTER_CONFIG}", f"is of adapters of type {kind}. LoRA alone is exported.")
    adapter = model.get(ADAPTER, "default")
    of_adapter = {name: adapter_name(own, adapter) for name, own in plain.items() if adapter in own.split(".")}
    beside = {ADAPTER_CONFIG: model[ADAPTER_CONFIG]}
    merges = _merges(checkpoint, adapter) if merge_adapters else {}
    if adapters_only and not merge_adapters:
        _check_nothing_else_was_trained(checkpoint, of_adapter)
        return [FileSet("", "adapter_model", True, _distinct(checkpoint, of_adapter), beside)]
    left_out = {*of_adapter, *(merge.scale for merge in merges.values())}
    base = {name: base_name(name) for name in plain if name not in left_out}
    return [
        FileSet("", "model", False, _distinct(checkpoint, base), _configuration(checkpoint, dtype), merges),
        FileSet(ADAPTER, "adapter_model", True, _distinct(checkpoint, of_adapter), beside),
    ]


def adapter_name(name: str, adapter: str) -> str:
    """Say what peft's files call a parameter of an adapter, by its name in the adapted model."""
    return PEFT_PREFIX + without(name, (COMPILED, adapter, _OF_ADAPTER)).removeprefix(PEFT_PREFIX)


def _merges(checkpoint: Checkpoint, adapter: str) -> dict[str, Merge]:
    """Find out which weights are merged with adapters, or made of codes."""
    forms = {name: Form(saved.shape, saved.dtype) for name, saved in checkpoint.manifest.parameters.items()}
    try:
        return plan_merges(forms, _parse(checkpoint, ADAPTER_CONFIG), adapter)
    except ConfigError as error:
        raise checkpoint.fail(f"model.{ADAPTER_CONFIG}", f"cannot be merged: {error}.") from error


def _distinct(checkpoint: Checkpoint, names: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse names two of which are the same in an export; gives them back."""
    owners: dict[str, str] = {}
    for own, name in names.items():
        if name in owners:
            raise checkpoint.fail(
                "parameters", f"has '{owners[name]}' and '{own}', which are both '{name}' in an export."
            )
        owners[name] = own
    return names


def _check_nothing_else_was_trained(checkpoint: Checkpoint, exported: Mapping[str, str]) -> None:
    """Refuse a checkpoint in which a parameter was trained that an export of adapters alone would lose."""
    for name, saved in checkpoint.manifest.parameters.items():
        if saved.trained and name not in exported:
            raise checkpoint.fail(
                f"parameters.{name}",
                "was trained and is of no adapter: peft has no place for it. Export with adapters_only=False.",
            )


def _configuration(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, str]:
    """Write the configuration of the model that a checkpoint is of."""
    model = checkpoint.manifest.model
    if CONFIG in model:
        _parse(checkpoint, CONFIG)  # whoever wrote the marker
    return configuration(model, dtype)


def configuration(model: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
    """Write `config.json` as `save_pretrained` does, and what else there is; text by name.

    Arguments:
        model: what `describe` has read.
        dtype: the dtype of the weights.
    """
    files = {}
    if CONFIG in model:
        config = json.loads(model[CONFIG])
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(dtype)
        config["architectures"] = config.get("architectures") or [model[CLASS]]
        files[CONFIG] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if GENERATION_CONFIG in model:
        files[GENERATION_CONFIG] = model[GENERATION_CONFIG]
    return files


def _parse(checkpoint: Checkpoint, name: str) -> dict[str, object]:
    """Read one of the configuration files that the marker keeps."""
    try:
        parsed = json.loads(checkpoint.manifest.model[name])
    except (ValueError, RecursionError) as error:
        raise checkpoint.fail(f"model.{name}", f"is not JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise checkpoint.fail(f"model.{name}", "is not an object.")
    return parsed
