"""Export of a checkpoint as a folder of a pretrained model, also of parameters that the checkpoint leaves out."""

import contextlib
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.beside import PARTS
from penstock.checkpoint.folder import FolderLock, check_free, make_folder, sync_folder, write_file
from penstock.checkpoint.format import dtype_name
from penstock.checkpoint.pretrained import FileSet, Merge, codes_of, decoded, file_sets, merged, scales_of
from penstock.checkpoint.reader import Checkpoint
from penstock.checkpoint.tables import ParameterPiece
from penstock.checkpoint.tensorfiles import DTYPES, TensorFile, TensorSpec, WeightFiles, divide, failed, index_of
from penstock.checkpoint.tiles import Tile, TileReader
from penstock.config import MASTER, PARAM, Precision, average_kind
from penstock.errors import CheckpointError, ConfigError
from penstock.rules.formats import COMPUTE_DTYPES, as_param, read_master
from penstock.runtime.control_group import control_group_of_all
from penstock.runtime.modes import engine_entry

# ----------------------------------------------------------------------------------------------------------------------
# Values that a checkpoint leaves out: a frozen base, in the folder that it first came from.
# ----------------------------------------------------------------------------------------------------------------------


_BLOCK_NUMEL = 1 << 24


class LeftOut:
    """Parameters that were left out of a checkpoint, read from a folder in their place.

    Arguments:
        checkpoint: the checkpoint.
        sets: the parts of it that are exported.
        folder: the argument of `WeightFiles`; `None` if none was named.

    Raises:
        CheckpointError: a parameter that is needed was left out, and the folder does not have it.
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
        """Return True if a parameter of the checkpoint was left out."""
        return name in self._saved and bool(self._saved[name].left_out)

    def read(self, name: str, merge: Merge | None, held: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Read a parameter in parts, merged if it has to be: the values that training computed with.

        Arguments:
            name: the parameter's, in the checkpoint.
            merge: the parameters that it is made of; `None` if it is written as it is.
            held: the values that the merge needs, as in `merged`.
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
        """Refuse a folder that lacks a parameter, or has it in another shape."""
        assert self._files is not None
        held = self._files.forms()
        for name, out in self._names.items():
            shape = self._saved[name].shape
            if out not in held or held[out][0] != shape:
                there = f"has '{out}' in shape {held[out][0]}, not {shape}" if out in held else f"lacks '{out}'"
                raise CheckpointError(f"{folder} {there}: it is not what {self._checkpoint.folder} was trained on.")


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints to files that other libraries load: weights alone, in safetensors, streamed.
#
# 1. Ranks read the marker and the tables and plan the files; every defect of the input is found here.
# 2. The first rank makes a hidden folder beside the requested one.
# 3. Each rank writes files of its own: it reads the tiles that hold a part of them, and writes each piece to its place.
# 4. Once all files are on the disk, the first rank adds index and configuration, and the folder takes its name.
# ----------------------------------------------------------------------------------------------------------------------


MOST_SHARD_BYTES = 5 * 10**9
TIMEOUT_S = 1800.0  # for the slowest rank's files
#: Marks a hidden folder of an export.
_MARK = ".penstock-export"


class ExportSource(NamedTuple):
    """Source of an exported tensor: a parameter, or one of the tensors beside the tiles."""

    spec: TensorSpec
    name: str
    tensor: Tensor | None


#: Content of each file of tensors, by its path inside the export.
Files = Mapping[str, Sequence[ExportSource]]


@engine_entry
def export(
    checkpoint: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: Precision = "bf16",
    adapters_only: bool = True,
    max_shard_bytes: int = MOST_SHARD_BYTES,
    average: bool | str = False,
    merge_adapters: bool = False,
    base: str | PathLike[str] | None = None,
) -> None:
    """Write a checkpoint's weights so that `from_pretrained(out)` of transformers or peft reads them. Collective.

    Safetensors files, `config.json` and `generation_config.json`. Tied weights are there once, buffers of the model's
    state too. Tiles stream through a few buffers: no tensor is in memory as a whole, and no model or device is needed.
    The folder appears whole or not at all. Ranks of the default process group, where there is one, divide the files.

    Arguments:
        checkpoint: what `Optimizer.load` takes.
        out: the folder to write; it must not exist, or be empty. On a file system that all ranks share.
        dtype: the dtype of the floating-point parameters. In the dtype of training they are bit for bit what the model
            computed with, in `"fp32"` they are the master weights. Other dtypes stay, and buffers keep theirs.
        adapters_only: write of a model with LoRA adapters (peft) the adapters alone, for `PeftModel.from_pretrained`.
            `False` writes the model that they adapt, as it is without them, and them into its subfolder `adapter`.
            Says nothing of other models.
        max_shard_bytes: the most bytes of a file of tensors; a larger tensor has one of its own.
        average: write the average (`penstock.EMA`) of the parameters that were trained: `True`, or its name.
        merge_adapters: write the model with its LoRA adapters merged into it, W + alpha / r B A in fp32 rounded once to
            `dtype`, and them into its subfolder `adapter`. Codes of a base in int8 become numbers. The adapters are in
            memory as a whole. `adapters_only` has no effect then.
        base: the folder that a frozen base came from, of a checkpoint that leaves it out (`save(frozen=False)`).

    Raises:
        ConfigError: `out` has something in it, or an argument is not as above.
        CheckpointError: the checkpoint is damaged; a value is too large for `"fp16"`; something could not be written.
            There is no `out` then. It has no such average.

    Example:
        >>> penstock.export("checkpoints/latest", "my-model", dtype="bf16")  # doctest: +SKIP
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"export(dtype={dtype!r}): use one of {', '.join(map(repr, COMPUTE_DTYPES))}.")
    if max_shard_bytes < 1:
        raise ConfigError(f"export(max_shard_bytes={max_shard_bytes!r}): use a whole number of bytes, 1 or more.")
    control_group = control_group_of_all(timeout_s=TIMEOUT_S, error=CheckpointError)
    folder = Path(os.path.realpath(out))
    with contextlib.closing(control_group), contextlib.ExitStack() as undo:
        with control_group.together("export()"):
            opened = Checkpoint.open(checkpoint)
            opened.check_whole()
            kind = None if average is False else _kind_of(opened, "" if average is True else average)
            sets = file_sets(opened, COMPUTE_DTYPES[dtype], adapters_only=adapters_only, merge_adapters=merge_adapters)
            left_out = undo.enter_context(contextlib.closing(LeftOut(opened, sets, base)))
            files = [_files(opened, file_set, COMPUTE_DTYPES[dtype], max_shard_bytes) for file_set in sets]
            if control_group.is_first:
                undo.enter_context(_hidden(folder, [file_set.folder for file_set in sets]))
        # Only now is the hidden folder there, for every rank.
        with control_group.together("export()"):
            everything = [file for of_set in files for file in of_set.items()]
            merges = {name: merge for file_set in sets for name, merge in file_set.merges.items()}
            own = dict(everything[control_group.rank :: control_group.size])
            _write(opened, _hidden_name(folder), own, kind, merges, left_out)
        # Only now is every file on the disk: an export that had its name earlier could lack some after a power failure.
        with control_group.together("export()"):
            if control_group.is_first:
                for file_set, of_set in zip(sets, files, strict=True):
                    _finish(_hidden_name(folder), file_set, of_set)
                _appear(folder)


