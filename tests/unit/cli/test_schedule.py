import pytest

from penstock.cli.training.schedule import FLOOR, warmup_cosine


def test_linear_up_then_a_cosine_down_to_the_floor() -> None:
    factor = warmup_cosine(warmup=4, steps=14)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1
    assert factor(9) == pytest.approx((1 + FLOOR) / 2)
    assert factor(14) == pytest.approx(FLOOR)
    assert factor(100) == pytest.approx(FLOOR)
    after = [factor(step) for step in range(4, 15)]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 5)])
def test_edges(warmup: int, steps: int) -> None:
    factor = warmup_cosine(warmup=warmup, steps=steps)
    assert factor(steps - 1) == 1
