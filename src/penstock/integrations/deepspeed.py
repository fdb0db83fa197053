"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3, as they lie on the disk, made into ones of Penstock.

Stages 1 and 2 lay the parameters of a param group out one after the other and cut that into a partition for each rank:

    rank 0 | a a a a b b | rank 1 | b b c c c . |         . padding

Stage 3 cuts each parameter, and lays out what a rank has of each, in groups of parameters:

    rank 0 | a a b b c c | rank 1 | a a b b c . |

Its files are pickles. They are read by torch's unpickler of tensors and plain values; the few classes of DeepSpeed in
them become plain values or are ignored, and nothing else is read. Files are mapped, so a tensor is in memory only while
it is copied.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.fields import Field
from penstock.checkpoint.importing import Incoming, Read, write_checkpoint
from penstock.errors import CheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OPTIONS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "maximize",
)
_COUNTS = ("global_steps", "global_samples", "skipped_steps")


class _Ignored:
    """Stands for an object of a class whose values nobody needs."""


#: What the pickles name, and what is made of it.
_STAND_INS = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
)


class Span(NamedTuple):
    """Elements of a parameter, `start` to `stop`, that one rank's flat tensor has from its element `inside` on."""

    start: int
    stop: int
    rank: int
    inside: int


@dataclass(frozen=True)
class Flat:
    """A flat group: its tensors on each rank, all of the same layout.

    Attributes:
        master: fp32, by rank.
        states: of the optimizer, by name and rank.
        step: how often it was updated.
    """

    master: Sequence[Tensor]
    states: Mapping[str, Sequence[Tensor]]
    step: int


def import_checkpoint(folder: str | PathLike[str], out: str | PathLike[str]) -> None:
    """Make a checkpoint that `Optimizer.load` reads of one that DeepSpeed's ZeRO has saved.

    Master weights, states of the optimizer, step counts, options of param groups, frozen parameters and buffers. Load
    it at any world size, stage and placement, into the same model with param groups of the same trained parameters.
    The loss scale is not taken over. `extra` holds DeepSpeed's counts of steps and samples, and its scheduler's state.

    Arguments:
        folder: what `save_checkpoint` was given, or one tag's folder inside it.
        out: the checkpoint's folder; it must not exist, or be empty.

    Raises:
        ConfigError: `out` has something in it.
        CheckpointError: a file is missing, holds other objects than tensors and plain values, or is not laid out as
            ZeRO does; tensor or pipeline parallelism.

    Example:
        >>> import_checkpoint("ds_checkpoints", "checkpoints/from-deepspeed")  # doctest: +SKIP
    """
    saved = _Saved(_tag_folder(Path(folder)))
    write_checkpoint(
        Path(out),
        [*saved.trained(), *saved.frozen()],
        rule="DeepSpeed's optimizer",
        groups=saved.groups(),
        buffers=saved.buffers(),
        extra=saved.extra(),
    )