# Tensors and files


def _files(checkpoint: Checkpoint, file_set: FileSet, dtype: torch.dtype, most_bytes: int) -> Files:
    """Divide the tensors of a set among files, named as `save_pretrained` names them."""
    sources = {source.spec.name: source for source in _sources(checkpoint, file_set, dtype)}
    specs = [source.spec for source in sources.values()]
    most_bytes = sum(spec.nbytes for spec in specs) if file_set.one_file else most_bytes
    divided = divide(specs, file_set.stem, most_bytes)
    return {
        os.path.join(file_set.folder, name): [sources[s.name] for s in of_file] for name, of_file in divided.items()
    }


def _sources(checkpoint: Checkpoint, file_set: FileSet, dtype: torch.dtype) -> Iterator[ExportSource]:
    """Find the source of each tensor of a set."""
    for name, out in file_set.names.items():
        saved = checkpoint.manifest.parameters.get(name)
        if saved is not None:
            converts = saved.dtype in COMPUTE_DTYPES.values() or name in file_set.merges
            yield ExportSource(TensorSpec(out, saved.shape, dtype if converts else saved.dtype), name, None)
            continue
        key = checkpoint.manifest.buffers[name]
        tensor = checkpoint.tensors.get(key)
        if tensor is None:
            raise checkpoint.fail(f"buffers.{name}", "is missing.")
        if key.startswith(PARTS):
            raise checkpoint.fail(f"buffers.{name}", "is of a complex dtype that no safetensors file has.")
        if tensor.dtype not in DTYPES.values():
            raise checkpoint.fail(f"buffers.{name}", f"is {dtype_name(tensor.dtype)}, which no export has.")
        yield ExportSource(TensorSpec(out, tuple(tensor.shape), tensor.dtype), name, tensor)


