"""What a step would take on a slightly better machine: one figure, or a few, at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeVar


class Machine(Protocol):
    """A machine as `penstock.planner.Machine` is one: figures, and another machine with some of them changed."""

    def value(self, name: str) -> float:
        """Give a figure."""

    def has(self, name: str) -> bool:
        """Whether there is a figure."""

    def replace(self, **figures: float) -> Self:
        """Give the same machine with other figures."""


AnyMachine = TypeVar("AnyMachine", bound=Machine)


@dataclass(frozen=True)
class Upgrade:
    """A change that somebody could make.

    Attributes:
        name: what it is, in words.
        figures: those that become twice what they are; of "update_*" those of the rules that are asked for.
        needs: "figures" where the same work is timed anew; "simulation" where the work itself is another.
    """

    name: str
    figures: tuple[str, ...] = ()
    needs: Literal["figures", "simulation"] = "figures"


@dataclass(frozen=True)
class Saving:
    """What a change would come to.

    Attributes:
        what_if: the change.
        saved_s: seconds that a step is shorter by; `None` where that needs a simulation.
        share: the same as a share of the step.
    """

    what_if: Upgrade
    saved_s: float | None = None
    share: float | None = None


#: A second disk takes half of what the first one does, as a disk that is twice as fast would. Where memory is twice as
#: fast updates are, too: they do little but read and write it.
UPGRADES: Sequence[Upgrade] = (
    Upgrade("a second disk", ("disk_read", "disk_write", "disk_mixed")),
    Upgrade("host memory twice as fast", ("host_bandwidth", "update", "update_*")),
    Upgrade("a link to the device twice as fast", ("h2d", "d2h", "h2d_pageable", "d2h_pageable", "duplex")),
    Upgrade("links between ranks twice as fast", ("link_bandwidth", "net_bandwidth")),
    Upgrade("8-bit states", needs="simulation"),
    Upgrade("a batch twice as large", needs="simulation"),
)


def what_ifs(
    machine: AnyMachine,
    step_s: float,
    retime: Callable[[AnyMachine], float],
    *,
    rules: Sequence[str] = (),
    among: Sequence[Upgrade] = UPGRADES,
) -> list[Saving]:
    """Measure what each change saves: most comes first, and what needs a simulation last, as it was given.

    Arguments:
        machine: what there is.
        step_s: seconds of a step on it.
        retime: gives the seconds of the same step on another machine.
        rules: the optimizer's, whose updates may have figures of their own: "adamw".
        among: the changes; those of figures that the machine does not have are left out.

    Example:
        >>> from penstock.planner.machine import Figure, Machine
        >>> machine = Machine("a desktop", "cuda", {"disk_read": Figure(3e9, 3e9, 3e9, "a data sheet")})
        >>> [second, *_] = what_ifs(machine, 2.0, lambda better: 1.0 + 3e9 / better.value("disk_read"))
        >>> second.what_if.name, second.saved_s
        ('a second disk', 0.5)
    """
    timed, untimed = list[Saving](), list[Saving]()
    for upgrade in among:
        if upgrade.needs == "simulation":
            untimed.append(Saving(upgrade))
            continue
        names = {name for figure in upgrade.figures for name in _spell(figure, rules) if machine.has(name)}
        if names:
            better = machine.replace(**{name: 2 * machine.value(name) for name in sorted(names)})
            saved = max(0.0, step_s - retime(better))
            timed.append(Saving(upgrade, saved, saved / step_s if step_s > 0 else 0.0))
    return [*sorted(timed, key=lambda saving: -(saving.saved_s or 0.0)), *untimed]


def _spell(figure: str, rules: Sequence[str]) -> list[str]:
    return [figure.replace("*", rule) for rule in rules] if "*" in figure else [figure]
