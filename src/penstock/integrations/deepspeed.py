"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3, as they lie on the disk, made into ones of Penstock.

Where a parameter lies in them: `integrations.partitions`.

Its files are pickles (`integrations.pickled`): the few classes of DeepSpeed in them become plain values or are ignored,
and nothing else is read. No size is believed: tensors lie in the files, and what is written is about as large.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.fields import Field
from penstock.checkpoint.importing import Incoming, write_checkpoint
from penstock.errors import CheckpointError, PenstockError, one_line
from penstock.integrations.partitions import Flat, chained, concatenated, partitioned, reader
from penstock.integrations.pickled import PickledFile, mapping, named, shape

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
#: Kinds of a checkpoint that are the weights.
_NO_STATES = frozenset(("param", "master"))
_MOST_TAG_CHARS = 256
#: A checkpoint of Penstock is of about the size of what it is made of; of many small parameters it can be larger.
_BYTES_OF_ANY = 1 << 26
_MOST_GROWTH = 16
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
    try:
        saved = _Saved(_tag_folder(folder))
        parameters = [*saved.trained(), *saved.frozen()]
        _check_distinct(folder, parameters)
        write_checkpoint(
            Path(out),
            parameters,
            rule="DeepSpeed's optimizer",
            groups=saved.groups(),
            buffers=saved.buffers(),
            extra=saved.extra(),
            most_bytes=_BYTES_OF_ANY + _MOST_GROWTH * saved.nbytes,
        )
    except PenstockError:
        raise
    except Exception as error:  # files say anything, and so does what they make of torch
        raise CheckpointError(f"{folder} is not read: {one_line(error)}.", file=str(folder)) from error


def _check_distinct(folder: Path, parameters: Sequence[Incoming]) -> None:
    known: set[str] = set()
    for parameter in parameters:
        if parameter.name in known:
            raise CheckpointError(
                f"{folder} has the parameter '{one_line(parameter.name, 200)}' twice.", file=str(folder)
            )
        known.add(parameter.name)


