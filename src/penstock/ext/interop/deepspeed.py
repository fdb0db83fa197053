"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3, as they lie on the disk, made into ones of Penstock.

Where a parameter lies in them: `ext.interop.partitions`.

Its files are pickles (`ext.interop.pickled`): the few classes of DeepSpeed in them become plain values or are ignored,
and nothing else is read. No size is believed: tensors lie in the files, and what is written is about as large.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import one_line
from penstock.ext.interop.importing import Incoming, write_checkpoint
from penstock.ext.interop.partitions import Flat, chained, concatenated, partitioned, reader
from penstock.ext.interop.pickled import (
    OPTIONS,
    PickledFile,
    PickleError,
    Stored,
    inert,
    most_bytes,
    named,
    reading,
    refused,
    shape,
)
from penstock.files import Field

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
#: Kinds of a checkpoint that are the weights.
_NO_STATES = frozenset(("param", "master"))
_MOST_TAG_CHARS = 256
_COUNTS = ("global_steps", "global_samples", "skipped_steps")


def _number(value: Any) -> int:
    """Give the number of a member of an enumeration."""
    if type(value) is not int:
        raise PickleError("it has no number where one belongs")
    return value


#: What the pickles name beside tensors, and the stand-in for each.
_NAMES: Mapping[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _number,
    **inert("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
    **inert("deepspeed.utils.tensor_fragment", "fragment_address"),
}


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
    folder = Path(folder)
    with reading(folder):
        saved = _Saved(_tag_folder(folder))
        parameters = [*saved.trained(), *saved.frozen()]
        _check_distinct(folder, parameters)
        write_checkpoint(
            Path(out),
            parameters,
            rule="DeepSpeed's optimizer",
            groups=saved.groups,
            buffers=saved.buffers,
            extra=saved.extra(),
            most_bytes=most_bytes(saved.nbytes),
        )


def _check_distinct(folder: Path, parameters: Sequence[Incoming]) -> None:
    """Refuse parameters of one name: each would be written, and one of them read."""
    for name, count in Counter(parameter.name for parameter in parameters).items():
        if count > 1:
            raise refused(folder, f"{folder} has the parameter '{one_line(name, 200)}' twice.")


class _Saved:
    """One tag's folder.

    What ZeRO has cut lies in the optimizer file of each rank; names, shapes, buffers and what is frozen lie in the
    model file, of which stage 3 has one for each rank too. A flat group is the parameters of one param group that lie
    in the same flat tensors; stage 3 may make several of one param group.

    Attributes:
        nbytes: the size of all files.
        groups: for each param group the names of its parameters, and its options.
        buffers: the model's buffers by name.

    Raises:
        CheckpointError: as `import_checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        files = [PickledFile(file, _NAMES) for file in _optimizer_files(folder)]
        self._optimizers = [(file.content["optimizer_state_dict"], file) for file in files]
        self._optimizer = self._optimizers[0][0]
        # The optimizer for bf16 that sums gradients in fp32 does not say it, and lays everything out as stage 1 does.
        self._stage = self._optimizer["zero_stage"].integer(least=1, most=3) if "zero_stage" in self._optimizer else 1
        self._base = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        # Before the model files are read: a missing optimizer file is named as such.
        self._check_ranks()
        # Stage 3 has a model file for each rank; of the others one, because ranks have the same parameters.
        numbers = [f"zero_pp_rank_{rank}_" for rank in range(len(files))] if self._stage == 3 else [""]
        self._model_files = [PickledFile(folder / f"{rank}mp_rank_00_model_states.pt", _NAMES) for rank in numbers]
        self._file = self._model_files[0]
        self._model = self._file.content
        self.nbytes = sum(file.nbytes for file in (*files, *self._model_files))
        self._shapes = [
            [(name, shape(extents)) for name, extents in named(group).items()]
            for group in self._model["param_shapes"].items()
        ]
        self.groups = [
            ([name for number in numbers for name, _ in self._shapes[number]], options)
            for numbers, options in self._read_groups()
        ]
        names = dict.fromkeys(self._model["buffer_names"].strings())
        self.buffers = {name: self._file.tensor(self._model["module"][name]) for name in names}
        self._flats = self._read_flats()

    def trained(self) -> Iterator[Incoming]:
        """List the parameters that the optimizer has."""
        paddings = self._read_paddings()
        for shapes, flat, padding in zip(self._shapes, self._flats, paddings, strict=True):
            places = partitioned(shapes, flat) if self._stage == 3 else concatenated(shapes, flat, padding)
            for (name, extents), spans in zip(shapes, places, strict=True):
                states = {state: reader(tensors, spans) for state, tensors in flat.states.items()}
                yield Incoming(name, extents, torch.float32, flat.step, reader(flat.master, spans), states)

    def frozen(self) -> Iterator[Incoming]:
        """List the parameters that it has not: whole in the model file, or a fragment in that of each rank."""
        for name, extents, fragments in self._frozen_fragments():
            sizes = [(rank, fragment.numel()) for rank, fragment in enumerate(fragments)]
            if sum(numel for _, numel in sizes) < prod(extents):
                raise self._model.fail(f"has too little of the frozen '{name}'")
            if any(fragment.dtype != fragments[0].dtype for fragment in fragments):
                raise self._model.fail(f"has the frozen '{name}' in several dtypes")
            spans = chained(sizes, 0, prod(extents))
            yield Incoming(name, extents, fragments[0].dtype, 0, reader(fragments, spans), {})

    def extra(self) -> dict[str, Any]:
        """Read DeepSpeed's counts, and the state of its scheduler."""
        kept = [key for key in (*_COUNTS, "lr_scheduler") if self._model.mapping().get(key) is not None]
        return {key: self._file.plain(self._model[key]) for key in kept}

    def _check_ranks(self) -> None:
        """Refuse a folder that lacks the files of some ranks."""
        field = self._optimizer["partition_count"]
        counts = field.items() if isinstance(field.value, list) else [field]  # one for each param group
        for count in counts:
            if count.integer() != len(self._optimizers):
                raise count.fail(f"is {count.value}, and there are optimizer files of {len(self._optimizers)} ranks")

    def _frozen_fragments(self) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
        """Find what is frozen: the name, the shape, and flat tensors that follow each other."""
        if self._stage < 3:
            others = {name for shapes in self._shapes for name, _ in shapes} | self.buffers.keys()
            others |= self._model["shared_params"].mapping().keys()
            for name, field in named(self._model["module"]).items():
                if name not in others:
                    whole = self._file.tensor(field)
                    yield name, tuple(whole.shape), [whole.flatten()]
        elif self._model.mapping().get("frozen_param_shapes"):
            for name, field in named(self._model["frozen_param_shapes"]).items():
                fragments = [_flat(file.content["frozen_param_fragments"][name], file) for file in self._model_files]
                yield name, shape(field), fragments

    def _read_groups(self) -> list[tuple[list[int], dict[str, Any]]]:
        """Read for each param group the numbers of its flat groups, each of which is in one, and its options."""
        groups = []
        known: set[int] = set()
        for group in self._optimizer[self._base]["param_groups"].items():
            numbers = list(group["params"].integers(most=len(self._shapes) - 1))
            if len(known | set(numbers)) < len(known) + len(numbers):
                raise group.fail("has parameters of another group, or some of its own twice")
            known |= set(numbers)
            if group.mapping().get("bias_correction") is False:
                raise group.fail("has bias_correction=False, with which Penstock does not train")
            kept = {key: self._optimizers[0][1].plain(group[key]) for key in group.mapping() if key in OPTIONS}
            groups.append((numbers, kept))
        return groups

    def _read_flats(self) -> list[Flat]:
        """Read the flat groups, each with its tensors on every rank."""
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        masters = [[_flat(item, file) for item in optimizer[key].items()] for optimizer, file in self._optimizers]
        count = len(self._shapes)
        if any(len(of_rank) != count for of_rank in masters):
            raise self._optimizer[key].fail(f"has not the {count} groups that the model file names")
        return [self._read_flat(number, [of_rank[number] for of_rank in masters]) for number in range(count)]

    def _read_flat(self, number: int, master: list[Tensor]) -> Flat:
        """Read the states of one flat group.

        Arguments:
            number: which one it is.
            master: its master weights on each rank, which say how many elements a state must have.
        """
        states: dict[str, list[Tensor]] = {}
        step = 0
        for (optimizer, file), weights in zip(self._optimizers, master, strict=True):
            field = optimizer[self._base]["state"]
            groups: Mapping[Any, Any] = field.mapping()
            if number not in groups:
                raise field.fail(f"has nothing of group {number}")
            of_rank = named(field.inside(number, groups[number]))
            step = file.count(of_rank["step"]) if "step" in of_rank else self._step(optimizer, file, number)
            for name, item in of_rank.items():
                if type(item.value) is Stored and item.value.shape:
                    if name in _NO_STATES:
                        raise item.fail("is no state of an optimizer")
                    value = _flat(item, file)
                    if value.numel() < weights.numel():
                        raise field.fail(f"has {value.numel():,} elements of '{name}' for {weights.numel():,}")
                    states.setdefault(name, []).append(value)
        if not states or any(len(tensors) != len(master) for tensors in states.values()):
            raise self._optimizer[self._base].fail(f"has no state of group {number} on some ranks")
        return Flat(master, states, step)

    def _step(self, optimizer: Field, file: PickledFile, number: int) -> int:
        """Read the step count of a flat group where DeepSpeed's own Adam keeps it: in the param group."""
        groups = optimizer[self._base]["param_groups"]
        for group in groups.items():
            if number in group["params"].integers():
                return file.count(group["step"]) if "step" in group else 0
        raise groups.fail(f"has no group {number}")

    def _read_paddings(self) -> list[Sequence[int]]:
        """Read how many elements stage 1 and 2 leave free after each parameter, by flat group."""
        counts = [len(shapes) for shapes in self._shapes]
        if self._optimizer.mapping().get("param_alignment_paddings") is None:
            return [[0] * count for count in counts]
        paddings = list(self._optimizer["param_alignment_paddings"].items(len(counts)))
        return [field.integers(count) for field, count in zip(paddings, counts, strict=True)]


# Files


def _tag_folder(folder: Path) -> Path:
    """Find a tag's folder: the folder itself, or that of the tag in its file `latest`."""
    if any(_OPTIMIZER_FILE.fullmatch(file.name) for file in folder.glob("*.pt")):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        with latest.open(errors="replace") as file:
            tag = file.read(_MOST_TAG_CHARS).strip()
        if "\0" not in tag and Path(tag).name == tag and (folder / tag).is_dir():
            return folder / tag
    raise refused(
        folder,
        f"{folder} is no checkpoint of DeepSpeed's ZeRO: it has neither *_optim_states.pt nor a 'latest' that names a "
        "folder of it.",
    )


def _optimizer_files(folder: Path) -> list[Path]:
    """List the optimizer files in the order of their ranks."""
    files: dict[int, Path] = {}
    for file in folder.iterdir():
        match = _OPTIMIZER_FILE.fullmatch(file.name)
        if match is None:
            continue
        if int(match[2]):
            raise refused(file, f"{file}: tensor parallelism is not read.")
        files[int(match[1])] = file
    for rank in range(len(files)):
        if rank not in files:
            raise refused(folder, f"{folder} lacks the optimizer's states of rank {rank}.")
    return [files[rank] for rank in sorted(files)]


def _flat(field: Field, file: PickledFile) -> Tensor:
    """Map a tensor of numbers in one dimension."""
    value = file.tensor(field)
    if value.dim() != 1:
        raise field.fail("is not a flat tensor")
    return value