def _kind_of(checkpoint: Checkpoint, name: str) -> str:
    """Find the kind of an average by its name; refuse a name that the checkpoint does not have."""
    kind = average_kind(name)
    if kind not in checkpoint.averages:
        known = ", ".join(map(repr, sorted(checkpoint.averages))) or "none"
        raise checkpoint.fail("averages", f"has no '{kind}': {known} there. Export without average=.")
    return kind


# Writing


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    files: Files,
    average: str | None,
    merges: Mapping[str, Merge],
    left_out: LeftOut,
) -> None:
    """Write files of tensors, in the order of the checkpoint's tiles; the average of parameters that have it."""
    with contextlib.ExitStack() as closing:
        opened = []
        places: dict[str, tuple[TensorFile, TensorSpec]] = {}
        for path, sources in files.items():
            file = TensorFile(folder / path, [source.spec for source in sources])
            closing.callback(file.close)
            opened.append(file)
            for source in sources:
                places[source.name] = file, source.spec
                if source.tensor is not None:
                    file.write(source.spec.name, 0, source.tensor.contiguous())
        merges = {name: merge for name, merge in merges.items() if name in places}
        needed = {name for merge in merges.values() for name in merge.needs if not left_out.has(name)}
        held = _held(checkpoint, needed, average)
        for name in filter(left_out.has, places):
            file, spec = places[name]
            for start, values in left_out.read(name, merges.get(name), held):
                file.write(spec.name, start, _converted(checkpoint, name, values, spec.dtype).contiguous())
        for tile, piece in _pieces(checkpoint, places, average):
            file, spec = places[piece.name]
            merge = merges.get(piece.name)
            values = _values(tile, piece, average, spec.dtype if merge is None else None)
            if merge is not None:
                values = merged(values, piece.start, merge, held)
            file.write(spec.name, piece.start, _converted(checkpoint, piece.name, values, spec.dtype))
        for file in opened:
            file.sync()  # before the other ranks hear that this one has written


def _pieces(
    checkpoint: Checkpoint, names: Container[str], average: str | None
) -> Iterator[tuple[Tile, ParameterPiece]]:
    """Read the tiles that hold a part of these parameters, and yield each piece."""
    keys = [key for key in checkpoint.tiles() if any(p.name in names for p in key.unit.pieces(key.number))]
    with TileReader() as reader:
        for tile in reader.read(keys, storages=(PARAM, MASTER, average or PARAM)):
            for piece in tile.key.unit.pieces(tile.key.number):
                if piece.name in names:
                    yield tile, piece


def _held(checkpoint: Checkpoint, names: Set[str], average: str | None) -> dict[str, Tensor]:
    """Read parameters as a whole, at master precision in fp32: adapters, and scales of codes."""
    held = {name: torch.empty(checkpoint.manifest.parameters[name].shape, dtype=torch.float32) for name in names}
    for tile, piece in _pieces(checkpoint, held, average):
        held[piece.name].view(-1)[piece.start : piece.stop] = _values(tile, piece, average)
    return held


