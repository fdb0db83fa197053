"""How evenly ranks work."""

import pytest

from penstock.cli.training.reporting.spread import Spread


@pytest.mark.parametrize(
    ("seconds", "hosts", "said"),
    [
        ((1.0, 1.0, 1.0, 1.5), 2, "rank 3 on host 2 of 2, 50% longer than the median"),
        ((1.0, 2.0, 1.0), 1, "rank 1, 100% longer than the median"),
        ((1.0, 1.1, 1.0), 1, ""),
        ((0.0, 0.0), 1, ""),
        ((0.0, 0.0, 3.0), 1, ""),  # of the others there is no trace
    ],
)
def test_a_slow_rank_is_named_with_its_host(seconds: tuple[float, ...], hosts: int, said: str) -> None:
    assert str(Spread(seconds, hosts)) == said


def test_metrics_have_the_ends_the_middle_and_who() -> None:
    assert Spread((2.0, 5.0, 1.0)).to_dict() == {
        "rank_seconds_least": 1.0,
        "rank_seconds_median": 2.0,
        "rank_seconds_most": 5.0,
        "slowest_rank": 1,
    }
