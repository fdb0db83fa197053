"""The border to model folders: whatever goes wrong in a library that reads somebody's files is one line.

Nothing in a folder runs unless its reader says so (`trust_remote_code`), and nothing in it is believed before it is
held against the size of the files: `config.json` is read here first, in bounds.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as registration

from penstock.errors import CheckpointError, ConfigError, PenstockError, one_line
from penstock.files import parse_object, read_bytes

TRUST_OPTION = "--trust-remote-code"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"

MOST_CONFIG_BYTES = 1 << 24
#: Numbers of a configuration that become lists of modules or of names: read as counts, and bounded.
_COUNTED = ("layer", "expert", "label", "head", "depth", "block", "stage")
MOST_COUNT = 100_000
_MODULES_PER_TENSOR = 64
_MODULES_OF_ANY = 10_000
_TENSORS_OF_ANY = 10_000
_MOST_PACKING = 16  # elements of a model that one stored element stands for, as quantised files have it
_NUMEL_OF_ANY = 1 << 20
_BUFFER_BYTES_OF_ANY = 1 << 28


@contextlib.contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Say in one line what goes wrong inside, around calls that read a folder or compute with what was read there.

    Arguments:
        what: the part of the folder that is read, for the message: `"tokenizer"`.
        folder: the model's folder.

    Raises:
        ConfigError: another library has raised something, or what is read is damaged; other errors of our own stay as
            they are.
    """
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"The {what} in {folder} cannot be read: {error}") from error
    except (PenstockError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # Rust's panics are no Exception
        raise ConfigError(
            f"The {what} in {folder} cannot be read: {one_line(error)}. Mend the folder's files, or name another one."
        ) from error


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read a folder's `config.json`, and check it before any other library sees what would make it hang or allocate.

    Raises:
        ConfigError: it cannot be read, or something in the folder can be no file of a model.
    """
    with reading("model", folder):
        _check_entries(folder)
        if (folder / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"{folder} holds adapters ({ADAPTER_CONFIG}) beside a model. Merge them, and name the merged model."
            )
        return read_json(folder / CONFIG)


def read_json(file: Path) -> Mapping[str, Any]:
    """Read a small JSON file's object.

    Raises:
        ConfigError: it is too large, is no JSON, is no object, or has a count that is beyond any model.
    """
    try:
        content = parse_object(read_bytes(file, MOST_CONFIG_BYTES), is_strict=False)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file.parent}: its {file.name} cannot be read: {why}. Mend it, or name another folder."
        ) from error
    _check_counts(file, content)
    return content


def check_code(name: str, config: Mapping[str, Any], *, is_native: bool) -> None:
    """Refuse a folder whose model is code of its own, or is computed by kernels from elsewhere.

    Arguments:
        name: the folder, as the user wrote it.
        config: what its `config.json` holds.
        is_native: whether transformers has a class of its own for it.

    Raises:
        ConfigError: it is one. The message names the files, and the option that allows it.
    """
    if "auto_map" in config and not is_native:
        raise needs_code(name, CONFIG, _references(config["auto_map"]))
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in json.dumps(value):
            raise needs_code(name, CONFIG, f"the kernel {one_line(json.dumps(value), 80)}")


def check_numbers(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose weights are codes of some method, which nothing here trains or streams.

    Arguments:
        name: the folder, as the user wrote it.
        config: what its `config.json` holds.

    Raises:
        ConfigError: it is one. The message names the method.
    """
    text = config.get("text_config")  # of a model that sees images too, the part that reads text
    for holder in (config, text if isinstance(text, Mapping) else {}):
        found = holder.get("quantization_config")
        if found:
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            raise ConfigError(
                f"--model {name!r} is quantised ({one_line(str(method or 'by an unknown method'), 40)}): its codes are "
                "not streamed. Name the model that it was made of, whose weights are numbers; as the frozen base of "
                "adapters it can rest in int8 (base=int8)."
            )


def needs_code(name: str, file: str, what: str) -> ConfigError:
    """Make the error of a folder that needs code, with the option that allows it."""
    return ConfigError(
        f"{name!r} runs code that is not part of transformers: its {file} names {what}. Read that code first; then "
        f"allow it with {TRUST_OPTION}."
    )


@contextlib.contextmanager
def few_modules(folder: Path, *, tensor_count: int | None = None) -> Iterator[None]:
    """Stop the building of a model inside, once it has far more modules than its files have tensors.

    Arguments:
        folder: the model's folder, for the message.
        tensor_count: how many tensors the files have; `None` where there are none: then no more than any model has.

    Raises:
        ConfigError: it has that many. Without this, a number in a configuration could fill the host's memory.
    """
    left = _MODULES_OF_ANY + _MODULES_PER_TENSOR * (_TENSORS_OF_ANY if tensor_count is None else tensor_count)
    files = "any model has" if tensor_count is None else f"its {tensor_count:,} tensors are of"

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ConfigError(
                f"The {CONFIG} in {folder} describes far more layers than {files}. Name a folder whose weights belong "
                "to it."
            )

    modules = registration.register_module_module_registration_hook(count)
    parameters = registration.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        modules.remove()
        parameters.remove()


def check_sizes(model: nn.Module, folder: Path, *, held_numel: int) -> None:
    """Refuse a model, on the meta device, that is far larger than the files it is to be filled from.

    Raises:
        ConfigError: it is. The message says by how much; nothing of that size was allocated.
    """
    numel = sum(parameter.numel() for parameter in model.parameters())
    if numel > _MOST_PACKING * held_numel + _NUMEL_OF_ANY:
        raise ConfigError(
            f"The {CONFIG} in {folder} describes a model of {numel:,} parameters; its weights hold {held_numel:,}. "
            "Name a folder whose weights belong to it."
        )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if buffer_bytes > _MOST_PACKING * held_numel + _BUFFER_BYTES_OF_ANY:
        raise ConfigError(
            f"The {CONFIG} in {folder} describes a model with {buffer_bytes:,} bytes of buffers beside {held_numel:,} "
            "elements of weights. Mend its sizes, or name another folder."
        )


def _check_entries(folder: Path) -> None:
    """Refuse a folder with a pipe or a device in it, which would hang whoever reads it."""
    for inside in (folder, *(entry for entry in folder.iterdir() if entry.is_dir())):
        with contextlib.suppress(PermissionError):
            for entry in os.scandir(inside):
                with contextlib.suppress(FileNotFoundError):  # a dangling link is no file to anybody
                    mode = entry.stat().st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                        raise ConfigError(f"{entry.path} is no file. Remove it, or name another folder.")


def _check_counts(file: Path, value: object) -> None:
    """Refuse counts that are beyond any model, at any depth: libraries make lists that long before they look."""
    holders = [value]
    while holders:
        holder = holders.pop()
        if isinstance(holder, list):
            holders += holder
        elif isinstance(holder, dict):
            holders += holder.values()
            for key, item in holder.items():
                if isinstance(item, int) and item > MOST_COUNT and any(word in key for word in _COUNTED):
                    raise ConfigError(
                        f"{file}: {one_line(repr(key), 80)} is {one_line(str(item), 40)}, more than any model has. "
                        "Mend it, or name another folder."
                    )


def _references(auto_map: object) -> str:
    """List the classes that a folder names, without what their values could do to a terminal."""
    named = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    return one_line(", ".join(sorted({str(item) for item in named})), 120) or "a module"