def _values(tile: Tile, piece: ParameterPiece, average: str | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a piece: the average, or as trained if that is in `dtype`, else at full precision.

    Full precision is the master, or the frozen parameter; codes are returned as they are.
    """
    inside = slice(piece.inside, piece.inside + piece.stop - piece.start)
    param, master = tile.values(PARAM), tile.values(MASTER)
    averaged = None if average is None else tile.values(average)
    if averaged is not None:
        return averaged[inside]
    if param is not None and param.dtype == dtype:
        return param[inside]
    if param is None or (master is not None and master.dtype == torch.float32):
        assert master is not None  # `check_whole` has seen to it
        return master[inside]
    return read_master(param[inside], None if master is None else master[inside])


def _converted(checkpoint: Checkpoint, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the dtype of a file; refuse values that would become infinite."""
    converted = as_param(value, dtype)
    if dtype == torch.float16 and bool((converted.isinf() & value.isfinite()).any()):
        raise checkpoint.fail(
            f"parameters.{name}", "has values that are too large for fp16. Export as 'bf16' or 'fp32'."
        )
    return converted


def _finish(folder: Path, file_set: FileSet, files: Files) -> None:
    """Write the small files, after the tensors, and sync the folder."""
    inside = folder / file_set.folder
    if len(files) > 1:
        index = index_of({Path(path).name: [source.spec for source in sources] for path, sources in files.items()})
        write_file(inside / f"{file_set.stem}.safetensors.index.json", _text(index))
    for name, text in file_set.beside.items():
        write_file(inside / name, _text(text))
    sync_folder(inside)


def _text(text: str) -> bytes:
    return (text.rstrip("\n") + "\n").encode()


# The folder


def _hidden_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.export")


@contextlib.contextmanager
def _hidden(folder: Path, inside: Sequence[str]) -> Iterator[None]:
    """Make a hidden, empty folder beside `folder`, with some inside of it. It is removed if the export fails.

    It is locked: a folder with the mark and without a lock was left by an export that was killed. A link, and a folder
    with other content, are refused and stay as they are.
    """
    check_free(folder, "Export to")
    make_folder(folder.parent)
    hidden = _hidden_name(folder)
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as undo:
        try:
            if hidden.is_symlink():
                raise _not_ours(hidden)
            hidden.mkdir(exist_ok=True)
            if not closing.enter_context(FolderLock(hidden)).take_alone():
                raise CheckpointError(f"Another export to {folder} is running. Wait for it.", file=str(folder))
            if any(hidden.iterdir()) and not (hidden / _MARK).is_file():
                raise _not_ours(hidden)
            undo.callback(_remove, hidden)
            _empty(hidden)
            (hidden / _MARK).touch()
            for name in inside:
                (hidden / name).mkdir(exist_ok=True)
        except OSError as error:
            raise failed(hidden, error) from error
        yield
        undo.pop_all()


def _not_ours(hidden: Path) -> CheckpointError:
    return CheckpointError(
        f"{hidden} is there, and no export has left it. Move it away, or export elsewhere.", file=str(hidden)
    )


def _empty(hidden: Path) -> None:
    """Empty a folder of an export; the mark last, so that the folder is recognized after a kill."""
    for left in sorted(hidden.iterdir(), key=lambda each: each.name == _MARK):
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _remove(hidden: Path) -> None:
    with contextlib.suppress(OSError):
        _empty(hidden)
        hidden.rmdir()


def _appear(folder: Path) -> None:
    """Rename the hidden folder; an empty folder of that name is replaced."""
    try:
        os.rename(_hidden_name(folder), folder)  # atomic: no reader sees a part of an export
        (folder / _MARK).unlink()
        sync_folder(folder)
        sync_folder(folder.parent)  # else a power failure can undo the rename
    except OSError as error:
        raise failed(folder, error) from error