class _Saved:
    """One tag's folder.

    Raises:
        CheckpointError: as `import_checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        self._optimizers = [_load(file)["optimizer_state_dict"] for file in _optimizer_files(folder)]
        self._stage = self._optimizers[0]["zero_stage"].integer(least=1, most=3)
        self._check_ranks()
        self._models = [_load(file) for file in _model_files(folder, self._stage, len(self._optimizers))]
        self._base = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        self._shapes = [
            [(name, _shape(shape)) for name, shape in group.entries()]
            for group in self._models[0]["param_shapes"].items()
        ]
        self._flats = self._read_flats()

    def _check_ranks(self) -> None:
        field = self._optimizers[0]["partition_count"]
        counts = field.items() if isinstance(field.value, list) else [field]  # one for each param group
        if any(count.integer() != len(self._optimizers) for count in counts):
            raise field.fail(f"is {field.value}, and there are optimizer files of {len(self._optimizers)} ranks")

    def trained(self) -> Iterator[Incoming]:
        """The parameters that the optimizer has."""
        for number, (shapes, flat) in enumerate(zip(self._shapes, self._flats, strict=True)):
            if self._stage == 3:
                places = _partitioned(shapes, flat)
            else:
                places = _concatenated(shapes, flat, self._paddings(number))
            for (name, shape), spans in zip(shapes, places, strict=True):
                states = {state: _reader(tensors, spans) for state, tensors in flat.states.items()}
                yield Incoming(name, shape, torch.float32, flat.step, _reader(flat.master, spans), states)

    def frozen(self) -> Iterator[Incoming]:
        """The parameters that it has not: whole in the model file, or a fragment in that of each rank."""
        model = self._models[0]
        if self._stage < 3:
            others = {name for shapes in self._shapes for name, _ in shapes} | self.buffers().keys()
            others |= _mapping(model["shared_params"]).keys()
            whole = [(name, field) for name, field in model["module"].entries() if name not in others]
            sources = [(name, tuple(_tensor(field).shape), [_tensor(field).flatten()]) for name, field in whole]
        elif _mapping(model).get("frozen_param_shapes"):
            sources = [
                (name, _shape(field), [_tensor(of_rank["frozen_param_fragments"][name]) for of_rank in self._models])
                for name, field in model["frozen_param_shapes"].entries()
            ]
        else:
            sources = []
        for name, shape, fragments in sources:
            sizes = [(rank, fragment.numel()) for rank, fragment in enumerate(fragments)]
            if sum(numel for _, numel in sizes) < prod(shape):
                raise model.fail(f"has too little of the frozen '{name}'")
            yield Incoming(name, shape, fragments[0].dtype, 0, _reader(fragments, _chained(sizes, 0, prod(shape))), {})

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """The names of each param group's parameters, and its options."""
        groups = []
        for group in self._optimizers[0][self._base]["param_groups"].items():
            numbers = [item.integer(most=len(self._shapes) - 1) for item in group["params"].items()]
            names = [name for number in numbers for name, _ in self._shapes[number]]
            options = _mapping(group)
            if options.get("bias_correction") is False:
                raise group.fail("has bias_correction=False, with which Penstock does not train")
            groups.append((names, {key: value for key, value in options.items() if key in _OPTIONS}))
        return groups

    def buffers(self) -> dict[str, Tensor]:
        """Of the model's state."""
        model = self._models[0]
        return {item.string(): _tensor(model["module"][item.string()]) for item in model["buffer_names"].items()}

    def extra(self) -> dict[str, Any]:
        """DeepSpeed's counts, and the state of its scheduler."""
        model = _mapping(self._models[0])
        return {key: model[key] for key in (*_COUNTS, "lr_scheduler") if model.get(key) is not None}

    def _read_flats(self) -> list[Flat]:
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        masters = [[_tensor(item) for item in optimizer[key].items()] for optimizer in self._optimizers]
        count = len(self._shapes)
        if any(len(of_rank) != count for of_rank in masters):
            raise self._optimizers[0][key].fail(f"has not the {count} groups that the model file names")
        return [self._read_flat(number, [of_rank[number] for of_rank in masters]) for number in range(count)]

    def _read_flat(self, number: int, master: list[Tensor]) -> Flat:
        states: dict[str, list[Tensor]] = {}
        step = 0
        for rank, optimizer in enumerate(self._optimizers):
            field = optimizer[self._base]["state"]
            of_rank = _mapping(field).get(number)
            if not isinstance(of_rank, Mapping):
                raise field.fail(f"has nothing of group {number}")
            step = int(of_rank.get("step", self._step_of_group(optimizer, number)))
            for name, value in of_rank.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    if value.numel() < master[rank].numel():
                        raise field.fail(f"has {value.numel():,} elements of '{name}' for {master[rank].numel():,}")
                    states.setdefault(name, []).append(value)
        if not states or any(len(tensors) != len(master) for tensors in states.values()):
            raise self._optimizers[0][self._base].fail(f"has no state of group {number} on some ranks")
        return Flat(master, states, step)

    def _step_of_group(self, optimizer: Field, number: int) -> int:
        """Where DeepSpeed's own Adam keeps it."""
        for group in optimizer[self._base]["param_groups"].items():
            if number in [item.integer() for item in group["params"].items()]:
                return int(_mapping(group).get("step", 0))
        raise optimizer[self._base]["param_groups"].fail(f"has no group {number}")

    def _paddings(self, number: int) -> list[int]:
        """Elements that stage 1 and 2 leave free after each parameter."""
        count = len(self._shapes[number])
        if _mapping(self._optimizers[0]).get("param_alignment_paddings") is None:
            return [0] * count
        return [item.integer() for item in self._optimizers[0]["param_alignment_paddings"].items()[number].items(count)]


# Where things are


