import pytest

from penstock.planner.machine import Machine, Rate
from penstock.planner.what_if import Upgrade, what_ifs


def machine(**figures: float) -> Machine:
    return Machine("a desktop", "cuda", {name: Rate(value, value, value, "made up") for name, value in figures.items()})


WHOLE = machine(folders=1, disk_read=4.0, host_bandwidth=40.0, update=20.0, update_adamw=30.0, h2d=10.0, d2h=10.0)


def step_s(there: Machine) -> float:
    """A step that reads, updates and uploads, one after the other."""
    return (
        8 / (there.value("disk_read") * there.value("folders"))
        + 60 / there.value("update_adamw")
        + 5 / there.value("h2d")
    )


def test_each_change_is_timed_and_the_best_comes_first() -> None:
    found = what_ifs(WHOLE, step_s(WHOLE), step_s, rules=["adamw"])
    saved = {each.what_if.name: each.saved_s for each in found}
    assert list(saved.items()) == [
        ("a second disk", pytest.approx(1.0)),
        ("host memory twice as fast", pytest.approx(1.0)),
        ("a link to the device twice as fast", pytest.approx(0.25)),
        ("8-bit states", None),
        ("a batch twice as large", None),
    ]
    assert found[0].share == pytest.approx(1.0 / 4.5)


def test_the_machine_itself_stays_as_it_is() -> None:
    before = dict(WHOLE.figures)
    what_ifs(WHOLE, 1.0, step_s, rules=["adamw"])
    assert WHOLE.figures == before


def test_figures_that_a_machine_lacks_are_not_asked_for() -> None:
    there = machine(host_bandwidth=40.0)
    asked = [each.what_if.name for each in what_ifs(there, 1.0, lambda better: 1.0) if each.saved_s is not None]
    assert asked == ["host memory twice as fast"]


def test_the_rule_has_its_own_figure() -> None:
    seen: list[float] = []

    def retime(better: Machine) -> float:
        seen.append(better.value("update_adamw"))
        return 1.0

    memory = Upgrade("memory", ("update", "update_*"))
    what_ifs(WHOLE, 1.0, retime, rules=["adamw"], among=[memory])
    what_ifs(WHOLE, 1.0, retime, rules=["lion"], among=[memory])
    assert seen == [60.0, 30.0]
