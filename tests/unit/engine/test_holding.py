"""The state of a gathered unit: what may follow what, and who holds it."""

import pytest

from penstock.engine.unit.unit import Holder, UnitHolders, UnitState

R = UnitState
MAY_FOLLOW = {
    (R.RELEASED, R.GATHERING),
    (R.RELEASED, R.OUTDATED),
    (R.OUTDATED, R.GATHERING),
    (R.OUTDATED, R.RELEASED),
    (R.OUTDATED, R.OUTDATED),
    (R.GATHERING, R.GATHERED),
    (R.GATHERING, R.OUTDATED),
    (R.GATHERING, R.RELEASED),
    (R.GATHERED, R.OUTDATED),
    (R.GATHERED, R.RELEASED),
}


@pytest.mark.parametrize("before", UnitState)
@pytest.mark.parametrize("after", UnitState)
def test_transitions_are_checked(before: UnitState, after: UnitState) -> None:
    holding = UnitHolders()
    holding.unit_state = before
    if (before, after) in MAY_FOLLOW:
        holding.become(after)
        assert holding.unit_state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} -> {after.name}"):
            holding.become(after)


@pytest.mark.parametrize("holder", Holder)
def test_each_holder_counts_until_it_lets_go(holder: Holder) -> None:
    holding = UnitHolders()
    assert not holding.is_held
    holding.take(holder)
    holding.take(holder)
    holding.drop(holder)
    assert holding.is_held
    holding.drop(holder)
    assert not holding.is_held
    with pytest.raises(AssertionError, match="does not hold"):
        holding.drop(holder)
    holding.take(holder)
    holding.drop_all(holder)
    assert not holding.is_held


def test_one_holder_does_not_let_go_for_another() -> None:
    holding = UnitHolders()
    for holder in Holder:
        holding.take(holder)
    for holder in Holder:
        assert holding.is_held
        holding.drop(holder)
    assert not holding.is_held


def test_a_block_shows_the_buffer() -> None:
    holding = UnitHolders()
    holding.take(Holder.FORWARD)
    assert not holding.shown
    holding.take(Holder.BLOCK)
    holding.drop(Holder.BLOCK)
    assert holding.shown
