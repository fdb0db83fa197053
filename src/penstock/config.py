"""Settings: tiers and kinds of state, placements and options. Nothing here imports torch."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.errors import ConfigError, shown

# ----------------------------------------------------------------------------------------------------------------------
# Kinds and tiers of training state. The command line reads them, and must start without torch.
# ----------------------------------------------------------------------------------------------------------------------


TierName = Literal["device", "cpu", "nvme"]
HomeChoice = TierName | Mapping[TierName, float]
KindName = Literal["param", "grad", "master", "optimizer"]
Precision = Literal["fp32", "bf16", "fp16"]
Overlap = Literal["none", "forward", "backward", "auto"]


class UnsaidPrecision(str):
    """The precision of a call without `precision=`: its casts are logged, or refused."""

    __slots__ = ()


#: The default of `precision`.
UNSAID: Precision = UnsaidPrecision("bf16")  # type: ignore[assignment]

PARAM = "param"
GRAD = "grad"
MASTER = "master"
OPTIMIZER = "optimizer"  # every state of the rule, when asking
SECONDARY = "secondary"  # this rank's part, within its node, of a gathered unit
SHADOW = "shadow"  # parameter staging beside an update that does not reach the parameters; its kind is the master
STAGING = "staging"  # buffers that tiles pass through
EMA = "ema"  # an average of the parameters; one with a name is `ema.<name>`
ACTIVATION = "activation"  # tensors that forward saves for backward
LEAVING = "leaving"  # memory of values that are on the way to another tier
KEPT = "kept"  # memory and files without values, kept for the next offload
GATHERED = "gathered"  # device memory of gathered parameters


def average_kind(name: str) -> str:
    """Return the kind of an average of the parameters; that of the average without a name is `ema`."""
    return f"{EMA}.{name}" if name else EMA


def is_average(kind: str) -> bool:
    """Return True if a kind, or the storage that has it alone, is an average of the parameters."""
    return kind == EMA or kind.startswith(f"{EMA}.")


class Tier(StrEnum):
    """A place for bytes: device memory, host memory, or files."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"

    @property
    def is_memory(self) -> bool:
        """True if arithmetic can reach values there. Elsewhere a tile is a record, which passes a buffer."""
        return self is not Tier.NVME


_TIER_SPELLINGS = {
    "device": Tier.DEVICE,
    "gpu": Tier.DEVICE,
    "cuda": Tier.DEVICE,
    "cpu": Tier.CPU,
    "nvme": Tier.NVME,
    "disk": Tier.NVME,
}


def parse_tier(name: object, *, what: str) -> Tier:
    """Read the name of a tier. `gpu` and `cuda` stand for device too, and `disk` for nvme.

    Arguments:
        name: the user's value.
        what: the name of the setting, for the message.

    Raises:
        ConfigError: it is no tier's name.
    """
    tier = _TIER_SPELLINGS.get(name) if isinstance(name, str) else None
    if tier is None:
        raise ConfigError(f"{what}={shown(name)} is not a tier. Use one of 'device', 'cpu', 'nvme'.")
    return tier


def parse_home(home: object, *, what: str) -> dict[Tier, float]:
    """Read a placement of one kind: a tier's name, or a mapping of tiers to fractions that sum to 1.

    Arguments:
        home: the user's value.
        what: the name of the setting, for the message.

    Returns:
        The tiers with a fraction above zero, each with its fraction.

    Raises:
        ConfigError: a tier is unknown or named twice, a fraction is negative or not finite, or the sum is not 1 (within
            1e-6).
    """
    if not isinstance(home, Mapping):
        return {parse_tier(home, what=what): 1.0}
    fractions: dict[Tier, float] = {}
    for name, fraction in home.items():
        tier = parse_tier(name, what=what)
        if tier in fractions:
            raise ConfigError(f"{what}={dict(home)!r} names the tier '{tier}' twice. Give each tier one fraction.")
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ConfigError(f"{what}[{shown(name)}]={shown(fraction)} is not a fraction. Use a number from 0 to 1.")
        fractions[tier] = float(fraction)
    total = sum(fractions.values())
    if abs(total - 1) > 1e-6:
        raise ConfigError(f"The fractions of {what}={dict(home)!r} sum to {total:g}. Make them sum to 1.")
    return {tier: fraction for tier, fraction in fractions.items() if fraction > 0}


