"""The options of `penstock plan`: those of `penstock train` that a step depends on, and those of the machine."""

# ruff: noqa: RUF009 (`option` makes a field, not a default that all settings would share)

import math
import re
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from penstock.cli.keys import key_value
from penstock.cli.options import about_of, check_options, option, option_of, options_of
from penstock.cli.parse import parse_path, parse_size_bytes
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.settings.common import AUTO, MOST_COUNT, OFF, ON, check_paths, count
from penstock.cli.training.settings.state import HOMES, Home
from penstock.errors import ConfigError

_MACHINE, _ANSWER = "The machine", "The answer"
_BATCH = re.compile(r"([0-9]{1,10})x([0-9]{1,10})")
_DIMENSION = re.compile(r"([a-z_]{1,20})=([0-9]{1,8})")
#: Of a machine that one does not have: more disks than any has.
_MOST_FOLDERS = 64
_MOST_DIGITS = 10
_MOST_GPUS, _MOST_HOSTS = 1 << 10, 1 << 16

_size = partial(option, None, panel=_MACHINE, parse=parse_size_bytes, default_help="the machine's")


def parse_batch(text: str, *, option: str) -> tuple[int, int]:
    """Read a micro-batch: sequences of a rank, and tokens of each.

    Raises:
        ConfigError: not two numbers, or out of the range of such.

    Example:
        >>> parse_batch("16x1024", option="--batch")
        (16, 1024)
    """
    match = _BATCH.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text!r} is no micro-batch. Write sequences x tokens, such as 16x1024.")
    sequences, tokens = int(match[1]), int(match[2])
    if sequences < 1 or tokens < 2 or sequences * tokens > MOST_COUNT:
        raise ConfigError(
            f"{option} {text!r}: use 1 sequence or more of 2 tokens or more, at most {MOST_COUNT} in all."
        )
    return sequences, tokens


def _as_in_train(name: str, **other: Any) -> Any:
    """Make a field that is the option of `penstock train` of that name, but for the default and attributes given."""
    each = options_of(TrainConfig)[name]
    default = other.pop("default", each.default)
    return field(default=default, metadata={"option": replace(about_of(each), rivals=(), before=(), **other)})


