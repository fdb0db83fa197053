"""The budget of the tests fits the minutes that they may take, and a file that costs more than its own is found."""

from pathlib import Path

import pytest

from tests.budget import (
    BUDGETS,
    CLEARLY,
    LEAST_SECONDS,
    QUICK_SECONDS,
    REST,
    SMALL_SECONDS,
    THOROUGH_SECONDS,
    Costs,
    findings,
)
from tests.costs import cpu_seconds, work_seconds

TESTS = Path(__file__).parents[1]
LARGE = next(iter(BUDGETS))


def test_the_budgets_of_all_files_fit() -> None:
    assert sum(quick for quick, _ in BUDGETS.values()) + REST[0] <= QUICK_SECONDS
    assert sum(thorough for _, thorough in BUDGETS.values()) + REST[1] <= THOROUGH_SECONDS


@pytest.mark.parametrize("name", BUDGETS)
def test_a_file_with_a_budget_is_there(name: str) -> None:
    assert (TESTS / name).is_file()


@pytest.mark.parametrize(
    ("name", "spent", "said", "by_far"),
    [
        (LARGE, Costs(*BUDGETS[LARGE]), False, False),
        (LARGE, Costs(quick=1.2 * BUDGETS[LARGE][0]), True, False),
        (LARGE, Costs(quick=1.1 * (LEAST_SECONDS + CLEARLY * BUDGETS[LARGE][0])), True, True),
        (LARGE, Costs(thorough=1.1 * (LEAST_SECONDS + CLEARLY * BUDGETS[LARGE][1])), True, True),
        ("unit/test_small.py", Costs(quick=0.9 * SMALL_SECONDS), False, False),
        ("unit/test_small.py", Costs(quick=1.5 * SMALL_SECONDS), True, False),
        ("unit/test_small.py", Costs(quick=10 * SMALL_SECONDS), True, True),
    ],
)
def test_a_file_above_its_budget_is_named(name: str, spent: Costs, said: bool, by_far: bool) -> None:
    lines, fails = findings({name: spent})
    assert [f"tests/{name}: " in line for line in lines] == [True] * said
    assert fails == by_far
    assert [line.endswith(", by far") for line in lines] == [by_far] * said


def test_many_small_files_are_one() -> None:
    number = 1 + int(REST[0] / SMALL_SECONDS)
    lines, fails = findings({f"unit/test_{n}.py": Costs(quick=SMALL_SECONDS) for n in range(number)})
    assert [line.split(":")[0] for line in lines] == ["all files without a line"]
    assert not fails


def test_seconds_are_of_the_processor() -> None:
    before = cpu_seconds()
    while work_seconds() and cpu_seconds() < before + 0.05:
        pass
    assert cpu_seconds() >= before + 0.05
