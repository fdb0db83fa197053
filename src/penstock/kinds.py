"""The columns and the tiers of the table of training state.

The command line reads them for its options, and does not wait for torch: nothing here imports it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from penstock.errors import ConfigError, shown

TierName = Literal["device", "cpu", "nvme"]
HomeChoice = TierName | Mapping[TierName, float]
KindName = Literal["param", "grad", "master", "optimizer"]
Precision = Literal["fp32", "bf16", "fp16"]
Overlap = Literal["none", "forward", "backward", "auto"]


class UnsaidPrecision(str):
    """The precision of a call that names none: what it casts is logged, or refused."""

    __slots__ = ()


#: What `precision` is by default.
UNSAID: Precision = UnsaidPrecision("bf16")  # type: ignore[assignment]

PARAM = "param"
GRAD = "grad"
MASTER = "master"
OPTIMIZER = "optimizer"  # every state of the rule, when asking
SECONDARY = "secondary"  # this rank's part, among those of its node, of what was gathered
SHADOW = "shadow"  # a home: parameters beside the update, where it cannot reach them; its kind is the master
STAGING = "staging"  # buffers that cells pass through
EMA = "ema"  # an average of the parameters; one with a name is `ema.<name>`
ACTIVATION = "activation"  # what forward saves for backward
LEAVING = "leaving"  # memory of cells whose values are on the way to another tier
KEPT = "kept"  # memory and files without values that the next move of state takes again
GATHERED = "gathered"  # device memory of gathered parameters: a use of cells, not a cell


def average_kind(name: str) -> str:
    """Name the kind of an average of the parameters; the average without a name is `ema`."""
    return f"{EMA}.{name}" if name else EMA


def is_average(kind: str) -> bool:
    """Whether a kind, or the home that has it alone, is an average of the parameters."""
    return kind == EMA or kind.startswith(f"{EMA}.")


class Tier(StrEnum):
    """Where bytes can be."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"

    @property
    def is_memory(self) -> bool:
        """Whether arithmetic can reach values there. Elsewhere a tile is a record, which passes a buffer."""
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
        name: what the user gave.
        what: the name of the setting, for the message.

    Raises:
        ConfigError: it is no tier's name.
    """
    tier = _TIER_SPELLINGS.get(name) if isinstance(name, str) else None
    if tier is None:
        raise ConfigError(f"{what}={shown(name)} is not a tier. Use one of 'device', 'cpu', 'nvme'.")
    return tier


def parse_home(home: object, *, what: str) -> dict[Tier, float]:
    """Read a home: a tier's name, or a mapping of tiers to fractions that sum to 1.

    Arguments:
        home: what the user gave.
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
