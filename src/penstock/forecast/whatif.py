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
class WhatIf:
    """A change that somebody could make.

    Attributes:
        name: what it is, in words.
        figures: those that become twice what they are.
        needs: "figures" where the same work is timed anew; "rehearsal" where the work itself is another.
    """

    name: str
    figures: tuple[str, ...] = ()
    needs: Literal["figures", "rehearsal"] = "figures"


@dataclass(frozen=True)
class Answer:
    """What a change would come to.

    Attributes:
        what_if: the change.
        saved_s: seconds that a step is shorter by; `None` where that needs a rehearsal.
        share: the same as a share of the step.
    """

    what_if: WhatIf
    saved_s: float | None
    share: float | None


#: A second disk takes half of what the first one does, as twice as fast a disk would. Where memory is twice as fast updates are, too: they do little but
#: read and write it.
WHAT_IFS: Sequence[WhatIf] = (
    WhatIf("a second disk", ("disk_read", "disk_write", "disk_mixed")),
    WhatIf("host memory twice as fast", ("host_bandwidth", "update", "update_*")),
    WhatIf("a link twice as fast", ("h2d", "d2h", "h2d_pageable", "d2h_pageable", "duplex")),
    WhatIf("links between ranks twice as fast", ("link_bandwidth", "net_bandwidth")),
    WhatIf("8-bit states", needs="rehearsal"),
    WhatIf("a batch twice as large", needs="rehearsal"),
)


def what_ifs(
    machine: AnyMachine,
    step_s: float,
    retime: Callable[[AnyMachine], float],
    *,
    rules: Sequence[str] = (),
    among: Sequence[WhatIf] = WHAT_IFS,
) -> list[Answer]:
    """Time a step anew for each change, what saves most first; then what needs a rehearsal, in the order given.

    Arguments:
        machine: what there is.
        step_s: seconds of a step on it.
        retime: gives the seconds of the same step on another machine.
        rules: the rules whose updates have a figure of their own: "adamw".
        among: the changes; those of figures that the machine does not have are left out.
    """
    timed, untimed = list[Answer](), list[Answer]()
    for what_if in among:
        if what_if.needs == "rehearsal":
            untimed.append(Answer(what_if, None, None))
            continue
        names = [name for figure in what_if.figures for name in _spell(figure, rules) if machine.has(name)]
        if names:
            better = machine.replace(**{name: 2 * machine.value(name) for name in names})
            saved = max(0.0, step_s - retime(better))
            timed.append(Answer(what_if, saved, saved / step_s if step_s > 0 else 0.0))
    return [*sorted(timed, key=lambda answer: -(answer.saved_s or 0.0)), *untimed]


def _spell(figure: str, rules: Sequence[str]) -> list[str]:
    return [figure.replace("*", rule) for rule in rules] if "*" in figure else [figure]