class _Saved:
    """One tag's folder.

    Attributes:
        nbytes: of its files.

    Raises:
        CheckpointError: as `import_checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        self._optimizer_files = [PickledFile(file, _STAND_INS) for file in _optimizer_files(folder)]
        self._optimizers = [file.content["optimizer_state_dict"] for file in self._optimizer_files]
        self._stage = self._optimizers[0]["zero_stage"].integer(least=1, most=3)
        self._check_ranks()
        files = _model_files(folder, self._stage, len(self._optimizers))
        self._model_files = [PickledFile(file, _STAND_INS) for file in files]
        self._models = [file.content for file in self._model_files]
        self.nbytes = sum(file.nbytes for file in (*self._optimizer_files, *self._model_files))
        self._base = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        self._shapes = [
            [(name, shape(extents)) for name, extents in named(group).items()]
            for group in self._models[0]["param_shapes"].items()
        ]
        self._groups = self._read_groups()
        self._buffers = self._read_buffers()
        self._flats = self._read_flats()

    def _check_ranks(self) -> None:
        field = self._optimizers[0]["partition_count"]
        counts = field.items() if isinstance(field.value, list) else [field]  # one for each param group
        if any(count.integer() != len(self._optimizers) for count in counts):
            raise field.fail(f"is {field.value}, and there are optimizer files of {len(self._optimizers)} ranks")

    def trained(self) -> Iterator[Incoming]:
        """The parameters that the optimizer has."""
        paddings = self._read_paddings()
        for shapes, flat, padding in zip(self._shapes, self._flats, paddings, strict=True):
            places = partitioned(shapes, flat) if self._stage == 3 else concatenated(shapes, flat, padding)
            for (name, extents), spans in zip(shapes, places, strict=True):
                states = {state: reader(tensors, spans) for state, tensors in flat.states.items()}
                yield Incoming(name, extents, torch.float32, flat.step, reader(flat.master, spans), states)

    def frozen(self) -> Iterator[Incoming]:
        """The parameters that it has not: whole in the model file, or a fragment in that of each rank."""
        model, file = self._models[0], self._model_files[0]
        sources: list[tuple[str, tuple[int, ...], list[Tensor]]] = []
        if self._stage < 3:
            others = {name for shapes in self._shapes for name, _ in shapes} | self._buffers.keys()
            others |= mapping(model["shared_params"]).keys()
            for name, field in named(model["module"]).items():
                if name not in others:
                    whole = file.tensor(field)
                    sources.append((name, tuple(whole.shape), [whole.flatten()]))
        elif mapping(model).get("frozen_param_shapes"):
            for name, field in named(model["frozen_param_shapes"]).items():
                pairs = zip(self._models, self._model_files, strict=True)
                fragments = [_flat(m["frozen_param_fragments"][name], f) for m, f in pairs]
                sources.append((name, shape(field), fragments))
        for name, extents, fragments in sources:
            sizes = [(rank, fragment.numel()) for rank, fragment in enumerate(fragments)]
            if sum(numel for _, numel in sizes) < prod(extents):
                raise model.fail(f"has too little of the frozen '{name}'")
            if any(fragment.dtype != fragments[0].dtype for fragment in fragments):
                raise model.fail(f"has the frozen '{name}' in several dtypes")
            spans = chained(sizes, 0, prod(extents))
            yield Incoming(name, extents, fragments[0].dtype, 0, reader(fragments, spans), {})

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """The names of each param group's parameters, and its options."""
        return [
            ([name for number in numbers for name, _ in self._shapes[number]], options)
            for numbers, options in self._groups
        ]

    def buffers(self) -> dict[str, Tensor]:
        """Of the model's state."""
        return self._buffers

    def extra(self) -> dict[str, Any]:
        """DeepSpeed's counts, and the state of its scheduler."""
        model, file = self._models[0], self._model_files[0]
        kept = [key for key in (*_COUNTS, "lr_scheduler") if mapping(model).get(key) is not None]
        return {key: file.plain(model[key]) for key in kept}

    def _read_groups(self) -> list[tuple[list[int], dict[str, Any]]]:
        """By param group: the numbers of its flat groups, each of which is in one, and its options."""
        groups = []
        known: set[int] = set()
        for group in self._optimizers[0][self._base]["param_groups"].items():
            numbers = list(group["params"].integers(most=len(self._shapes) - 1))
            if len(known | set(numbers)) < len(known) + len(numbers):
                raise group.fail("has parameters of another group, or some of its own twice")
            known |= set(numbers)
            options = mapping(group)
            if options.get("bias_correction") is False:
                raise group.fail("has bias_correction=False, with which Penstock does not train")
            kept = {key: self._optimizer_files[0].plain(group[key]) for key in options if key in _OPTIONS}
            groups.append((numbers, kept))
        return groups

    def _read_buffers(self) -> dict[str, Tensor]:
        model, file = self._models[0], self._model_files[0]
        names = dict.fromkeys(model["buffer_names"].strings())
        return {name: file.tensor(model["module"][name]) for name in names}

    def _read_flats(self) -> list[Flat]:
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        pairs = list(zip(self._optimizers, self._optimizer_files, strict=True))
        masters = [[_flat(item, file) for item in optimizer[key].items()] for optimizer, file in pairs]
        count = len(self._shapes)
        if any(len(of_rank) != count for of_rank in masters):
            raise self._optimizers[0][key].fail(f"has not the {count} groups that the model file names")
        steps = [self._steps(optimizer, file) for optimizer, file in pairs]
        return [self._read_flat(number, [of_rank[number] for of_rank in masters], steps) for number in range(count)]

    def _read_flat(self, number: int, master: list[Tensor], steps: Sequence[Mapping[int, int]]) -> Flat:
        states: dict[str, list[Tensor]] = {}
        step = 0
        for rank, (optimizer, file) in enumerate(zip(self._optimizers, self._optimizer_files, strict=True)):
            field = optimizer[self._base]["state"]
            found = mapping(field)
            if number not in found:
                raise field.fail(f"has nothing of group {number}")
            of_rank = named(Field(field.file, number, found[number], field))
            if "step" not in of_rank and number not in steps[rank]:
                raise optimizer[self._base]["param_groups"].fail(f"has no group {number}")
            step = file.count(of_rank["step"]) if "step" in of_rank else steps[rank][number]
            for name, item in of_rank.items():
                if isinstance(item.value, Tensor) and item.value.dim() > 0:
                    if name in _NO_STATES:
                        raise item.fail("is no state of an optimizer")
                    value = _flat(item, file)
                    if value.numel() < master[rank].numel():
                        raise field.fail(f"has {value.numel():,} elements of '{name}' for {master[rank].numel():,}")
                    states.setdefault(name, []).append(value)
        if not states or any(len(tensors) != len(master) for tensors in states.values()):
            raise self._optimizers[0][self._base].fail(f"has no state of group {number} on some ranks")
        return Flat(master, states, step)

    def _steps(self, optimizer: Field, file: PickledFile) -> Mapping[int, int]:
        """By flat group, where DeepSpeed's own Adam keeps it: in the param group."""
        return {
            number: file.count(group["step"]) if "step" in mapping(group) else 0
            for group in optimizer[self._base]["param_groups"].items()
            for number in group["params"].integers()
        }

    def _read_paddings(self) -> list[Sequence[int]]:
        """Elements that stage 1 and 2 leave free after each parameter, by flat group."""
        counts = [len(shapes) for shapes in self._shapes]
        optimizer = self._optimizers[0]
        if mapping(optimizer).get("param_alignment_paddings") is None:
            return [[0] * count for count in counts]
        paddings = list(optimizer["param_alignment_paddings"].items(len(counts)))
        return [field.integers(count) for field, count in zip(paddings, counts, strict=True)]


# Files


def _tag_folder(folder: Path) -> Path:
    """The folder itself, or that of the tag in its file `latest`."""
    if any(_OPTIMIZER_FILE.fullmatch(file.name) for file in folder.glob("*.pt")):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        with latest.open(errors="replace") as file:
            tag = file.read(_MOST_TAG_CHARS).strip()
        if "\0" not in tag and Path(tag).name == tag and (folder / tag).is_dir():
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
    for rank in range(len(files)):
        if rank not in files:
            raise CheckpointError(f"{folder} lacks the optimizer's states of rank {rank}.", file=str(folder))
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


def _flat(field: Field, file: PickledFile) -> Tensor:
    """A tensor of numbers in one dimension."""
    value = file.tensor(field)
    if value.is_complex() or value.dim() != 1:
        raise field.fail("is not a flat tensor")
    return value