def _concatenated(
    shapes: Sequence[tuple[str, tuple[int, ...]]], flat: Flat, paddings: Sequence[int]
) -> Iterator[list[Span]]:
    """The places of parameters that lie one after the other in all ranks' tensors together."""
    partitions = [(rank, tensor.numel()) for rank, tensor in enumerate(flat.master)]
    offset = 0
    for (name, shape), padding in zip(shapes, paddings, strict=True):
        spans = _chained(partitions, offset, offset + prod(shape))
        if sum(span.stop - span.start for span in spans) != prod(shape):
            raise CheckpointError(
                f"The optimizer files end within '{name}': they are not of the model file.", field=name
            )
        yield spans
        offset += prod(shape) + padding
    left = sum(numel for _, numel in partitions) - offset
    if left >= 2 * len(partitions):  # DeepSpeed pads to a multiple of it
        raise CheckpointError(
            f"The optimizer files have {left:,} elements more than the model file.", field="param_shapes"
        )


def _partitioned(shapes: Sequence[tuple[str, tuple[int, ...]]], flat: Flat) -> Iterator[list[Span]]:
    """The places of parameters that are cut into as many parts as there are ranks, the last one shorter."""
    ranks = len(flat.master)
    inside = 0
    for _, shape in shapes:
        numel = prod(shape)
        part = -(-numel // ranks)
        yield [
            Span(rank * part, min((rank + 1) * part, numel), rank, inside)
            for rank in range(ranks)
            if rank * part < numel
        ]
        inside += part
    if any(tensor.numel() != inside for tensor in flat.master):
        raise CheckpointError(
            "The optimizer files are not of the model file: their sizes differ.", field="param_shapes"
        )


def _chained(partitions: Sequence[tuple[int, int]], first: int, last: int) -> list[Span]:
    """Where elements `first` to `last` are in tensors that follow each other, given by rank and elements."""
    spans, begin = [], 0
    for rank, numel in partitions:
        start, stop = max(first, begin), min(last, begin + numel)
        if start < stop:
            spans.append(Span(start - first, stop - first, rank, start - begin))
        begin += numel
    return spans


def _reader(tensors: Sequence[Tensor], spans: Sequence[Span]) -> Read:
    def read(start: int, stop: int) -> Tensor:
        parts = [
            tensors[span.rank][span.inside + max(start, span.start) - span.start :][
                : min(stop, span.stop) - max(start, span.start)
            ]
            for span in spans
            if max(start, span.start) < min(stop, span.stop)
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    return read


# Files


def _tag_folder(folder: Path) -> Path:
    """The folder itself, or that of the tag in its file `latest`."""
    if any(_OPTIMIZER_FILE.fullmatch(file.name) for file in folder.glob("*.pt")):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        tag = latest.read_text().strip()
        if Path(tag).name == tag and (folder / tag).is_dir():
            return folder / tag
    raise CheckpointError(
        f"{folder} is no checkpoint of DeepSpeed's ZeRO: it has neither *_optim_states.pt nor a 'latest' that names a "
        "folder of it.",
        file=str(folder),
    )


def _optimizer_files(folder: Path) -> list[Path]:
    """By rank."""
    files: dict[int, Path] = {}
    for file in folder.iterdir():
        match = _OPTIMIZER_FILE.fullmatch(file.name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(f"{file}: tensor parallelism is not read.", file=str(file))
        files[int(match[1])] = file
    missing = [rank for rank in range(max(files, default=0) + 1) if rank not in files]
    if missing:
        raise CheckpointError(f"{folder} lacks the optimizer's states of rank {missing[0]}.", file=str(folder))
    return [files[rank] for rank in sorted(files)]


def _model_files(folder: Path, stage: int, ranks: int) -> list[Path]:
    """One where ranks have the same parameters, else one for each."""
    names = ["mp_rank_00_model_states.pt"]
    if stage == 3:
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing.", file=str(folder / name))
    return [folder / name for name in names]


def _load(file: Path) -> Field:
    """A file's tensors and plain values."""
    try:
        with torch.serialization.safe_globals(list(_STAND_INS)):
            value = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # somebody else's file: whatever it makes of the reader
        # What torch met; its own message around that is advice which does not hold here.
        reason = str(error.__context__ or error).partition(" Please")[0].partition("\n")[0]
        raise CheckpointError(
            f"{file} is not read: {reason.rstrip('. ')}. Of pickles, only tensors and plain values are.",
            file=str(file),
        ) from error
    return Field(file, "", value)


def _tensor(field: Field) -> Tensor:
    if not isinstance(field.value, Tensor):
        raise field.fail("is not a tensor")
    return field.value


def _shape(field: Field) -> tuple[int, ...]:
    if not isinstance(field.value, tuple):
        raise field.fail("is not a shape")
    return tuple(int(extent) for extent in field.value)


def _mapping(field: Field) -> Mapping[Any, Any]:
    if not isinstance(field.value, Mapping):
        raise field.fail("is not a dict")
    return field.value