# ----------------------------------------------------------------------------------------------------------------------
# Settings as values: the tier of each kind of state, and the sizes that bound the work.
# ----------------------------------------------------------------------------------------------------------------------


#: The form of parameters in all-gathers: values, or codes of a wire format (`rules/wire.py`).
GatherFormat = Literal["exact", "int8", "fp8"]
#: The form of gradients in reductions over shards.
ReduceFormat = Literal["exact", "int8", "int4"]

MIB = 1 << 20
GIB = 1 << 30
DEFAULT_LIVE_BYTES = 4 * GIB
MIN_TILE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tier of each kind of training state.

    Arguments:
        params: tier of the compute-dtype parameters: `"device"`, `"cpu"` or `"nvme"` (`"gpu"`, `"cuda"` and `"disk"`
            are read too), or fractions of their bytes such as `{"device": 0.5, "cpu": 0.5}`.
        grads: tier of the reduced gradients.
        optimizer: tier of the master weights and of every optimizer state.
        activations: tier of the tensors that forward saves for backward; `None` leaves them to the model and torch.
        nvme_path: the folder or folders in which the nvme tier keeps its files.

    Raises:
        ConfigError: a tier is unknown, fractions do not sum to 1, or what should be a folder is none.

    Example:
        >>> Placement(params="cpu", optimizer="cpu").optimizer
        'cpu'
    """

    params: HomeChoice = "device"
    grads: HomeChoice = "device"
    optimizer: HomeChoice = "device"
    activations: TierName | None = None
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None

    def __post_init__(self) -> None:
        """Refuse unknown tiers and fractions that do not sum to 1."""
        for what in ("params", "grads", "optimizer"):
            self.home(what)
        if self.activations is not None:
            parse_tier(self.activations, what="activations")
        given: Any = self.nvme_path
        for folder in given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]:
            if not (isinstance(folder, str | os.PathLike) or folder is given is None):
                raise ConfigError(f"nvme_path={shown(given)}: use a folder, a list of folders, or None.")

    @classmethod
    def twin_flow(cls, ratio: float, **kwargs: Any) -> "Placement":
        """Split the optimizer's state between cpu and device, which then update their parts at the same time.

        Arguments:
            ratio: the share of the bytes that is on the cpu, from 0 to 1; the rest is on the device.
            kwargs: the other arguments of `Placement`.

        Raises:
            ConfigError: `ratio` is no such share.

        Example:
            >>> Placement.twin_flow(0.25).optimizer
            {'cpu': 0.25, 'device': 0.75}

        Source: Twin-Flow of ZeRO-Offload++ (DeepSpeed, 2023).
        """
        if not 0 <= ratio <= 1:
            raise ConfigError(f"twin_flow(ratio={shown(ratio)}) is not a fraction. Use a number from 0 to 1.")
        return cls(optimizer={"cpu": ratio, "device": 1 - ratio}, **kwargs)

    def nvme_folders(self) -> list[Path]:
        """Return the folders of the nvme tier; an empty list if none was named."""
        given = self.nvme_path
        if given is None:
            return []
        return [Path(path) for path in ([given] if isinstance(given, str | os.PathLike) else given)]

    def home(self, what: str) -> dict[Tier, float]:
        """Return the tiers of a kind of state, each with its fraction.

        Arguments:
            what: "params", "grads" or "optimizer".
        """
        return parse_home(getattr(self, what), what=what)


def _whole(default: int | None, *, least: int) -> Any:
    """Declare an option that is a whole number with a least value, or `None` if its type allows that."""
    return field(default=default, metadata={"least": least})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes (always in bytes) and policies. Every default works for every model.

    Arguments:
        prefetch_bytes: the most bytes of parameters that are gathered ahead of their use. With 0 each unit is gathered
            when it is needed.
        live_bytes: the most bytes of parameters that are gathered at once. The default grows to what the largest unit
            needs.
        persistent_bytes: the size up to which a parameter stays gathered between uses.
        tile_bytes: the size of a tile of parameters in the compute dtype: the grain of updates and of movement between
            tiers.
        device_bytes: the memory of the device that training state may take, activations apart; `None` for what is
            free. `prepare` refuses what takes more.
        pinned_bytes: the host memory that may be pinned; `None` for all that a device copies. What goes beyond it is
            pageable, and passes a few pinned buffers on its way to the device and back, which is slower.
        host_bytes: the memory that the ranks of a host may take of it together; `None` for what the kernel and the
            container call available, which leaves out what the kernel could still give up. `prepare` refuses what takes
            more.
        update_threads: the number of threads of the update on the host; `None` shares the cores among the ranks of this
            host, and takes no more than the container's quota of time. Where there are several NUMA nodes and the
            launcher has not bound the process to one, they run on the cores of the device's node.
        streamed_updates: the share of the updates of tiles whose optimizer state rests on the cpu or on nvme that the
            device does, from 0 to 1: their state comes up and goes down again, through a ring of three slots (768 MiB
            at most), while the host updates the others. `"auto"` measures both sides in the first steps and keeps what
            it finds. Where the device rounds otherwise than the host (a warning says so), state a number for a run that
            has to be repeated bit by bit. No effect where the device is a cpu.
        whole_updates: where parameters are updated by a rule that looks at whole ones (Muon), if its states rest on the
            cpu or on nvme: `"device"` brings them up and down again, one parameter after the other through a ring of
            three slots, since a product of matrices is what a device is for; `"home"` updates them where they rest, on
            the host. No effect where the device is a cpu.
        io_queue_depth: how many requests may be in flight for each folder of the nvme tier.
        checksums: whether stored tiles have a checksum, which is compared when they are read.
        on_nonfinite: whether a step whose gradient norm is not finite is skipped, or raises `EngineError`.
        max_skipped_steps: how many steps may be skipped in a row before `EngineError` is raised; `None` for any number.
            In fp16 only those count in which the loss scale could not fall any more.
        reduce_op: whether gradients are averaged or summed over ranks.
        state_dtype: how the optimizer's states are stored: `"int8"` is a dynamic 8-bit map with one fp32 scale for
            each block of 256 (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).
        rounding: how states in bf16, and bf16 parameters with `master="none"`, are rounded: to nearest, or
            stochastically, which lets updates smaller than half a bf16 step count on average.
        rounding_seed: the seed of stochastic rounding; the same seed gives the same bits in every placement and world
            size.
        initial_loss_scale: the first loss scale of fp16.
        dynamic_loss_scale: whether the loss scale of fp16 is adapted. It does not fall below 1.
        timeout_s: how long a rank waits for the others before it raises, in seconds; in `prepare` at most 300.
        debug_release: for tests of models and loops: release every unit after each use and fill its memory with NaN,
            also where compute could read it in place, and on a cpu run all movement late, on threads. What reads
            parameters where it must not gets a wrong number then, on one rank and any machine. Slow; the results are
            the same. The environment variable `PENSTOCK_DEBUG_RELEASE=1` does it for every `prepare`.
        cast_inputs: whose floating-point inputs are cast to the compute dtype, also in containers that pytree knows.
            `"units"`: those of the outermost call and of every unit's module (FSDP2's `cast_forward_inputs`), and,
            wherever it stands, what a layer of `torch.nn` would refuse for its dtype: so fp32 buffers may take part
            before. `"model"`: those of the outermost call alone, for models that hand fp32 values to their blocks on
            purpose. `"none"`: nothing is cast.
        gather_format: what the all-gathers of stage 3 carry. `"exact"`: the parameters as they are. `"int8"`, `"fp8"`:
            codes of blocks of 256 elements and a scale for each, 0.508 of the bytes of bf16; forward and backward
            compute with the rounded values, the same on every rank, and updates, looks, saves and exports with exact
            ones (qwZ of ZeRO++; docs/compressed.md). It changes results. No effect where one rank has all parameters.
        reduce_format: what the reductions of gradients over shards carry. `"exact"`: the gradients as they are.
            `"int8"`, `"int4"`: codes of blocks of 256 elements and a scale for each, 0.508 or 0.258 of the bytes of
            bf16, summed in fp32: first among the ranks of a node, then among nodes, rounded once on each way (qgZ of
            ZeRO++; docs/compressed.md). Sums over copies stay exact. It changes results. No effect on one rank.
        secondary_shard: of how many neighbours among the shard ranks a node consists; each rank keeps its part, one of
            so many, of every unit that forward has gathered, until the next update, so that backward gathers inside
            the node alone (hpZ of ZeRO++). Stage 3 alone; results are the same, bit for bit. `None` keeps nothing.
            Where it is not given, the nodes of `reduce_format` are hosts (`LOCAL_WORLD_SIZE`).

    Raises:
        ConfigError: a value is out of its range; the message names it.

    Example:
        >>> Options(tile_bytes=1 << 20, state_dtype="bf16").checksums
        True
    """

    prefetch_bytes: int = _whole(1 * GIB, least=0)
    live_bytes: int = _whole(DEFAULT_LIVE_BYTES, least=1)
    persistent_bytes: int = _whole(0, least=0)
    tile_bytes: int = _whole(4 * MIB, least=MIN_TILE_BYTES)
    device_bytes: int | None = _whole(None, least=1)
    pinned_bytes: int | None = _whole(None, least=0)
    host_bytes: int | None = _whole(None, least=1)
    update_threads: int | None = _whole(None, least=1)
    streamed_updates: float | Literal["auto"] = 0.0
    whole_updates: Literal["device", "home"] = "device"
    io_queue_depth: int = _whole(16, least=1)
    checksums: bool = True
    on_nonfinite: Literal["skip", "raise"] = "skip"
    max_skipped_steps: int | None = _whole(100, least=1)
    reduce_op: Literal["mean", "sum"] = "mean"
    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    rounding_seed: int = _whole(0, least=0)
    initial_loss_scale: float = 65536.0
    dynamic_loss_scale: bool = True
    debug_release: bool = False
    timeout_s: float = 600.0
    cast_inputs: Literal["units", "model", "none"] = "units"
    gather_format: GatherFormat = "exact"
    reduce_format: ReduceFormat = "exact"
    secondary_shard: int | None = _whole(None, least=2)

    def __post_init__(self) -> None:
        """Refuse values out of range, by name."""
        hints = get_type_hints(Options)
        for option in fields(self):
            name, value, hint = option.name, getattr(self, option.name), hints[option.name]
            least = option.metadata.get("least")
            is_none = value is None and type(None) in get_args(hint)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if least is not None and not is_none and not (is_number and value >= least):
                unit = " of bytes" if name.endswith("_bytes") else ""
                raise ConfigError(f"Options({name}={shown(value)}): use a whole number{unit}, {least} or more.")
            choices = (True, False) if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
            if choices and value not in choices:
                raise ConfigError(f"Options({name}={shown(value)}): use one of {', '.join(map(repr, choices))}.")
        share: Any = self.streamed_updates
        if share != "auto" and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1):
            raise ConfigError(f"Options(streamed_updates={shown(share)}): use a number from 0 to 1, or 'auto'.")
        for name in ("initial_loss_scale", "timeout_s"):
            number: Any = getattr(self, name)
            if not (isinstance(number, int | float) and number > 0 and math.isfinite(number)):
                raise ConfigError(f"Options({name}={shown(number)}): use a finite number above 0.")

    @property
    def nodes(self) -> int | Literal["host"] | None:
        """The nodes of the shard ranks: of so many ranks, or hosts; `None` if no option needs nodes."""
        return self.secondary_shard or (None if self.reduce_format == "exact" else "host")