def parse_mesh(text: str, *, option: str) -> dict[str, int]:
    """Read the sizes of a mesh by the names of its dimensions.

    Raises:
        ConfigError: a dimension has no name or no size, or is there twice.

    Example:
        >>> parse_mesh("dp_replicate=16,dp_shard=8", option="--mesh")
        {'dp_replicate': 16, 'dp_shard': 8}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _DIMENSION.fullmatch(part.strip())
        if match is None or match[1] in found:
            raise ConfigError(
                f"{option} {text[:200]!r} is no mesh. Write each dimension once: dp_replicate=16,dp_shard=8."
            )
        found[match[1]] = int(match[2])
    return found


# Of a home: where the planner puts it.
_home = partial(_as_in_train, default=AUTO)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What is planned. Options that `penstock train` has are called and checked as there.

    Raises:
        ConfigError: a value out of its range. The message names the option of the command line.
    """

    model: str = option("tiny", "A model folder, its config.json or a hub name: no weights are read. Or a preset.")
    batch: tuple[int, int] | None = option(
        None,
        "A micro-batch of a rank: sequences x tokens, such as 16x1024.",
        parse=parse_batch,
        default_help="16x128 for a preset, 4x1024 for a folder",
    )
    accumulation: int | None = _as_in_train("accumulation", panel=None, default_help="1")
    trust_remote_code: bool = _as_in_train("trust_remote_code")
    lora: str = _as_in_train("lora")
    precision: str = _as_in_train("precision")
    chunked_loss: str = _as_in_train("chunked_loss")
    recompute: str = _as_in_train(
        "recompute", default=AUTO, help="Recompute activations in backward. auto: where a step is shorter for it."
    )
    packing: str = _as_in_train("packing", panel="Model")
    pad_vocab_to: int = _as_in_train("pad_vocab_to")
    stage: int = _as_in_train("stage")
    params: Home = _home("params")
    grads: Home = _home("grads")
    optimizer: Home = _home("optimizer")
    activations: str = _home("activations", choices=(AUTO, OFF, "device", "cpu", "nvme"))
    overlap: str = _as_in_train("overlap")
    tile_bytes: int | None = _as_in_train("tile_bytes")
    live_bytes: int | None = _as_in_train("live_bytes")
    prefetch_bytes: int | None = _as_in_train("prefetch_bytes")
    persistent_bytes: int | None = _as_in_train("persistent_bytes")
    pinned_bytes: int | None = _as_in_train("pinned_bytes")
    update_threads: int | None = _as_in_train("update_threads")
    streamed_updates: float | Literal["auto"] | None = _as_in_train("streamed_updates")
    state_dtype: str | None = _as_in_train("state_dtype")
    gather_format: str | None = _as_in_train("gather_format")
    reduce_format: str | None = _as_in_train("reduce_format")
    secondary_shard: int | None = _as_in_train("secondary_shard")
    optimizer_name: str = _as_in_train("optimizer_name")
    optimizer_args: tuple[str, ...] = _as_in_train("optimizer_args")
    max_grad_norm: float | None = _as_in_train("max_grad_norm")
    machine: str = option(
        "",
        "A machine's file, as penstock probe writes it, or the name of one that comes along.",
        _MACHINE,
        default_help="this one, probed once",
    )
    gpus: int = count(1, "Devices of each host, a rank each.", _MACHINE, most=_MOST_GPUS)
    hosts: int = count(1, "Hosts.", _MACHINE, most=_MOST_HOSTS)
    mesh: dict[str, int] | None = option(
        None,
        "The ranks along each dimension, such as dp_replicate=16,dp_shard=8: copies of the state, and their shards.",
        _MACHINE,
        parse=parse_mesh,
        default_help="all share one copy",
    )
    device_memory: int | None = _size(help="Memory of a device, such as 24GiB.")
    host_memory: int | None = _size(help="Memory of a host, such as 128GiB.")
    folders: tuple[str, ...] = option(
        (),
        "Folders of the nvme tier, one for each disk; of a machine that is not this one, also how many.",
        _MACHINE,
        default_help="none, or the machine's",
        many=True,
    )
    what_if: tuple[str, ...] = option(
        (), "Figures of the machine to change: disk_read=7GB/s host_bandwidth=80GB/s.", _MACHINE, many=True
    )
    measure: bool = option(False, "Time each kind of operation on this machine, once, in place of figures.", _MACHINE)
    max_step: float | None = option(
        None, "Seconds that a step may take: exit status 1 where it takes longer.", _ANSWER, default_help="any"
    )
    explain: bool = option(False, "Say what the next best of each choice would have cost.", _ANSWER)
    out: str = option("", "The plan's file to write, for penstock train --plan.", _ANSWER)
    trace: str = option("", "A file to write for Perfetto: the planned step, as optimizer.trace would.", _ANSWER)
    json: bool = option(False, "Print the plan's file, and no table.", _ANSWER)
    compare: tuple[str, ...] = option(
        (), "Two plans' files, shown side by side; nothing is planned.", _ANSWER, many=True
    )

    def __post_init__(self) -> None:
        """Refuse values out of range, by the name of their option."""
        check_options(self)
        check_paths("--model", self.model)
        for name in ("machine", "out", "trace"):
            if value := getattr(self, name):
                parse_path(value, option=option_of(name))
        for name in ("folders", "compare"):
            check_paths(option_of(name), *getattr(self, name))
        if self.max_step is not None and not (self.max_step > 0 and math.isfinite(self.max_step)):
            raise ConfigError(f"--max-step {self.max_step:g} is no time. Use seconds above 0.")
        if self.compare and len(self.compare) != 2:
            raise ConfigError(f"--compare takes two files of plans, and was given {len(self.compare)}. Name two.")
        if self.compare and self.json:
            raise ConfigError("--compare prints no JSON: the plans' files are. Leave --json out.")
        if self.mesh and math.prod(self.mesh.values()) != self.gpus * self.hosts:
            raise ConfigError(
                f"--mesh has {math.prod(self.mesh.values())} ranks, and --gpus {self.gpus} x --hosts {self.hosts} "
                f"says {self.gpus * self.hosts}. Make them agree."
            )
        self._check_folders()
        self.training()

    @property
    def is_given(self) -> bool:
        """Whether a placement is looked at, and none is found."""
        return any(getattr(self, name) != AUTO for name in HOMES)

    @property
    def folder_count(self) -> int | None:
        """How many folders there are to be, where that is all that is said of them."""
        text = self.folders[0] if len(self.folders) == 1 else ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else None

    @property
    def folder_names(self) -> tuple[str, ...]:
        """The folders, with names of ours where they have none yet."""
        counted = self.folder_count
        return self.folders if counted is None else tuple(f"nvme{number}" for number in range(counted))

    def training(self, **other: Any) -> TrainConfig:
        """Make the settings of a run of this kind.

        Arguments:
            other: settings that are known by now, by name.

        Raises:
            ConfigError: a value that a run refuses.
        """
        of_train = {each.name: each.default for each in fields(TrainConfig)}
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name in of_train}
        values |= {name: of_train[name] for name in HOMES if values[name] == AUTO}
        if self.batch is not None:
            values |= {"batch_size": self.batch[0], "seq_length": self.batch[1]}
        del values["out"]
        # Whether a machine has disks at all is known when it is.
        return TrainConfig(**values | {"nvme_path": self.folder_names or ("nvme0",)} | other)

    def _check_folders(self) -> None:
        counted = self.folder_count
        if counted is None:
            return
        if not self.machine:
            raise ConfigError(f"--folders {self.folders[0]} is a number: of this machine, name the folders themselves.")
        if not 1 <= counted <= _MOST_FOLDERS:
            raise ConfigError(f"--folders {self.folders[0]}: use a number from 1 to {_MOST_FOLDERS}, or name folders.")


def told(config: PlanConfig) -> list[str]:
    """List the options of a run for which a plan is made, but for where state lives, as they are typed."""
    words: list[str] = []
    of_train = {each.name: each for each in fields(TrainConfig)}
    for each in fields(config):
        value = getattr(config, each.name)
        shared = of_train.get(each.name)
        if shared is None or each.name in ("model", "out", "precision", *HOMES) or value == shared.default:
            continue
        if each.name == "recompute" and value != ON:
            continue
        if each.type is bool:
            words.append(option_of(each.name))
            continue
        typed = key_value(shared, value)
        words += [option_of(each.name), *(map(str, typed) if isinstance(typed, list) else [str(typed)])]
    return words
