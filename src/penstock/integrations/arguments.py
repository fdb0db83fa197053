"""Arguments of `penstock.prepare` as files hold them: JSON or YAML values for classes, dtypes and dataclasses."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.errors import ConfigError, shown
from penstock.files import read_mapping, without_removed

_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_GIVEN_BY_CALL = ("model", "optimizer")
_CLASSES: Mapping[str, Any] = {"placement": penstock.Placement, "options": penstock.Options}
_DTYPE_ARGUMENTS = ("grad_accumulation_dtype", "reduce_dtype")


@dataclass(frozen=True)
class ByClassName:
    """The units of `prepare` by names of classes, as files hold them: `units: [LlamaDecoderLayer]`.

    Attributes:
        names: of the classes whose modules are gathered together.
    """

    names: frozenset[str]

    def __call__(self, name: str, module: nn.Module) -> bool:
        """Return True if a module is of one of the classes."""
        del name
        return type(module).__name__ in self.names


def argument_names() -> tuple[str, ...]:
    """List the arguments of `penstock.prepare` beside the model and its optimizer."""
    return tuple(name for name in inspect.signature(penstock.prepare).parameters if name not in _GIVEN_BY_CALL)


def prepare_arguments(mapping: Mapping[str, Any], *, source: str = "penstock") -> dict[str, Any]:
    """Make arguments of `penstock.prepare` from the content of a file.

    Arguments:
        mapping: arguments by name. `placement` and `options` may be mappings of their fields, dtypes and `units` names:
            `"bf16"`, `"torch.float32"`, `["LlamaDecoderLayer"]`. A value of the right type stays as it is.
        source: the name of the mapping in messages, such as its file.

    Returns:
        Keyword arguments of `penstock.prepare(model, optimizer, ...)`, for the names in the mapping.

    Raises:
        ConfigError: an unknown name, with the nearest known one; an argument that was removed, at another value than
            its default; a value that is not understood.

    Example:
        >>> prepare_arguments({"stage": 2, "placement": {"optimizer": "cpu"}})["placement"].optimizer
        'cpu'
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source} is {type(mapping).__name__}, not a mapping of arguments of penstock.prepare().")
    mapping = without_removed(mapping, f"{source}: ")
    known = argument_names()
    for name in mapping:
        if name in _GIVEN_BY_CALL:
            raise ConfigError(f"{source}[{name!r}]: the {name} is not given here, but where it is prepared.")
    check_names(mapping, known, source)
    return {name: _read(name, value, f"{source}[{name!r}]") for name, value in mapping.items()}


def read_arguments(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a JSON or YAML file of arguments of `penstock.prepare`.

    Arguments:
        path: a file that holds a mapping, such as `placement: {optimizer: cpu}`.

    Raises:
        ConfigError: it cannot be read, or says something that `prepare` does not take.

    Example:
        >>> read_arguments("penstock.yaml")["stage"]  # doctest: +SKIP
        2
    """
    return prepare_arguments(read_mapping(Path(path)), source=str(path))


def check_names(mapping: Mapping[str, Any], known: Collection[str], source: str) -> None:
    """Refuse a name that is not known, and name the nearest one.

    Raises:
        ConfigError: there is one.
    """
    for name in mapping:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"Use some of {', '.join(known)}."
            raise ConfigError(f"{source} has no {shown(name)}. {advice}")


def _read(name: str, value: Any, source: str) -> Any:
    """Read the value of an argument. One that is of no kind that files have is left to `prepare`."""
    if name == "options" and value is None:
        return penstock.Options()
    if name in _CLASSES and isinstance(value, Mapping):
        check_names(value, [field.name for field in fields(_CLASSES[name])], source)
        return _CLASSES[name](**value)
    if name in _DTYPE_ARGUMENTS and isinstance(value, str):
        dtype = _DTYPES.get(value.removeprefix("torch."))
        if dtype is None:
            raise ConfigError(f"{source}={shown(value)} is no dtype. Use one of 'fp32', 'bf16', 'fp16'.")
        return dtype
    named = [value] if isinstance(value, str) else value
    if name == "units" and isinstance(named, list | tuple) and any(isinstance(item, str) for item in named):
        if not all(isinstance(item, str) for item in named):
            raise ConfigError(f"{source} has names and classes. Use names of classes alone, or classes alone.")
        return ByClassName(frozenset(named))
    return value
