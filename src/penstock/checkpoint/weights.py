"""Weights in safetensors files, read in parts: no tensor is larger in memory than what is asked for."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, one_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 1 << 28

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of the files: where it is, and what."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """The tensors of a safetensors file, or of a folder of them as `save_pretrained` writes it.

    Arguments:
        path: a file, an index file (*.index.json), or a folder with an index, with model.safetensors, or with any
            .safetensors files.

    Raises:
        CheckpointError: a file is missing, is not safetensors, or does not hold what the index says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._opened: dict[Path, Any] = {}
        self.entries: dict[str, Entry] = {}
        for file in _files(Path(path)):
            for name, entry in _headers(file).items():
                if name in self.entries:
                    raise CheckpointError(f"{file} and {self.entries[name].file} both hold '{name}'. Keep one of them.")
                self.entries[name] = entry

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor, counted as if it were flat: 1-D, on the cpu, in its dtype."""
        entry = self.entries[name]
        from safetensors import safe_open  # not with the package: few need it

        if entry.file not in self._opened:
            self._opened[entry.file] = safe_open(entry.file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        opened = self._opened[entry.file]
        if not entry.shape:
            scalar: Tensor = opened.get_tensor(name)
            return scalar.reshape(1)[start:stop]
        row = max(1, prod(entry.shape[1:]))
        first = start // row
        rows: Tensor = opened.get_slice(name)[first : -(-stop // row)]
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def close(self) -> None:
        """Close the files."""
        for opened in self._opened.values():
            opened.__exit__(None, None, None)
        self._opened.clear()


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        if (path / INDEX).is_file():
            return _indexed(path / INDEX)
        if (path / SINGLE).is_file():
            return [path / SINGLE]
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{path} holds no .safetensors weights, the only format that is read.")
        return found
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder.")
    return _indexed(path) if path.name.endswith(".json") else [path]


def _indexed(index: Path) -> Sequence[Path]:
    """The files that an index names, each beside it and holding what it says."""
    try:
        if index.stat().st_size > _MOST_INDEX_BYTES:
            raise ValueError(f"more than {_MOST_INDEX_BYTES:,} bytes")
        names = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index: its 'weight_map' cannot be read ({one_line(error)}).") from error
    files = []
    for file in dict.fromkeys(names.values()):
        if Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{index}: 'weight_map' names the file {file!r}, which does not lie beside it.")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index}: 'weight_map' names the file {file!r}, which is missing.")
        files.append(index.parent / file)
    missing = sorted(names.keys() - {name for file in files for name in _headers(file)})
    if missing:
        raise CheckpointError(f"{index}: 'weight_map' names {missing[0]!r}, which no file holds.")
    return files


def _headers(file: Path) -> dict[str, Entry]:
    from safetensors import safe_open

    entries = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                found = opened.get_slice(name)
                dtype = DTYPES.get(found.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{file}: '{name}' is {found.get_dtype()}, which is not read.")
                entries[name] = Entry(file, tuple(found.get_shape()), dtype)
    except CheckpointError:
        raise
    except Exception as error:  # somebody else's file: whatever it makes of the reader
        raise CheckpointError(f"{file} is no safetensors file: {one_line(error)}.", file=str(file)) from error
    return entries
