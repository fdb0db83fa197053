"""Checkpoints of Lightning as folders: Penstock's own, and in their `extra` what Lightning keeps beside weights.

    epoch=0-step=4.ckpt/         one optimizer: a checkpoint of Penstock
    epoch=0-step=4.ckpt/part-0   several: one for each part of the module, the first is written last

Nothing is pickled: what Lightning keeps is JSON-like values and tensors. Files that other strategies wrote are read, by
the unpickler that makes tensors and plain values only.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations.engine_internals import MARKER, Checkpoint, WeightFiles, remove
from penstock.integrations.lightning.parts import names_of
from penstock.integrations.lightning.prepared import Prepared

KEPT, TOKEN, NAMES, TIED = "lightning", "token", "parts", "tied"
_WEIGHTS = ("state_dict", "optimizer_states", "hparams_type")  # in the tiles; the last is a class of omegaconf's


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint that `save` has written."""
    return any((folder / MARKER).is_file() for folder in (path, path / "part-0"))


def save(path: Path, prepared: Prepared, kept: Mapping[str, Any], *, is_first_rank: bool) -> None:
    """Save what was prepared, and what Lightning keeps beside it. Collective.

    Arguments:
        path: the folder; a file of this name is replaced.
        prepared: a module that optimizers train.
        kept: what else is kept, of the first rank; weights and optimizer states in it are left out.
        is_first_rank: whether this rank is the first.

    Raises:
        ConfigError: something in `kept` is no JSON-like value or tensor; it is named. Nothing was written.
        CheckpointError: something could not be written.
    """
    if is_first_rank and path.is_file():
        path.unlink()
    token = secrets.token_hex(8)
    names = [part.name for part in prepared.parts]
    beside = {key: value for key, value in kept.items() if key not in _WEIGHTS}
    first = {KEPT: beside, NAMES: names, TIED: _tied(prepared.module)}
    for number in reversed(range(len(names))):  # the first last: with it the checkpoint counts
        extra = {TOKEN: token, **(first if number == 0 else {})}
        prepared.handles[number].save(_folder(path, number, len(names)), extra=extra)


def load(path: Path, prepared: Prepared) -> dict[str, Any]:
    """Go on from what `save` wrote. Collective.

    Returns:
        What Lightning kept.

    Raises:
        CheckpointError: it is damaged, of another model, of other parts, or its parts are of several saves.
    """
    names = [part.name for part in prepared.parts]
    saved = _names_in(path)
    if saved != names:
        raise CheckpointError(
            f"{path} has the parts {saved}, and {type(prepared.module).__name__} was prepared as {names}. Make one "
            "file of its weights with penstock.integrations.lightning.consolidate() and load that.",
            file=str(path),
        )
    extras = [handle.load(_folder(path, number, len(names))) for number, handle in enumerate(prepared.handles)]
    if len({extra.get(TOKEN) for extra in extras}) > 1:
        raise CheckpointError(f"The parts of {path} are of several saves. Load another checkpoint.", file=str(path))
    kept: dict[str, Any] = extras[0][KEPT]
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


def take_away(path: Path, io: Any) -> None:
    """Remove a checkpoint: of a folder what a save has written, and the folder where it is empty then."""
    if path.is_symlink() or not path.is_dir():
        io.remove_checkpoint(path)
        return
    folders = sorted(path.glob("part-*"), reverse=True)
    for folder in folders or [path]:
        remove(folder)
    if folders and not any(path.iterdir()):
        path.rmdir()


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
    names = _names_in(path)
    opened = Checkpoint.read(_folder(path, 0, len(names)))
    extra = opened.value("extra", opened.manifest.extra)
    state: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".weights-") as scratch:
            penstock.export(_folder(path, number, len(names)), scratch, dtype="fp32", adapters_only=False)
            state |= _read_weights(scratch, f"{name}." if name else "")
    for alias, name in extra[TIED].items():
        state[alias] = state[name]
    TorchCheckpointIO().save_checkpoint({**extra[KEPT], "state_dict": state}, target)


def _read_weights(folder: str, prefix: str) -> dict[str, Tensor]:
    """Read the tensors of an export as a whole, with a prefix to their names."""
    files = WeightFiles(folder)
    try:
        return {
            prefix + name: files.read(name, 0, prod(entry.shape)).reshape(entry.shape).clone()
            for name, entry in files.entries.items()
        }
    finally:
        files.close()


def _folder(path: Path, number: int, count: int) -> Path:
    """Name the folder of a part."""
    return path if count == 1 else path / f"part-{number}"


def _names_in(path: Path) -> list[str]:
    """Read which parts a checkpoint has.

    Raises:
        CheckpointError: it is none, or no Trainer wrote it.
    """
    first = path if (path / MARKER).is_file() else path / "part-0"
    opened = Checkpoint.read(first)
    extra = opened.value("extra", opened.manifest.extra)
    if not isinstance(extra, dict) or KEPT not in extra:
        raise CheckpointError(
            f"{path} was not saved by a Trainer: Lightning's part is missing. Load it with optimizer.load().",
            file=str(path),
        )
    names: list[str] = extra[NAMES]
    return names


def _tied(module: nn.Module) -> dict[str, str]:
    """List the further names of tensors that have several, each with the first."""
    first: dict[Tensor, str] = {}
    return {name: first[tensor] for name, tensor in names_of(module).items() if first.setdefault(tensor, name) != name}
