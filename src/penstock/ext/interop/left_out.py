"""The values of what a checkpoint leaves out: a frozen base, in the folder that it first came from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from os import PathLike

import torch
from torch import Tensor

from penstock.checkpoint.adapters import Merge, merged
from penstock.checkpoint.codes import codes_of, decoded, scales_of
from penstock.checkpoint.opened import Checkpoint
from penstock.checkpoint.pretrained import FileSet
from penstock.checkpoint.tensorfiles import WeightFiles
from penstock.errors import CheckpointError, ConfigError
from penstock.rules.master import as_param

_BLOCK_NUMEL = 1 << 24


class LeftOut:
    """Parameters that were left out of a checkpoint, read from a folder in their place.

    Arguments:
        checkpoint: the checkpoint.
        sets: what is exported of it.
        folder: what `WeightFiles` takes; `None` where nobody has named one.

    Raises:
        CheckpointError: something is needed that was left out, and the folder does not have it.
    """

    def __init__(self, checkpoint: Checkpoint, sets: Sequence[FileSet], folder: str | PathLike[str] | None) -> None:
        self._checkpoint = checkpoint
        self._saved = checkpoint.manifest.parameters
        self._names = {name: out for of_set in sets for name, out in of_set.names.items() if self.has(name)}
        for name, merge in [pair for of_set in sets for pair in of_set.merges.items()]:
            if merge.scale is not None and self.has(merge.scale) != self.has(name):
                raise checkpoint.fail(f"parameters.{merge.scale}", "was left out, or its codes were, and not both.")
        self._files = None
        if self._names and folder is None:
            raise checkpoint.fail(
                f"parameters.{next(iter(self._names))}",
                "was left out when this was saved (frozen=False), as all that was frozen. Name the folder that it came "
                "from: base= (--base).",
            )
        if self._names and folder is not None:
            self._files = WeightFiles(folder)
            self._check(str(folder))

    def has(self, name: str) -> bool:
        """Tell whether a parameter of the checkpoint was left out."""
        return name in self._saved and bool(self._saved[name].left_out)

    def read(self, name: str, merge: Merge | None, held: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Read a parameter in parts, merged where it is to be: what training computed with.

        Arguments:
            name: the parameter's, in the checkpoint.
            merge: what it is made of; `None` where it is written as it is.
            held: what that needs, as in `merged`.
        """
        assert self._files is not None
        out, saved = self._names[name], self._saved[name]
        row = max(1, prod(saved.shape[1:]))
        step = max(1, _BLOCK_NUMEL // row) * row
        for start in range(0, prod(saved.shape), step):
            values = self._files.read(out, start, min(start + step, prod(saved.shape)))
            if merge is None or merge.scale is None:
                values = as_param(values, saved.dtype)
            else:
                try:
                    rows = values.view(-1, row)
                    scale = scales_of(rows)
                except ConfigError as error:
                    raise self._checkpoint.fail(f"parameters.{name}", f"{error}.") from error
                values = decoded(codes_of(rows, scale), scale, torch.float32).reshape(-1)
            yield start, values if merge is None else merged(values, start, replace(merge, scale=None), held)

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()

    def _check(self, folder: str) -> None:
        """Refuse a folder that lacks something, or has it in another shape."""
        assert self._files is not None
        held = self._files.forms()
        for name, out in self._names.items():
            shape = self._saved[name].shape
            if out not in held or held[out][0] != shape:
                there = f"has '{out}' in shape {held[out][0]}, not {shape}" if out in held else f"lacks '{out}'"
                raise CheckpointError(f"{folder} {there}: it is not what {self._checkpoint.folder} was trained on.")
