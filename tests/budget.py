"""What each file of tests may cost, in CPU seconds of a quiet machine: in `make test`, and in `make test-thorough`.

Two cores do 720 of them in the 6 minutes that `make test` may take, and 960 in the 8 of `make test-thorough`. A file
that has grown gets cheaper rows, or marks some `thorough`, before it gets a larger budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass

QUICK_SECONDS, THOROUGH_SECONDS = 600, 800  # of all files together
CLEARLY = 2.0  # times a budget fail the run; less is reported
LEAST_SECONDS = 3.0  # more than the budget, that is: what small files take is chance

#: Of files that are not in `BUDGETS`: of each, and of all of them together.
SMALL_SECONDS = 3.0
REST = (60.0, 20.0)


@dataclass
class Costs:
    """CPU seconds of the rows that are not marked `thorough`, and of those that are."""

    quick: float = 0.0
    thorough: float = 0.0

    def add(self, seconds: float, thorough: bool) -> None:
        if thorough:
            self.thorough += seconds
        else:
            self.quick += seconds


#: By file, below `tests/`: of `make test`, and of `make test-thorough`.
BUDGETS: dict[str, tuple[float, float]] = {}


def findings(costs: Mapping[str, Costs]) -> tuple[list[str], bool]:
    """Compare what files have cost, by their names below `tests/`, with their budgets.

    Returns:
        A line for each file that is above, and whether one is by far.
    """
    lines, fails = [], False
    small = Costs()
    for name, spent in sorted(costs.items()):
        if name not in BUDGETS:
            small.add(spent.quick, False)
            small.add(spent.thorough, True)
        budget = BUDGETS.get(name, (SMALL_SECONDS, SMALL_SECONDS))
        found = _above(f"tests/{name}", spent, budget)
        lines += [line for line, _ in found]
        fails |= any(by_far for _, by_far in found)
    found = _above("all files without a line", small, REST)
    lines += [line for line, _ in found]
    return lines, fails or any(by_far for _, by_far in found)


def _above(name: str, spent: Costs, budget: tuple[float, float]) -> list[tuple[str, bool]]:
    found = []
    for kind, seconds, most in (
        ("make test", spent.quick, budget[0]),
        ("make test-thorough", spent.thorough, budget[1]),
    ):
        if seconds > most:
            by_far = seconds > max(CLEARLY * most, most + LEAST_SECONDS)
            found.append((f"{name}: {seconds:.1f} of {most:g} in {kind}" + (", by far" if by_far else ""), by_far))
    return found
