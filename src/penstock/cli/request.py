"""What `penstock plan` is asked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli import values
from penstock.errors import ConfigError

_MODEL, _LEARNING, _MACHINE, _ANSWER = "Model", "Learning", "The machine", "The answer"
_STATE = "Where state lives (tiers: device, cpu, nvme) and when it moves"
_MOST_COUNT = (1 << 31) - 1
#: Of a machine that one does not have: more disks than any has.
_MOST_FOLDERS = 64
#: What a plan decides unless it is named.
HOMES = ("params", "grads", "optimizer", "activations")

Switch = Literal["auto", "on", "off"]
OptimizerName = Literal[
    "adamw", "adam", "sgd", "adagrad", "lion", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd", "rprop"
]


def batch_size(text: str) -> tuple[int, int]:
    """Read a micro-batch: sequences of a rank, and tokens of each.

    Raises:
        typer.BadParameter: not two numbers, or out of their range.

    Example:
        >>> batch_size("16x1024")
        (16, 1024)
    """
    sequences, _, tokens = text.strip().partition("x")
    found = [int(part) if part.isascii() and part.isdigit() and len(part) < 11 else 0 for part in (sequences, tokens)]
    if found[0] < 1 or found[1] < 2 or found[0] * found[1] > _MOST_COUNT:
        raise typer.BadParameter(
            f"{text[:80]!r} is no micro-batch. Write sequences x tokens, such as 16x1024: 1 or more of 2 or more."
        )
    return found[0], found[1]


def mesh_sizes(text: str) -> dict[str, int]:
    """Read the sizes of a mesh by the names of its dimensions: `dp_replicate=16,dp_shard=8`.

    Raises:
        typer.BadParameter: a dimension has no name or no size, or is there twice.
    """
    return values.pairs(text, int, "dp_replicate=16,dp_shard=8")


def _option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _home(text: str) -> Any:
    return _option(_STATE, text, parser=values.storage, metavar="TIER")


def _memory(text: str) -> Any:
    return _option(_MACHINE, text, parser=values.size, metavar="SIZE", show_default="the machine's")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked: each field is an option of the command.

    Raises:
        ConfigError: two options contradict each other.
    """

    model: Annotated[
        str, _option(None, "A model folder, its config.json or a hub name: no weights are read. Or a preset.")
    ] = "tiny"
    batch: Annotated[
        Any,
        _option(
            None,
            "A micro-batch of a rank: sequences x tokens, such as 16x1024.",
            parser=batch_size,
            metavar="NxL",
            show_default="16x128 for a preset, 4x1024 for a folder",
        ),
    ] = None
    accumulation: Annotated[int, _option(None, "Micro-batches per step.", min=1, max=_MOST_COUNT)] = 1
    trust_remote_code: Annotated[
        bool, _option(None, "Run the model folder's own code, which can do anything you can.", "--trust-remote-code")
    ] = False
    lora: Annotated[
        str, _option(_MODEL, "Train adapters beside the frozen model: r=16,alpha=32,targets=q_proj+v_proj,base=int8.")
    ] = ""
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        _option(_MODEL, "auto: bf16 where the machine's devices compute in it."),
    ] = "auto"
    chunked_loss: Annotated[
        Switch, _option(_MODEL, "Train without whole logits. auto: where the model's class is known to allow it.")
    ] = "auto"
    recompute: Annotated[
        Switch, _option(_MODEL, "Recompute activations in backward. auto: where a step is shorter for it.")
    ] = "auto"
    packing: Annotated[
        Switch, _option(_MODEL, "Several rows in a sequence. auto: where the model keeps them apart.")
    ] = "auto"
    pad_vocab_to: Annotated[
        int, _option(_MODEL, "Grow the vocabulary to a multiple of this.", min=1, max=_MOST_COUNT)
    ] = 1
    stage: Annotated[int, _option(_STATE, "ZeRO stage.", min=0, max=3)] = 3
    params: Annotated[Any, _home("Tier of the parameters, or fractions: device=0.5,cpu=0.5.")] = "auto"
    grads: Annotated[Any, _home("Tier of the gradients.")] = "auto"
    optimizer: Annotated[Any, _home("Tier of the master weights and optimizer states.")] = "auto"
    activations: Annotated[
        Literal["auto", "off", "device", "cpu", "nvme"], _option(_STATE, "Tier of what forward saves for backward.")
    ] = "auto"
    overlap: Annotated[Literal["none", "forward", "backward", "auto"], _option(_STATE, "When updates run.")] = "auto"
    options: Annotated[
        list[str] | None, _option(_STATE, "A field of penstock.Options, once for each: tile_bytes=4MiB.")
    ] = None
    optimizer_name: Annotated[OptimizerName, _option(_LEARNING, "The optimizer.")] = "adamw"
    optimizer_args: Annotated[
        list[str] | None, _option(_LEARNING, "An argument of its class, once for each: eps=1e-6.")
    ] = None
    max_grad_norm: Annotated[float, _option(_LEARNING, "Clip the gradient's norm to this; 0 does not clip.", min=0)] = (
        1.0
    )
    machine: Annotated[
        str,
        _option(
            _MACHINE,
            "A machine's file, as penstock probe writes it, or the name of one that comes along.",
            show_default="this one, probed once",
        ),
    ] = ""
    gpus: Annotated[int, _option(_MACHINE, "Devices of each host, a rank each.", min=1, max=1 << 10)] = 1
    hosts: Annotated[int, _option(_MACHINE, "Hosts.", min=1, max=1 << 16)] = 1
    mesh: Annotated[
        Any,
        _option(
            _MACHINE,
            "The ranks along each dimension, such as dp_replicate=16,dp_shard=8: copies of the state, and shards.",
            parser=mesh_sizes,
            metavar="DIM=N,...",
            show_default="all share one copy",
        ),
    ] = None
    device_memory: Annotated[Any, _memory("Memory of a device, such as 24GiB.")] = None
    host_memory: Annotated[Any, _memory("Memory of a host, such as 128GiB.")] = None
    folders: Annotated[
        list[Path] | None,
        _option(
            _MACHINE,
            "A folder of the nvme tier, once for each disk; of a machine that is not this one, also how many.",
            parser=values.path,
            show_default="none, or the machine's",
        ),
    ] = None
    tbw: Annotated[
        Any,
        _option(
            _MACHINE,
            "TB that may be written to a disk in its life: TBW of its data sheet.",
            parser=values.terabytes,
            metavar="TB",
            show_default="the machine's",
        ),
    ] = None
    what_if: Annotated[
        list[str] | None, _option(_MACHINE, "A figure of the machine to change, once for each: disk_read=7GB/s.")
    ] = None
    measure: Annotated[
        bool, _option(_MACHINE, "Time each kind of operation on this machine, once, in place of figures.", "--measure")
    ] = False
    max_step: Annotated[
        Any,
        _option(
            _ANSWER,
            "Seconds that a step may take: exit status 1 where it takes longer.",
            parser=values.seconds,
            show_default="any",
        ),
    ] = None
    explain: Annotated[bool, _option(_ANSWER, "Say what the next best of each choice would cost.", "--explain")] = False
    out: Annotated[
        Path | None, _option(_ANSWER, "The plan's file to write, for penstock train --plan.", parser=values.path)
    ] = None
    trace: Annotated[
        Path | None,
        _option(
            _ANSWER, "A file to write for Perfetto: the planned step, as optimizer.trace would.", parser=values.path
        ),
    ] = None
    json: Annotated[bool, _option(_ANSWER, "Print the plan's file, and no table.", "--json")] = False
    compare: Annotated[
        tuple[Path, Path] | None,
        _option(_ANSWER, "Two plans' files: what differs, and what is the same; nothing is planned."),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if self.compare and self.json:
            raise ConfigError("--compare prints no JSON: the plans' files are. Leave --json out.")
        ranks = self.gpus * self.hosts
        if self.mesh and math.prod(self.mesh.values()) != ranks:
            raise ConfigError(
                f"--mesh has {math.prod(self.mesh.values())} ranks, and --gpus {self.gpus} x --hosts {self.hosts} "
                f"says {ranks}. Make them agree."
            )
        counted = self.folder_count
        if counted is not None and not self.machine:
            raise ConfigError(f"--folders {counted} is a number: of this machine, name the folders themselves.")
        if counted is not None and not 1 <= counted <= _MOST_FOLDERS:
            raise ConfigError(f"--folders {counted}: use a number from 1 to {_MOST_FOLDERS}, or name folders.")

    @property
    def is_given(self) -> bool:
        """True if a placement is looked at, and none is searched for."""
        return any(getattr(self, name) != "auto" for name in HOMES)

    @property
    def folder_count(self) -> int | None:
        """The number of folders, if nothing else is said of them."""
        text = str(self.folders[0]) if self.folders and len(self.folders) == 1 else ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    @property
    def folder_names(self) -> tuple[str, ...]:
        """The folders; with made up names if only their number is said."""
        counted = self.folder_count
        return tuple(map(str, self.folders or ())) if counted is None else tuple(f"nvme{n}" for n in range(counted))
