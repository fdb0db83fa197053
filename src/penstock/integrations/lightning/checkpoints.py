"""Checkpoints of a Trainer on Penstock: folders, with Lightning's values in their `extra`; and files of weights.

Nothing is pickled: Lightning's values are JSON-like values and tensors. Files that other strategies wrote are read by
torch's unpickler for tensors and plain values.
"""

import os
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations.engine_internals import MARKER, Checkpoint, remove
from penstock.integrations.weights import state_entries

KEPT, TIED = "lightning", "tied"
_WEIGHTS = ("state_dict", "optimizer_states", "hparams_type")  # in the tiles; the last is a class of omegaconf's


def is_folder(path: Path) -> bool:
    """Return True if a path is a checkpoint that `save` has written."""
    return (path / MARKER).is_file()


def save(
    path: Path, module: nn.Module, optimizer: penstock.Optimizer, kept: Mapping[str, Any], *, is_first_rank: bool
) -> None:
    """Save a module's training state, and Lightning's values beside it. Collective.

    Arguments:
        path: the folder; a file of this name is replaced.
        module: the module that was prepared.
        optimizer: the result of `penstock.prepare`.
        kept: the values, of the first rank; weights and optimizer states in it are left out.
        is_first_rank: whether this rank is the first.

    Raises:
        ConfigError: something in `kept` is no JSON-like value or tensor; it is named. Nothing was written.
        CheckpointError: something could not be written.
    """
    if is_first_rank and path.is_file():
        path.unlink()
    beside = {key: value for key, value in kept.items() if key not in _WEIGHTS}
    optimizer.save(path, extra={KEPT: beside, TIED: _tied(module)})


def load(path: Path, optimizer: penstock.Optimizer) -> dict[str, Any]:
    """Load what `save` wrote. Collective.

    Returns:
        Lightning's values.

    Raises:
        CheckpointError: it is damaged, of another model, or no Trainer saved it.
    """
    _extra_of(path)  # before anything is loaded
    kept: dict[str, Any] = optimizer.load(path)[KEPT]
    return kept


def read_file(path: Path, io: Any) -> dict[str, Any]:
    """Read a file of Lightning's, or of weights: tensors and plain values, never code.

    Raises:
        CheckpointError: there is none, or it holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a checkpoint of Penstock.", file=str(path))
    try:
        read: dict[str, Any] = io.load_checkpoint(path, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as tensors and plain values: {' '.join(str(error).split())[:300]} Save its weights "
            "alone (save_weights_only=True), without objects among the hyper-parameters.",
            file=str(path),
        ) from error
    return read


def remove_checkpoint(path: Path, io: Any) -> None:
    """Remove a checkpoint: of a folder the files of a save, and the folder if it is empty then."""
    if path.is_symlink() or not path.is_dir():
        io.remove_checkpoint(path)
    else:
        remove(path)


def consolidate(checkpoint: str | PathLike[str], out: str | PathLike[str]) -> None:
    """Make one file of a checkpoint folder, which `LightningModule.load_from_checkpoint` reads: weights, in fp32.

    On one rank. It needs host memory for all weights; `penstock.export` does not, and writes safetensors.

    Arguments:
        checkpoint: a folder that a Trainer with this strategy saved.
        out: the file to write, such as `"model.ckpt"`.

    Raises:
        ConfigError: `out` is there already.
        CheckpointError: the checkpoint is damaged, or no Trainer saved it.

    Example:
        >>> consolidate("checkpoints/last.ckpt", "model.ckpt")  # doctest: +SKIP
        >>> model = Model.load_from_checkpoint("model.ckpt")  # doctest: +SKIP
    """
    path, target = Path(checkpoint), Path(out)
    if os.path.lexists(target):  # a link that leads nowhere is one that leads somewhere once it is written to
        raise ConfigError(f"{target} is there already. Name a new file.")
    extra = _extra_of(path)
    state: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".weights-") as scratch:
        penstock.export(path, scratch, dtype="fp32", adapters_only=False)
        for file in Path(scratch).glob("*.safetensors"):
            state |= {name: value.clone() for name, value in load_file(file).items()}
    for alias, name in extra[TIED].items():
        state[alias] = state[name]
    TorchCheckpointIO().save_checkpoint({**extra[KEPT], "state_dict": state}, target)


def _extra_of(path: Path) -> dict[str, Any]:
    """Read the values beside a checkpoint's state.

    Raises:
        CheckpointError: it is damaged, or no Trainer wrote it.
    """
    opened = Checkpoint.read(path)
    extra = opened.value("extra", opened.manifest.extra)
    if not isinstance(extra, dict) or KEPT not in extra:
        raise CheckpointError(
            f"{path} was not saved by a Trainer: Lightning's part is missing. Load it with optimizer.load().",
            file=str(path),
        )
    return extra


def _tied(module: nn.Module) -> dict[str, str]:
    """List the further names of tensors that have several, each with the first."""
    first: dict[Tensor, str] = {}
    tensors = {name: entry for name, entry in state_entries(module).items() if isinstance(entry, Tensor)}
    return {name: first[tensor] for name, tensor in tensors.items() if first.setdefault(tensor, name) != name}
